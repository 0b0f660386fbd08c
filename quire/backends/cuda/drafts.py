"""A draft model on an accelerator: a second program, whose caches use the block tables of its target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.backends.backend import Capacity
from quire.backends.cuda.accelerator import Accelerator, DeviceFault, HostCopy, Memory
from quire.backends.cuda.caches import LayerCache, layer_caches
from quire.backends.cuda.device_slots import DeviceSlot
from quire.backends.cuda.launch_list import Lowered
from quire.backends.cuda.slot_tables import SlotTables
from quire.backends.cuda.states import LayerState
from quire.backends.cuda.step_arrays import StepArrays, StepMemory
from quire.backends.draft_model import DraftModel, shared_table, spare_blocks
from quire.backends.drafting import Known, ModelDrafts
from quire.backends.host import available_memory
from quire.errors import ConfigError
from quire.program.batch import Batch, Ints
from quire.program.program import Program
from quire.types import RowResult, Step


class HandedOut(NamedTuple):
    """The hidden states of a step on their way to the host, and the places of their tokens."""

    places: tuple[Ints, Ints]
    copy: HostCopy


class DeviceDrafts:
    """Proposes tokens as quire.backends.drafting defines it, by passes of a draft model on an accelerator.

    Passes wait for each other: tokens are drawn on the host. Hidden states of the target, for a model that
    reads them, are kept in the memory of the host. `lowered` is the draft model, whose steps have `memory`;
    `tables` are those of the target's slots.
    """

    def __init__(
        self,
        draft: DraftModel[Any],
        lowered: Lowered,
        memory: StepMemory,
        accelerator: Accelerator,
        target: Lowered,
        tables: SlotTables,
        capacity: Capacity,
    ) -> None:
        self._lowered, self._memory, self._accelerator = lowered, memory, accelerator
        self._tables, self._block_size = tables, capacity.block_size
        self._given = target.hidden if draft.hidden_width else None
        table = shared_table(target.program, draft.program)
        sizes = (capacity.num_blocks[table.group], capacity.block_size, target.program.output.width)
        self._drafting = ModelDrafts(draft, self._execute, table, *sizes, capacity.max_num_seqs)

    def _execute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the logits [L, vocab] of a batch, and the hidden states [L, width] that it hands out."""
        lowered, step = self._lowered, self._memory.put(batch)
        for launch in lowered.launches:
            self._accelerator.launch(launch(step))
        logits = self._accelerator.fetch(step.values[lowered.output])
        if lowered.hidden is None:
            return logits.result(), None
        hidden = self._accelerator.fetch(step.values[lowered.hidden])
        return logits.result(), hidden.result()

    def apply(self, step: Step) -> None:
        """Take the changes of slots and blocks."""
        self._drafting.apply(step)

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
            row.slot: Known(slot.token_ids, slot.sampler, table[row.slot])
            for row, slot in zip(step.rows, slots, strict=True)
            if slot.sampler is not None
        }
        try:
            return self._drafting.propose(step, results, known)
        except DeviceFault as fault:
            if not fault.works:
                raise
            return results, time.monotonic() - began_s


def draft_caches(
    memory: Memory, target: Program, draft: Program, capacity: Capacity
) -> list[LayerCache | LayerState]:
    """Allocate the cache of each layer of a draft model."""
    blocks = [_num_blocks(target, draft, capacity)] * len(draft.cache_groups)
    return layer_caches(memory, draft, blocks, capacity.block_size, capacity.kv_dtype, 0, 0)


def _num_blocks(target: Program, draft: Program, capacity: Capacity) -> int:
    """Return the blocks of the shared table, with the spare ones of each slot."""
    spare = capacity.max_num_seqs * spare_blocks(capacity.block_size)
    return capacity.num_blocks[shared_table(target, draft).group] + spare


def require_host_memory(target: Program, draft: DraftModel[Any], capacity: Capacity) -> None:
    """Raise ConfigError if the hidden states that a draft model reads do not fit in the host's memory."""
    needed = _num_blocks(target, draft.program, capacity) * draft.block_bytes(capacity.block_size)
    if needed > (available := available_memory()):
        found = f"{needed / 1e9:.1f} GB of the host's memory, of which {available / 1e9:.1f} GB are available"
        hint = "lower kv_cache_memory_bytes, or leave the prediction layer out with speculative = 'auto'"
        raise ConfigError(f"the hidden states of all cached tokens take {found}", hint)
