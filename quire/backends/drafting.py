"""A draft model beside a target: it proposes tokens in the target's block tables (decision 0030).

This defines what every backend does with one; csrc/core/draft.h does the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import ml_dtypes
import numpy as np

from quire.backends.draft_model import DraftModel, SharedTable, spare_blocks
from quire.program.batch import Batch, Ints
from quire.sampling.faults import LogitsError
from quire.sampling.pipeline import SamplerState, choose
from quire.types import Admission, Draft, Row, RowResult, Step

S = TypeVar("S")  # what a backend draws the tokens of a sequence by


@dataclass(slots=True)
class DraftedSlot:
    """The tokens of a slot that the draft model has computed.

    `computed` leading positions hold known tokens, those after them the tokens `guessed`. Beyond `room`
    positions they are in spare blocks: what is there is computed again when the slot has more blocks.
    """

    admission: Admission
    computed: int = 0
    guessed: list[int] = field(default_factory=list)
    room: int = 0
    num_blocks: int = 0  # of the shared table


class Known(NamedTuple, Generic[S]):
    """A slot of the target: its tokens, what they are drawn by, and the shared block table."""

    token_ids: Sequence[int]
    sampling: S
    table: np.ndarray


class Drawing(NamedTuple, Generic[S]):
    """A token to be drawn for a slot, at a position of its sequence, after those proposed before it."""

    slot: int
    sampling: S
    position: int
    proposed: Sequence[int]


class Passes(Protocol[S]):
    """Computes the passes of a draft model for a step, one after the other."""

    def draw(
        self, batch: Batch, drawings: Sequence[Drawing[S]]
    ) -> tuple[Sequence[int | None], np.ndarray | None]:
        """Compute a batch, and draw a token by each row of its logits.

        Return the tokens, None where none can be drawn, and the hidden states [L, width] of these rows if
        the next pass reads them from its batch. What stands for a token that is not known yet is a negative
        number; it may be in the next batch.
        """
        ...

    def drawn(self) -> Mapping[int, int | None]:
        """Return the tokens that such numbers of the step stood for; None where none could be drawn."""
        ...


class HostPasses:
    """Draws by the definition, from the logits [L, vocab] that `execute` returns of a batch.

    It also returns the hidden states [L, width] that the model hands out, if it does.
    """

    def __init__(
        self, execute: Callable[[Batch], tuple[np.ndarray, np.ndarray | None]], vocab_size: int
    ) -> None:
        self._execute = execute
        self._vocab_size = vocab_size

    def draw(
        self, batch: Batch, drawings: Sequence[Drawing[SamplerState]]
    ) -> tuple[Sequence[int | None], np.ndarray | None]:
        logits, hidden = self._execute(batch)
        both = zip(logits, drawings, strict=True)
        return [self._draw(own, one.sampling.after(one.proposed)) for own, one in both], hidden

    def _draw(self, logits: np.ndarray, state: SamplerState) -> int | None:
        """Return what the target's parameters and random number choose of these logits; None if nothing."""
        fitting = np.full(self._vocab_size, -np.inf, np.float32)
        common = min(self._vocab_size, len(logits))
        fitting[:common] = logits[:common]
        try:
            return choose(fitting, state)
        except LogitsError:
            return None

    def drawn(self) -> Mapping[int, int | None]:
        return {}


class _Lagging(NamedTuple):
    """A row that lacks positions [start, end); `samples` if a token was sampled after the last of these."""

    row: int
    start: int
    end: int
    samples: bool


