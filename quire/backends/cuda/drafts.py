"""A draft model on an accelerator: a second program, whose caches use the block tables of its target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.backends.backend import Capacity
from quire.backends.cuda.accelerator import Accelerator, DeviceArray, DeviceFault, HostCopy, Launch, Memory
from quire.backends.cuda.caches import LayerCache, layer_caches
from quire.backends.cuda.device_slots import DeviceSlot
from quire.backends.cuda.draws import Draw, Draws, RowDraws
from quire.backends.cuda.graphs import DecodeGraphs, decode_batch
from quire.backends.cuda.kernels.variant import row_block
from quire.backends.cuda.launch_list import Lowered
from quire.backends.cuda.memory import ReusedMemory
from quire.backends.cuda.sampler import DeviceSampler, drawn_tokens
from quire.backends.cuda.slot_sampling import SlotSampling, drafted_sampling
from quire.backends.cuda.slot_tables import SlotTables
from quire.backends.cuda.states import LayerState
from quire.backends.cuda.step_arrays import StepArrays, StepMemory
from quire.backends.cuda.text_arrays import HIDDEN
from quire.backends.draft_model import DraftModel, shared_table, spare_blocks
from quire.backends.drafting import Drawing, Known, ModelDrafts
from quire.backends.host import available_memory
from quire.errors import ConfigError
from quire.program.batch import Batch, Ints
from quire.program.program import Program
from quire.types import RowResult, Step


class HandedOut(NamedTuple):
    """The hidden states of a step on their way to the host, and the places of their tokens."""

    places: tuple[Ints, Ints]
    copy: HostCopy


class DevicePasses:
    """Computes the passes of a draft model on an accelerator, with its draws: none waits for another.

    Numbers stand for tokens until `drawn` waits for them. A pass takes the tokens that the one before it
    drew, and the hidden states that it handed out, in the memory of the accelerator. Block tables of slots
    stay there, without lengths of contexts: tokens see what is up to their own positions. Passes of one token
    a row have graphs.
    """

    def __init__(
        self,
        lowered: Lowered,
        memory: StepMemory,
        accelerator: Accelerator,
        sampler: DeviceSampler,
        first_spare: int,
        capacity: Capacity,
    ) -> None:
        """Lay out block tables: slot s has spare blocks from `first_spare` on, after those of slots below."""
        self._lowered, self._memory, self._accelerator, self._sampler = lowered, memory, accelerator, sampler
        self._first_spare, self._num_spare = first_spare, spare_blocks(capacity.block_size)
        self._spare_slot = capacity.max_num_seqs
        self._tables = SlotTables(
            accelerator, self._spare_slot + 1, num_groups=len(lowered.program.cache_groups)
        )
        self.grant(self._spare_slot, 0, ())
        self._graphs = DecodeGraphs(accelerator)
        self._indices = ReusedMemory(accelerator)
        self._last: tuple[DeviceArray, dict[int, int]] | None = None  # hidden states [L, width]; rows by slot
        self._results: list[tuple[Draws, dict[int, int], HostCopy]] = []  # with the places of numbers

    def grant(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Write block ids into the tables of a slot from entry `first` on, and spare blocks after them."""
        own = self._first_spare + slot * self._num_spare + np.arange(self._num_spare)
        for group in range(len(self._lowered.program.cache_groups)):
            self._tables.grant(group, slot, first, [*block_ids, *own.tolist()])

    def begin(self) -> None:
        """Forget what is left of the step before."""
        self._results, self._last = [], None

    def fail(self) -> None:
        """Note that a pass failed: changes of block tables may be lost."""
        self._tables.forget()

    def draw(self, batch: Batch, drawings: Sequence[Drawing[SlotSampling]]) -> tuple[list[int | None], None]:
        """Launch a batch, and draws by its logits; return the numbers that stand for the tokens."""
        decode = decode_batch(batch, self._spare_slot)
        step = self._memory.put(decode or batch, self._tables)
        if batch.token_ids.min() < 0:
            self._sampler.feed(step.token_ids)
            self._hand_on(batch, step)
        if decode is not None:
            moves = self._memory.moves + self._tables.moves
            self._graphs.launch(self._lowered.launches, step, moves)
        else:
            for launch in self._lowered.launches:
                self._accelerator.launch(launch(step))
        if self._lowered.hidden is not None:
            rows = {one.slot: row for row, one in enumerate(drawings)}
            self._last = step.values[self._lowered.hidden], rows
        return self._sample(drawings, step.values[self._lowered.output]), None

    def _hand_on(self, batch: Batch, step: StepArrays) -> None:
        """Launch a copy of the hidden states that the pass before handed out to where a pass reads them."""
        if self._last is None:
            return
        states, rows = self._last
        out = step.texts[HIDDEN]
        index = np.zeros(out.shape[0], np.int32)
        index[: len(batch.slots)] = [rows[slot] for slot in batch.slots.tolist()]
        (placed,) = self._indices.upload([index])
        width = states.shape[1]
        block = row_block(width)
        grid = (len(index), -(-width // block), 1)
        self._accelerator.launch(
            Launch("gather_states", grid, (out, placed, states, width), {"BLOCK": block})
        )

    def _sample(self, drawings: Sequence[Drawing[SlotSampling]], logits: DeviceArray) -> list[int | None]:
        number = len(self._results) + 1
        own = [RowDraws() for _ in drawings]
        each = [
            Draw(one.sampling, one.slot, row, one.position, tuple(one.proposed), one.sampling.mask(None))
            for row, one in enumerate(drawings)
        ]
        draws = Draws((of, 0, draw) for of, draw in zip(own, each, strict=True))
        numbers = [self._sampler.stands_for(one.slot, number) for one in drawings]
        if (copy := self._sampler.launch(draws, logits, number)) is not None:
            places = dict(zip(numbers, (of.tokens[0] for of in own), strict=True))
            self._results.append((draws, places, copy))
        return [*numbers]

    def drawn(self) -> dict[int, int | None]:
        """Wait for the tokens that the numbers of this step stand for."""
        found = dict[int, int | None]()
        for draws, places, copy in self._results:
            tokens = drawn_tokens(draws, copy.result())
            found |= {number: tokens[place] for number, place in places.items()}
        return found


class DeviceDrafts:
    """Proposes tokens as quire.backends.drafting defines it, by passes of a draft model on an accelerator.

    Hidden states of the target, for a model that reads them, are kept in the memory of the host. `tables` are
    those of the target's slots, and `given` is the buffer with the hidden states that its steps hand out.
    """

    def __init__(
        self,
        draft: DraftModel[Any],
        passes: DevicePasses,
        accelerator: Accelerator,
        target: Lowered,
        tables: SlotTables,
        capacity: Capacity,
    ) -> None:
        self._passes, self._accelerator, self._vocab = passes, accelerator, target.program.output.width
        self._tables, self._block_size = tables, capacity.block_size
        self._given = target.hidden if draft.hidden_width else None
        self._sampling: dict[int, SlotSampling] = {}  # by slot
        table = shared_table(target.program, draft.program)
        sizes = (capacity.num_blocks[table.group], capacity.block_size, capacity.max_num_seqs)
        self._drafting = ModelDrafts(draft, passes, table, *sizes)

    def apply(self, step: Step) -> None:
        """Take the changes of slots and blocks."""
        self._drafting.apply(step)
        for admission in step.admitted:
            self._sampling[admission.slot] = drafted_sampling(admission, self._vocab)
        for grant in step.granted:
            if grant.group == self._drafting.table.group:
                self._passes.grant(grant.slot, grant.first, grant.block_ids)

    def forget(self, group: int, block_ids: Sequence[int]) -> None:
        """Note that the contents of blocks of a cache group were replaced."""
        if group == self._drafting.table.group:
            self._drafting.forget(block_ids)

    def begin_keeping(self, batch: Batch, step: StepArrays) -> HandedOut | None:
        """Begin to copy the hidden states that a step of the target hands out, if the draft model reads any.

        The step may have more rows than the batch.
        """
        if self._given is None:
            return None
        table, slots = self._tables.known(self._drafting.table.group), batch.slots[batch.token_rows]
        places = table[slots, batch.positions // self._block_size], batch.positions % self._block_size
        return HandedOut(places, self._accelerator.fetch(step.values[self._given].rows(0, batch.num_tokens)))

    def keep(self, handed_out: HandedOut) -> None:
        """Wait for hidden states, and keep them. Steps are kept in the order in which they began."""
        self._drafting.keep(handed_out.places, handed_out.copy.result())

    def propose(
        self, step: Step, results: tuple[RowResult, ...], slots: Sequence[DeviceSlot]
    ) -> tuple[tuple[RowResult, ...], float]:
        """Return the results with what is proposed after them, and the seconds that this took.

        Nothing is proposed if the accelerator fails to compute the draft model, but still works.
        """
        began_s, table = time.monotonic(), self._tables.known(self._drafting.table.group)
        known = {
            row.slot: Known(slot.token_ids, self._sampling[row.slot], table[row.slot])
            for row, slot in zip(step.rows, slots, strict=True)
        }
        self._passes.begin()
        try:
            return self._drafting.propose(step, results, known)
        except DeviceFault as fault:
            if not fault.works:
                raise
            self._passes.fail()
            return results, time.monotonic() - began_s


def draft_caches(
    memory: Memory, target: Program, draft: Program, capacity: Capacity
) -> list[LayerCache | LayerState]:
    """Allocate the cache of each layer of a draft model."""
    blocks = [_num_blocks(target, draft, capacity)] * len(draft.cache_groups)
    return layer_caches(memory, draft, blocks, capacity.block_size, capacity.kv_dtype, 0, 0)


def _num_blocks(target: Program, draft: Program, capacity: Capacity) -> int:
    """Return the blocks of the shared table, with the spare ones of each slot and of one that is nobody's."""
    spare = (capacity.max_num_seqs + 1) * spare_blocks(capacity.block_size)
    return capacity.num_blocks[shared_table(target, draft).group] + spare


def require_host_memory(target: Program, draft: DraftModel[Any], capacity: Capacity) -> None:
    """Raise ConfigError if the hidden states that a draft model reads do not fit in the host's memory."""
    needed = _num_blocks(target, draft.program, capacity) * draft.block_bytes(capacity.block_size)
    if needed > (available := available_memory()):
        found = f"{needed / 1e9:.1f} GB of the host's memory, of which {available / 1e9:.1f} GB are available"
        hint = "lower kv_cache_memory_bytes, or leave the prediction layer out with speculative = 'auto'"
        raise ConfigError(f"the hidden states of all cached tokens take {found}", hint)
