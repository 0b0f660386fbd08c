"""Verification that is wrong on purpose, in the ways of other engines: rounds must notice each of them.

Every fault is a patch of the reference backend, or of the scheduler above it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from exactness.automata import Walk
from quire.backends import slots
from quire.backends.slots import Slot
from quire.engine.caches import Caches
from quire.engine.request import Sequence
from quire.program.caches import SlotState
from quire.runner.masks import GrammarState
from quire.sampling.pipeline import SamplerState, sample
from quire.types import Row, RowResult

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass
class _Verification:
    """The row that is verified now, and its sampling state before it."""

    row: Row
    state: SamplerState
    num_tokens: int
    at: int = 0  # the position among those of its drafted tokens

    @property
    def drafted(self) -> int | None:
        return self.row.drafted[self.at] if self.at < len(self.row.drafted) else None


Sampling = Callable[[_Verification, Callable[[], RowResult]], RowResult]
After = Callable[[_Verification, RowResult], RowResult]


def _around(
    patch: pytest.MonkeyPatch,
    sampling: Sampling = lambda now, drawn: drawn(),
    after: After = lambda now, result: result,
) -> None:
    """Wrap the sampling of each position of a row with drafts, and the result of the row."""
    verify, current = slots._verify, []

    def verify_wrongly(row: Row, state: SamplerState, *more: Any) -> RowResult:
        if not row.drafted:
            return verify(row, state, *more)
        current[:] = [_Verification(row, state, state.num_tokens)]
        try:
            result = verify(row, state, *more)
        finally:
            (now,) = current
            current.clear()
        return after(now, result)

    def sample_wrongly(logits: Any, state: SamplerState, mask: Any = None) -> RowResult:
        if not current:
            return sample(logits, state, mask)
        result = sampling(current[0], lambda: sample(logits, state, mask))
        current[0].at += 1
        return result

    patch.setattr(slots, "_verify", verify_wrongly)
    patch.setattr(slots, "sample", sample_wrongly)


def _accept_all(patch: pytest.MonkeyPatch) -> None:
    def sampling(now: _Verification, drawn: Callable[[], RowResult]) -> RowResult:
        result = drawn()
        return result if now.drafted is None else result._replace(token_ids=(now.drafted,))

    _around(patch, sampling)


def _accept_one_too_many(patch: pytest.MonkeyPatch) -> None:
    wrong: list[Row] = []

    def sampling(now: _Verification, drawn: Callable[[], RowResult]) -> RowResult:
        result = drawn()
        if now.drafted is None or result.token_ids == (now.drafted,) or wrong[-1:] == [now.row]:
            return result
        wrong[:] = [now.row]
        return result._replace(token_ids=(now.drafted,))

    _around(patch, sampling)


def _draw_with_the_number_of_the_row(patch: pytest.MonkeyPatch) -> None:
    def sampling(now: _Verification, drawn: Callable[[], RowResult]) -> RowResult:
        ahead, now.state.num_tokens = now.state.num_tokens, now.num_tokens
        try:
            return drawn()
        finally:
            now.state.num_tokens = ahead

    _around(patch, sampling)


def _keep_the_penalties_of_refused_tokens(patch: pytest.MonkeyPatch) -> None:
    def after(now: _Verification, result: RowResult) -> RowResult:
        for token in now.row.drafted[len(result.token_ids) - 1 :]:
            if now.state.seen is not None:
                now.state.seen[token] = True
            if now.state.output_counts is not None:
                now.state.output_counts[token] += 1
        return result

    _around(patch, after=after)


def _penalize_by_the_tokens_before_the_row(patch: pytest.MonkeyPatch) -> None:
    def sampling(now: _Verification, drawn: Callable[[], RowResult]) -> RowResult:
        state = now.state
        if not now.at:
            held = state.seen, state.output_counts
            before[:] = [None if array is None else array.copy() for array in held]
        held = state.seen, state.output_counts
        state.seen, state.output_counts = before
        try:
            return drawn()
        finally:
            state.seen, state.output_counts = held

    before: list[Any] = []
    _around(patch, sampling)


def _forget_bad_words_within_the_row(patch: pytest.MonkeyPatch) -> None:
    def sampling(now: _Verification, drawn: Callable[[], RowResult]) -> RowResult:
        held = now.state.recent
        now.state.recent = [] if now.at else held
        try:
            return drawn()
        finally:
            now.state.recent = held

    _around(patch, sampling)


def _count_min_tokens_by_rows(patch: pytest.MonkeyPatch) -> None:
    """A row counts as one token until it is verified."""

    def suppresses(state: SamplerState) -> bool:
        return bool(base.get(id(state), state.num_tokens) - state.num_prompt_tokens < state.params.min_tokens)

    def sampling(now: _Verification, drawn: Callable[[], RowResult]) -> RowResult:
        base[id(now.state)] = now.num_tokens
        return drawn()

    def after(now: _Verification, result: RowResult) -> RowResult:
        base.clear()
        return result

    base: dict[int, int] = {}
    patch.setattr(SamplerState, "suppresses_stop", property(suppresses))
    _around(patch, sampling, after)


def _give_the_logprobs_of_the_first_position(patch: pytest.MonkeyPatch) -> None:
    def after(now: _Verification, result: RowResult) -> RowResult:
        return result._replace(logprobs=result.logprobs[:1] * len(result.logprobs))

    _around(patch, after=after)


def _keep_refused_tokens(patch: pytest.MonkeyPatch) -> None:
    """The first refused token stays where the one that was drawn belongs."""
    tokens, stale = slots._tokens, {}

    def stale_tokens(row: Row, slot: Slot) -> list[int]:
        found = tokens(row, slot)
        for position in range(row.start, row.start + row.count - len(row.drafted)):
            found[position - row.start] = stale.pop((id(slot), position), found[position - row.start])
        return found

    def after(now: _Verification, result: RowResult) -> RowResult:
        kept = len(result.token_ids) - 1
        if kept < len(now.row.drafted):
            stale[id(held[0]), now.num_tokens + kept] = now.row.drafted[kept]
        return result

    held: list[Slot] = []
    finish = slots.row_result

    def remembering(row: Row, slot: Slot, *more: Any) -> RowResult:
        held[:] = [slot]
        return finish(row, slot, *more)

    patch.setattr(slots, "row_result", remembering)
    patch.setattr(slots, "_tokens", stale_tokens)
    _around(patch, after=after)


def _go_back_too_little(patch: pytest.MonkeyPatch) -> None:
    """A state keeps no inputs beyond those that its next position needs."""
    patch.setattr(SlotState, "history", property(lambda self: self.reach))


def _end_only_with_the_last_token(patch: pytest.MonkeyPatch) -> None:
    take = Sequence.take

    def take_all(self: Sequence, token_ids: tuple[int, ...], now: float) -> Any:
        ends = self.request.end_token_ids
        self.request.end_token_ids = frozenset(ends - {*token_ids[:-1]} | {*token_ids[-1:]} & ends)
        try:
            return take(self, token_ids, now)
        finally:
            self.request.end_token_ids = ends

    patch.setattr(Sequence, "take", take_all)


def _share_what_was_not_computed(patch: pytest.MonkeyPatch) -> None:
    """The last token of a sequence counts as computed, so that its block is shared."""
    release = Caches.release

    def share_and_release(self: Caches, sequence: Sequence) -> None:
        sequence.num_computed += 1
        self.register(sequence)
        release(self, sequence)

    patch.setattr(Caches, "release", share_and_release)


def _mask_all_positions_alike(patch: pytest.MonkeyPatch) -> None:
    compute = GrammarState.compute

    def compute_once(self: GrammarState, grammars: Any, token_ids: Any, drafted: Any) -> None:
        compute(self, grammars, token_ids, drafted)
        self.masks = self.masks[:1] * (1 + len(drafted))

    patch.setattr(GrammarState, "compute", compute_once)


def _keep_refused_tokens_in_the_grammar(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Walk, "copy", lambda self: self)


FAULTS: dict[str, Break] = {
    "accepts all": _accept_all,
    "accepts one too many": _accept_one_too_many,
    "draws with the number of the row": _draw_with_the_number_of_the_row,
    "keeps the penalties of refused tokens": _keep_the_penalties_of_refused_tokens,
    "penalizes by the tokens before the row": _penalize_by_the_tokens_before_the_row,
    "forgets bad words within the row": _forget_bad_words_within_the_row,
    "counts min_tokens by rows": _count_min_tokens_by_rows,
    "gives the logprobs of the first position": _give_the_logprobs_of_the_first_position,
    "keeps refused tokens": _keep_refused_tokens,
    "goes back too little": _go_back_too_little,
    "ends only with the last token": _end_only_with_the_last_token,
    "shares what was not computed": _share_what_was_not_computed,
    "masks all positions alike": _mask_all_positions_alike,
    "keeps refused tokens in the grammar": _keep_refused_tokens_in_the_grammar,
}
