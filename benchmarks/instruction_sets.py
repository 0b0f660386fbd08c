"""Instruction sets of one machine side by side: the same model, in one process, in turns.

    python benchmarks/instruction_sets.py --models s135 l1b --kinds bf16 --isas avx512_amx avx512_vnni_bf16

Checkpoints of random weights in the shapes of published models are made in --work. Every round measures all
cases on all instruction sets, beginning with another one each time; medians count, and the ratio of the first
instruction set to each other one is that of the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from peers import checkpoints

from quire import LLM, SamplingParams
from quire.backends.native import _core

CASES = {"prompt of 512": (1, 512, 1), "1 stream": (1, 16, 32), "8 streams": (8, 16, 32)}
CASES |= {"16 streams": (16, 16, 32), "32 streams": (32, 16, 32)}


def load(path: Path, kind: str, isa: str, threads: int | None) -> LLM:
    """The model with the kernels of one instruction set."""
    os.environ["QUIRE_ISA"] = isa
    try:
        return LLM(
            str(path),
            quantization=None if kind == "bf16" else kind,
            num_threads=threads,
            max_model_len=1024,
            max_num_seqs=32,
            enable_prefix_caching=False,
            speculative="off",
        )
    finally:
        del os.environ["QUIRE_ISA"]


def speed(llm: LLM, case: str) -> float:
    """Tokens a second: of the prompt until the first token, or of all streams from the first token on."""
    streams, num_prompt, num_output = CASES[case]
    words = [[300 + (i + j) % 1000 for j in range(num_prompt)] for i in range(streams)]
    prompts = [{"prompt_token_ids": ids} for ids in words]
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    metrics = [output.metrics for output in llm.generate(prompts, params, use_tqdm=False)]
    if num_output == 1:
        return num_prompt / (metrics[0].first_token_s - metrics[0].arrival_s)
    seconds = max(m.finished_s for m in metrics) - max(m.first_token_s for m in metrics)
    return streams * (num_output - 1) / seconds


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--models", nargs="+", default=["s135"], choices=sorted(checkpoints.SHAPES))
    parser.add_argument("--kinds", nargs="+", default=["int4", "int8", "bf16"])
    parser.add_argument("--isas", nargs="+", default=_core.isas()[:2])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    checkpoints.add_work_option(parser)
    options = parser.parse_args()
    for model in options.models:
        path = checkpoints.make(model, options.work)
        for kind in options.kinds:
            llms = {isa: load(path, kind, isa, options.threads) for isa in options.isas}
            found = {(isa, case): [] for isa in options.isas for case in options.cases}
            for number in range(options.rounds + 1):
                turn = number % len(options.isas)
                for case in options.cases:
                    for isa in options.isas[turn:] + options.isas[:turn]:
                        value = speed(llms[isa], case)
                        if number:  # the first round warms up
                            found[isa, case].append(value)
            print(f"{model} {kind}, tokens a second; ratio of {options.isas[0]} to each")
            for case in options.cases:
                first = found[options.isas[0], case]
                cells = []
                for isa in options.isas:
                    values = found[isa, case]
                    ratio = statistics.median(a / b for a, b in zip(first, values, strict=True))
                    cells.append(f"{isa} {statistics.median(values):,.0f} ({ratio:.2f})")
                print(f"  {case:<16}" + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
