"""A runner that makes a model say given texts: in each position only the text's next token is allowed.

So the steps, drafts and verification of a model of random weights are those of a model that writes these
texts. The engine knows nothing of it: requests have no grammar. It costs a mask a position, a few
microseconds, with drafts and without.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.backends.backend import LaunchedStep
from quire.build import Built
from quire.types import Draft, Row, RowResult, Step, StepResult

Mask = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Said:
    """The tokens of a request: those of its prompt, then those that it is made to say."""

    token_ids: tuple[int, ...]
    seed: int


class ForcedRunner:
    """Launches steps on a backend. `said` are the texts of the open requests, by id.

    With `right`, proposals of a draft model are replaced by the text's tokens, each of which is wrong with a
    probability of 1 - `right`; the draft model computes as it would.
    """

    def __init__(self, built: Built) -> None:
        self.said: dict[str, Said] = {}
        self.right: float | None = None
        self._backend = built.backend
        self._vocab_size = built.description.model.config.vocab_size
        self._slots: dict[int, Said] = {}
        self._buffers: list[tuple[Mask, list[int]]] = []  # and the word that is not 0

    def launch(self, step: Step) -> LaunchedStep:
        """Start a step after those launched before it; it has at most one of these in flight."""
        for slot in step.released:
            self._slots.pop(slot, None)
        for admission in step.admitted:
            if (said := self.said.get(admission.request_id)) is not None:
                self._slots[admission.slot] = said
        rows = [(i, row) for i, row in enumerate(step.rows) if row.sample and row.slot in self._slots]
        if not rows:
            return self._backend.launch(step)
        pending = self._backend.launch(step, lambda: self._masks(rows))
        return pending if self.right is None else _Replaced(self, step, pending)

    def _masks(self, rows: Sequence[tuple[int, Row]]) -> Mapping[int, list[Mask]]:
        found: dict[int, list[Mask]] = {}
        number = 0
        for index, row in rows:
            text, next_token = self._slots[row.slot].token_ids, row.start + row.count - len(row.drafted)
            found[index] = []
            for place in range(next_token, next_token + len(row.drafted) + 1):
                token = text[place] if place < len(text) else 0
                found[index].append(self._only(number, token))
                number += 1
        return found

    def _only(self, number: int, token: int) -> Mask:
        """Return a mask of one token, in the buffer of this number."""
        if number == len(self._buffers):
            self._buffers.append((np.zeros(-(-self._vocab_size // 32), np.uint32), [0]))
        mask, word = self._buffers[number]
        mask[word[0]] = 0
        word[0] = token // 32
        mask[word[0]] = 1 << token % 32
        return mask

    def propose(self, row: Row, result: RowResult) -> RowResult:
        """Replace the draft model's tokens after a row."""
        said = self._slots.get(row.slot)
        if said is None or not any(draft.source == "model" for draft in result.drafts):
            return result
        begin = row.start + row.count - len(row.drafted) + len(result.token_ids)
        drafts = tuple(
            self._right(said, begin, draft) if draft.source == "model" else draft for draft in result.drafts
        )
        return result._replace(drafts=drafts)

    def _right(self, said: Said, begin: int, draft: Draft) -> Draft:
        assert self.right is not None
        tokens = []
        for place in range(begin, begin + len(draft.token_ids)):
            token = said.token_ids[place] if place < len(said.token_ids) else 0
            is_right = random.Random(f"{said.seed} {place}").random() < self.right
            tokens.append(token if is_right else (token + 1) % self._vocab_size)
        return draft._replace(token_ids=tuple(tokens))


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A step whose draft model's tokens are replaced."""

    runner: ForcedRunner
    step: Step
    pending: LaunchedStep

    def result(self) -> StepResult:
        result = self.pending.result()
        rows = tuple(map(self.runner.propose, self.step.rows, result.rows))
        return replace(result, rows=rows)