class ModelDrafts(Generic[S]):
    """Proposes tokens for the rows of steps, by a draft model that `passes` compute.

    A block that is granted afresh has nothing of the draft model. Of one that comes from the prefix cache it
    may have computed some positions: how many is known by block, so it computes only what it lacks.

    A model that reads hidden states has those that the target gave for each position, by block as well. For
    positions that the target has not computed it reads its own, and so computes guesses that came true again.
    """

    def __init__(
        self,
        model: DraftModel[Any],
        passes: Passes[S],
        table: SharedTable,
        num_blocks: int,
        block_size: int,
        num_slots: int = 0,
    ) -> None:
        self.table = table
        self._model = model
        self._passes = passes
        self._block_size = block_size
        self._filled = np.zeros(num_blocks, np.int64)  # leading positions computed with the block's tokens
        kept = (num_blocks + num_slots * spare_blocks(block_size), block_size, model.hidden_width)
        self._hidden = np.zeros(kept, ml_dtypes.bfloat16)
        self._slots: dict[int, DraftedSlot] = {}

    def apply(self, step: Step) -> None:
        """Take the changes of slots and blocks."""
        size, starts = self._block_size, {row.slot: row.start for row in step.rows}
        for admission in step.admitted:
            self._slots[admission.slot] = DraftedSlot(admission)
        fresh = {admission.slot: starts[admission.slot] for admission in step.admitted}
        for grant in step.granted:
            if grant.group != self.table.group:
                continue
            slot = self._slots[grant.slot]
            slot.num_blocks = grant.first + len(grant.block_ids)
            if grant.slot in fresh:
                slot.computed = slot.room = grant.first * size
            num_cached = max(0, fresh.get(grant.slot, 0) // size - grant.first)
            self._filled[list(grant.block_ids[num_cached:])] = 0

    def forget(self, block_ids: Sequence[int]) -> None:
        """Note that these blocks have nothing of the draft model."""
        self._filled[list(block_ids)] = 0
        self._hidden[list(block_ids)] = 0

    def keep(self, places: tuple[Ints, Ints], hidden: np.ndarray) -> None:
        """Take the hidden states [T, width] that the target handed out, and where their tokens are.

        Places are block ids and offsets in the blocks, as those of Batch.places for the shared table.
        """
        self._hidden[places] = hidden

    def propose(
        self, step: Step, results: Sequence[RowResult], known: Mapping[int, Known[S]]
    ) -> tuple[tuple[RowResult, ...], float]:
        """Return the results with the proposed drafts, and the seconds they took.

        `known` has the slots of all rows that sample tokens or prepare for it.
        """
        began_s = time.monotonic()
        proposed: dict[int, list[int]] = {}
        if lagging := self._lagging(step, results, known):
            batch = self._catch_up(step, lagging, known)
            sampling = [one.row for one in lagging if one.samples]
            proposed = self._go_on(step, sampling, batch, known)
            for one in lagging:
                slot = self._slots[step.rows[one.row].slot]
                self._fill(slot, one.start, one.end, known[step.rows[one.row].slot].table)
                slot.computed, slot.room = one.end, slot.num_blocks * self._block_size
        drafts = [
            (Draft(tuple(proposed[i]), "model"),) if proposed.get(i) else () for i in range(len(results))
        ]
        both = zip(results, drafts, strict=True)
        found = tuple([result._replace(drafts=result.drafts + more) for result, more in both])
        return found, time.monotonic() - began_s

    def _lagging(
        self, step: Step, results: Sequence[RowResult], known: Mapping[int, Known[S]]
    ) -> list[_Lagging]:
        """Choose the rows to compute: first those that lack least, within the most tokens of a step.

        A block is computed for one sequence only: others that share it go on from there in another step.
        """
        wanted, size = [], self._block_size
        for i, (row, result) in enumerate(zip(step.rows, results, strict=True)):
            if row.slot not in known or result.error is not None:
                continue
            num_known = len(known[row.slot].token_ids)
            end = min(num_known if row.sample else row.start + row.count, self._model.max_len)
            samples = row.sample and end == num_known
            start = min(self._advance(row, known[row.slot]), end - samples)
            if start < end and self.table.allows(start, self.table.oldest(row.start, size)):
                wanted.append(_Lagging(i, start, end, samples))
        left, taken, chosen = self._model.max_tokens, set[int](), []
        for i, start, most, samples in sorted(wanted, key=lambda one: one.end - one.start):
            slot, end = step.rows[i].slot, min(most, start + left)
            blocks = range(start // size, min(-(-end // size), self._slots[slot].num_blocks))
            for number in blocks:
                if (block := int(known[slot].table[number])) in taken:
                    end = max(start, number * size)
                    break
                taken.add(block)
            if start < end:
                chosen.append(_Lagging(i, start, end, samples and end == most))
                left -= end - start
        return sorted(chosen)

    def _advance(self, row: Row, known: Known[S]) -> int:
        """Return how many leading positions of a slot are computed, and keep the number."""
        slot, size, first = self._slots[row.slot], self._block_size, self._slots[row.slot].computed
        end = min(len(known.token_ids), slot.room)
        for token in () if self._model.hidden_width else slot.guessed:
            if slot.computed >= end or known.token_ids[slot.computed] != token:
                break
            slot.computed += 1
        slot.computed, slot.guessed = min(slot.computed, slot.room), []
        self._fill(slot, first, slot.computed, known.table)
        oldest = self.table.oldest(row.start, size)
        while oldest <= slot.computed < min(len(known.token_ids), slot.num_blocks * size):
            number, offset = divmod(slot.computed, size)
            filled = int(self._filled[known.table[number]])
            if filled <= offset:
                break
            slot.computed += filled - offset
        return slot.computed

    def _fill(self, slot: DraftedSlot, first: int, last: int, table: np.ndarray) -> None:
        """Note that positions [first, last) were computed with known tokens."""
        size = self._block_size
        for number in range(first // size, min(-(-last // size), slot.num_blocks)):
            self._filled[table[number]] = min(size, last - number * size)

    def _catch_up(self, step: Step, lagging: Sequence[_Lagging], known: Mapping[int, Known[S]]) -> Batch:
        slots = [step.rows[one.row].slot for one in lagging]
        tokens = [
            known[slot].token_ids[one.start : one.end] for slot, one in zip(slots, lagging, strict=True)
        ]
        return self._batch(
            slots, tokens, [one.start for one in lagging], [one.samples for one in lagging], known
        )

    def _batch(
        self,
        slots: Sequence[int],
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        samples: Sequence[bool],
        known: Mapping[int, Known[S]],
    ) -> Batch:
        """Lay out rows of these tokens from these positions on, with logits of the last if they sample."""
        counts = np.array([len(one) for one in tokens])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        ends = np.array(starts) + counts
        given = np.concatenate([np.array(one, np.int64) for one in tokens])
        vocab_size = self._model.program.output.width
        positions = np.arange(offsets[-1]) + np.repeat(ends - counts - offsets[:-1], counts)
        tables = self._tables(slots, known, int(ends.max()))
        hidden = None
        if self._model.hidden_width:
            rows, before = np.repeat(np.arange(len(slots)), counts), np.maximum(positions - 1, 0)
            places = tables[rows, before // self._block_size], before % self._block_size
            hidden = self._hidden[places].astype(np.float32) * (positions > 0)[:, None]
        return Batch(
            token_ids=np.where(given < vocab_size, given, 0),
            positions=positions,
            row_offsets=offsets,
            block_tables=(tables,) * len(self._model.program.cache_groups),
            context_lens=ends,
            slots=np.array(slots),
            variants=np.array([self._slots[slot].admission.context_variant for slot in slots]),
            logit_rows=np.array([offsets[i + 1] - 1 for i, one in enumerate(samples) if one], np.int64),
            block_size=self._block_size,
            admissions=tuple(self._slots[slot].admission for slot in slots),
            hidden=hidden,
        )

    def _tables(self, slots: Sequence[int], known: Mapping[int, Known[S]], num_tokens: int) -> np.ndarray:
        """Return the block tables of slots, with their spare blocks after those that were granted."""
        spare = spare_blocks(self._block_size)
        tables = np.zeros((len(slots), -(-num_tokens // self._block_size) + spare), np.int64)
        for table, slot in zip(tables, slots, strict=True):
            num_blocks = min(self._slots[slot].num_blocks, len(table))
            table[:num_blocks] = known[slot].table[:num_blocks]
            own = len(self._filled) + slot * spare + np.arange(spare)
            table[num_blocks : num_blocks + spare] = own[: len(table) - num_blocks]
        return tables

    def _go_on(
        self, step: Step, rows: list[int], batch: Batch, known: Mapping[int, Known[S]]
    ) -> dict[int, list[int]]:
        """Draw a token for each of these rows by the logits of a batch, and more, pass by pass.

        Return them by row. A batch for no row that samples is only computed.
        """
        proposed: dict[int, list[int]] = {row: [] for row in rows}
        fed = dict.fromkeys(rows, 0)
        for last in range(step.num_proposed - 1, -1, -1):
            tokens = self._pass(batch, [self._drawing(step, row, proposed[row], known) for row in rows])
            for row, token in zip(rows, tokens, strict=True):
                proposed[row] += [] if token is None else [token]
            rows = [row for row, token in zip(rows, tokens, strict=True) if token is not None]
            rows = [row for row in rows if self._end(step, row, proposed, known) <= self._model.max_len]
            if not rows or not last:
                break
            slots, given = [step.rows[row].slot for row in rows], [proposed[row][-1:] for row in rows]
            starts = [self._end(step, row, proposed, known) - 1 for row in rows]
            batch = self._batch(slots, given, starts, [True] * len(rows), known)
            fed |= {row: len(proposed[row]) for row in rows}
        drawn = self._passes.drawn()
        for row, own in proposed.items():
            found = [drawn.get(token, token) for token in own]
            count = found.index(None) if None in found else len(found)
            own[:] = [token for token in found[:count] if token is not None]
            self._slots[step.rows[row].slot].guessed = own[: fed[row]]
        return proposed

    def _drawing(
        self, step: Step, row: int, proposed: Sequence[int], known: Mapping[int, Known[S]]
    ) -> Drawing[S]:
        own = known[slot := step.rows[row].slot]
        return Drawing(slot, own.sampling, len(own.token_ids) + len(proposed), proposed)

    def _pass(self, batch: Batch, drawings: Sequence[Drawing[S]]) -> Sequence[int | None]:
        """Compute a pass; return the tokens, and keep its hidden states where the target's are not yet."""
        tokens, hidden = self._passes.draw(batch, drawings)
        if hidden is not None:
            blocks, offsets = batch.places(0)
            self._hidden[blocks[batch.logit_rows], offsets[batch.logit_rows]] = hidden
        return tokens

    def _end(
        self, step: Step, row: int, proposed: Mapping[int, list[int]], known: Mapping[int, Known[S]]
    ) -> int:
        return len(known[step.rows[row].slot].token_ids) + len(proposed[row])
