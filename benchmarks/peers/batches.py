"""The common part of llama.cpp and its forks: one model, batches of token ids for one context, greedy."""

from __future__ import annotations

import time
from abc import abstractmethod
from pathlib import Path

from gguf_conversion import write_gguf
from worker import Engine

BATCH = 512  # tokens of one batch at most
Row = tuple[int, int, int, bool]  # a token, its position, its sequence, and whether the next token is wanted


class BatchEngine(Engine):
    """An engine with a context that is made anew, before the clock runs, when a measure needs another.

    A checkpoint that is no GGUF file is converted.
    """

    made_for = (0, 0)

    @abstractmethod
    def make_context(self, streams: int, length: int) -> None:
        """Replace the context by one for so many sequences, each with a cache of so many tokens."""

    @abstractmethod
    def clear(self) -> None:
        """Empty the caches of all sequences."""

    @abstractmethod
    def compute(self, rows: list[Row]) -> list[int]:
        """Compute a batch; the likeliest next token of each wanted row."""

    def prepare(self, checkpoint: Path, target: Path, kind: str) -> Path:
        if checkpoint.suffix == ".gguf":
            return checkpoint
        path = target.with_name(target.name + ".gguf")
        if not path.exists():
            partial = path.with_name(path.name + ".partial")
            write_gguf(checkpoint, partial, kind)
            partial.rename(path)
        return path

    def generate(self, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
        wanted = len(prompts), max(map(len, prompts)) + num_new + 1
        if self.made_for != wanted:
            self.make_context(*wanted)
            self.made_for = wanted
        self.clear()
        begin = time.perf_counter()
        tokens = self._prompts(prompts)
        first = time.perf_counter()
        for step in range(num_new):
            rows = [
                (token, len(prompt) + step, stream, True)
                for stream, (token, prompt) in enumerate(zip(tokens, prompts, strict=True))
            ]
            tokens = self.compute(rows)
        return first - begin, time.perf_counter() - first

    def _prompts(self, prompts: list[list[int]]) -> list[int]:
        """Compute all prompts in batches; their first tokens."""
        rows = [
            (token, position, stream, position == len(prompt) - 1)
            for stream, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens = []
        for start in range(0, len(rows), BATCH):
            tokens += self.compute(rows[start : start + BATCH])
        return tokens
