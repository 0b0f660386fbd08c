"""Synthetic prompts: token ids that cost nothing to draw, and are equal where those of a live load are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.bench.workload import Content, PromptVocabulary


@dataclass(frozen=True, slots=True)
class BlockVocabulary(PromptVocabulary):
    """The vocabulary of simulated prompts: one token id for each seed, repeated.

    Parts drawn from equal seeds have equal tokens, so prefixes are shared as in a live run of the same load.
    No step looks at the ids, and the simulated engine does not bound them.
    """

    ids: dict[str, int] = field(default_factory=dict)  # by seed

    def draw(self, parts: Iterable[tuple[int, str]]) -> Content:
        """Return a prompt of parts, each a number of tokens and the seed that they stand for."""
        prompt: list[int] = []
        for count, seed in parts:
            prompt += [self.ids.setdefault(seed, len(self.ids) + 1)] * count
        return prompt
