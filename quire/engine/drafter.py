"""The interface of what proposes tokens from texts; drafts of grammars and models come with results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.types import Draft, NewRequest, Output


class Drafter(Protocol):
    """Proposes tokens that may follow those of running sequences, in a time of at most 50 us a step."""

    def add(self, request: NewRequest) -> None:
        """Take a request, before any output of it."""

    def observe(self, outputs: Iterable[Output]) -> None:
        """Take the outputs of a step: new tokens of sequences, and their ends."""

    def propose(self, names: Sequence[tuple[str, int]]) -> list[tuple[Draft, ...]]:
        """Return the drafts of these sequences, (request id, sequence) each: of every source at most one."""
