"""Tokens a second of the reference backend on the embedded model: a prompt, one stream, many streams.

    python benchmarks/reference_speed.py [--rounds 5]

Medians. Every round asks anew with the prefix cache off, so nothing is found computed.
"""

from __future__ import annotations

import argparse
import statistics
import time

from quire import LLM, SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64


def seconds(llm: LLM, num_prompts: int, num_prompt_tokens: int, num_output_tokens: int) -> float:
    """Time of one generate call, with different prompts of one length."""
    prompts = [[100 + (i + j) % 1000 for j in range(num_prompt_tokens)] for i in range(num_prompts)]
    params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    llm = LLM("demo", device="reference", enable_prefix_caching=False, speculative="off")
    cases = {f"prompt of {PROMPT_TOKENS}": (1, PROMPT_TOKENS, 1, PROMPT_TOKENS)}
    for streams in (1, 4, 16, 64):
        cases[f"decode, {streams} streams"] = (streams, 16, OUTPUT_TOKENS, streams * OUTPUT_TOKENS)
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (streams, num_prompt, num_output, counted) in cases.items():
            speeds[name].append(counted / seconds(llm, streams, num_prompt, num_output))
    for name, values in speeds.items():
        print(f"{name:22} {statistics.median(values):9,.0f} tokens/s   least {min(values):9,.0f}")


if __name__ == "__main__":
    main()
