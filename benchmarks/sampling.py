"""The cost of sampling a step: all rows in one call of the native core, next to one read of their logits.

    python benchmarks/sampling.py [--threads N] [--repeats N]

Logits are normal numbers of deviation 3, of which top-p 0.9 at temperature 0.8 keeps some hundred tokens. The
half-open grammar allows every second token, at random. Penalties have prompts of 500 tokens. The floor is a
read of the same bytes, by as many threads, as `quire probe` measures it. "pipeline" is the definition in
NumPy, row by row, on one thread. Times are the least of the repeats, as others may share the machine; "in
Python" is what is spent on either side of the call.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.backends.native import _core
from quire.backends.native.device import usable_cores
from quire.backends.native.sampling import row_results, slot_params
from quire.sampling.pipeline import SamplerState, sample
from quire.sampling_params import SamplingParams
from quire.types import Admission

VOCABULARIES = (32_000, 128_256)
ROWS = (1, 64)
TOP_P = {"temperature": 0.8, "top_p": 0.9}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
CASES: dict[str, tuple[dict[str, Any], bool]] = {  # parameters; whether there is a grammar
    "greedy": ({"temperature": 0}, False),
    "top-p": (TOP_P, False),
    "top-p, penalties": ({**TOP_P, **PENALTIES}, False),
    "greedy, grammar": ({"temperature": 0}, True),
    "top-p, grammar": (TOP_P, True),
}


def least_s(call: Callable[[], Any], repeats: int) -> float:
    def once() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(repeats))


class Batch:
    """Rows of one kind, admitted to a sampler and, for comparison, to the pipeline in NumPy."""

    def __init__(self, logits: np.ndarray, values: dict[str, Any], ruled: bool, threads: int) -> None:
        count, vocab_size = logits.shape
        rng = np.random.default_rng(1)
        self.logits = logits
        self.mask = rng.integers(0, 2**32, -(-vocab_size // 32), np.uint32) if ruled else None
        self.sampler = _core.Sampler(_core.isas()[0], vocab_size, count, threads)
        self.states = []
        for slot in range(count):
            params = SamplingParams(seed=slot, max_tokens=None, **values)
            admission = Admission(slot, "r", 0, params, (2,), 500)
            prompt = rng.integers(0, vocab_size, 500).tolist()
            self.sampler.admit(admission.slot, slot_params(admission, self.sampler.vocab_size), prompt)
            self.states.append(SamplerState(admission, prompt, vocab_size))
        masks = None if self.mask is None else [self.mask]
        self.rows = [(slot, 0, (), slot, (), masks) for slot in range(count)]

    def native(self) -> Sequence[Any]:
        return row_results(self.sampler.sample(self.logits, self.rows))

    def pipeline(self) -> Sequence[Any]:
        return [
            sample(row, state, mask=self.mask) for row, state in zip(self.logits, self.states, strict=True)
        ]


def python_s(batch: Batch, repeats: int) -> float:
    """Measure the overhead of the call in Python: that of as many rows of a tiny vocabulary."""
    tiny = Batch(np.zeros((len(batch.rows), 8), np.float32), {"temperature": 0}, False, 1)
    return least_s(tiny.native, repeats)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--repeats", type=int, default=41)
    args = parser.parse_args()
    print(f"{processor()}, {_core.isas()[0]}, {args.threads} threads")
    for vocab_size in VOCABULARIES:
        noise = np.random.default_rng(0).normal(size=(max(ROWS), vocab_size)) * 3
        every = noise.astype(np.float32)
        for count in ROWS:
            logits = every[:count]
            probe = args.threads, _core.isas()[0], logits.nbytes, 0.02
            floor_ms = logits.nbytes / max(_core.read_bandwidth(*probe) for _ in range(10)) * 1e3
            print(f"\n{count} rows of {vocab_size}, one read of the logits: {floor_ms:.4f} ms")
            for name, (values, ruled) in CASES.items():
                batch = Batch(logits, values, ruled, args.threads)
                native_ms = least_s(batch.native, args.repeats) * 1e3
                pipeline_ms = least_s(batch.pipeline, max(1, args.repeats // 10)) * 1e3
                inside_us = python_s(batch, args.repeats) * 1e6
                print(
                    f"{name:20} {native_ms:8.3f} ms  {native_ms / floor_ms:5.1f} reads"
                    f"  in Python {inside_us:4.0f} us  pipeline {pipeline_ms:8.2f} ms"
                )


if __name__ == "__main__":
    main()
