"""The cost of adapters of requests: throughput with one for each row, and streams while one is loaded.

    python benchmarks/adapters.py                    s135, int4, 64 rows, 50 adapters of rank 16 on q, k, v, o
    python benchmarks/adapters.py --adapters 8 --dtype F32 --targets q_proj v_proj

Rounds take turns between an engine without adapters and one that has them, whose requests have none, all the
same one, or different ones in turns. Then streams run while adapters are loaded and unloaded in another
thread of the process: the gaps between tokens, with and without. The server does the same in the engine's
process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from peers import checkpoints

from quire import LLM, SamplingParams
from quire.bench.report import columns
from quire.config import EngineConfig
from quire.description import describe
from quire.weights.safetensors_writer import DTYPES, SafetensorsWriter

HEADING = ["requests have", "tokens/s", "of no adapters", "least", "most"]


def write(
    folder: Path, number: int, options: argparse.Namespace, weights: dict[str, tuple[int, ...]]
) -> None:
    """Write one adapter with random matrices."""
    folder.mkdir(parents=True)
    draw, arrays = np.random.default_rng(number), {}
    for name, (out, width) in weights.items():
        for part, shape in (("lora_A", (options.rank, width)), ("lora_B", (out, options.rank))):
            values = draw.standard_normal(shape, np.float32) * np.float32(0.02)
            arrays[f"base_model.model.{name}.{part}.weight"] = values.astype(DTYPES[options.dtype])
    entries = {name: (options.dtype, array.shape) for name, array in arrays.items()}
    writer = SafetensorsWriter(folder / "adapter_model.safetensors", entries, {"format": "pt"})
    for name, array in arrays.items():
        writer.write(name, array)
    writer.close()
    config = {"peft_type": "LORA", "r": options.rank, "lora_alpha": 2 * options.rank, "bias": "none"}
    text = json.dumps(config | {"target_modules": options.targets})
    (folder / "adapter_config.json").write_text(text)


def shapes(built: Path, targets: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the targeted modules of a checkpoint."""
    specs = describe(EngineConfig(model=str(built))).program.weights()
    ends = tuple(f".{target}.weight" for target in targets)
    return {name.removesuffix(".weight"): spec.shape for name, spec in specs.items() if name.endswith(ends)}


def throughput(llm: LLM, options: argparse.Namespace, adapters: list[str | None]) -> float:
    """Return the tokens that all rows together get in a second of decoding."""
    draw = np.random.default_rng(1)
    prompts = draw.integers(300, 40_000, (options.rows, 16)).tolist()
    params = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True, detokenize=False)
    llm.engine.records.clear()
    llm.generate(prompts, params, use_tqdm=False, lora_request=adapters if any(adapters) else None)
    steps = [one.device_s for one in llm.engine.records if one.num_tokens == one.num_rows == options.rows]
    return options.rows / statistics.median(steps)


def compare(plain: LLM, adapted: LLM, options: argparse.Namespace) -> list[list[str]]:
    """Return the rows of a table, from rounds in which all cases take turns."""
    names = [f"a{number % options.adapters}" for number in range(options.rows)]
    cases: dict[str, tuple[LLM, list[str | None]]] = {
        "no adapters (none loaded)": (plain, [None]),
        "no adapters": (adapted, [None]),
        "the same adapter": (adapted, ["a0"] * options.rows),
        f"{options.adapters} adapters in turns": (adapted, [*names]),
    }
    found: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(options.rounds + 1):
        for case, (llm, adapters) in cases.items():
            speed = throughput(llm, options, adapters)
            if number:  # the first round warms up
                found[case].append(speed)
    first, rows = next(iter(found.values())), []
    for case, speeds in found.items():
        ratios = [speed / other for speed, other in zip(speeds, first, strict=True)]
        shares = [f"{ratio:.3f}" for ratio in (statistics.median(ratios), min(ratios), max(ratios))]
        rows.append([case, f"{statistics.median(speeds):,.0f}", *shares])
    return rows


def longest_gap(llm: LLM, options: argparse.Namespace, loads: bool) -> tuple[float, int]:
    """Return the longest time between two steps of streams, and how many adapters were loaded meanwhile."""
    over, num_loaded = threading.Event(), 0

    def load() -> None:
        nonlocal num_loaded
        while loads and not over.wait(0.05):
            llm.adapters.unload("a0")
            num_loaded += 1
            llm.adapters.load("a0", f"a{num_loaded % options.adapters}")

    params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [[300 + number] * 8 for number in range(options.streams)]
    thread = threading.Thread(target=load)
    thread.start()
    times: dict[str, list[float]] = {}
    for output in llm.stream(prompts, params, lora_request="a1"):
        times.setdefault(output.request_id, []).append(time.perf_counter())
    over.set()
    thread.join()
    gaps = (after - before for own in times.values() for before, after in pairwise(own[1:]))
    return max(gaps), num_loaded


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default="s135", choices=sorted(checkpoints.SHAPES))
    parser.add_argument("--quantization", default="int4", choices=("int4", "int8"))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=50)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="BF16", choices=("BF16", "F16", "F32"))
    parser.add_argument("--targets", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    checkpoints.add_work_option(parser)
    options = parser.parse_args()
    model = checkpoints.make(options.model, options.work)
    weights = shapes(model, options.targets)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.adapters):
            write(Path(folder) / f"a{number}", number, options, weights)
        how = {"quantization": options.quantization, "max_model_len": 1024, "max_num_seqs": options.rows}
        with LLM(str(model), speculative="off", **how) as plain:
            began_s = time.perf_counter()
            with LLM(str(model), speculative="off", adapter_dir=folder, **how) as adapted:
                nbytes = statistics.mean(own.nbytes for own in adapted.adapters.loaded)
                print(f"{options.adapters} adapters of {nbytes / 1e6:.1f} MB, rank {options.rank}")
                print(f"loaded in {time.perf_counter() - began_s:.1f} s, with the model")
                print(columns([HEADING, *compare(plain, adapted, options)]), flush=True)
                for loads in (False, True, False, True):
                    gap_s, loaded = longest_gap(adapted, options, loads)
                    print(
                        f"{options.streams} streams, {loaded} adapters loaded: {1e3 * gap_s:.1f} ms at most"
                    )


if __name__ == "__main__":
    main()
