"""The slots of a backend on an accelerator: what steps change of them, and the layout of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.backends.cuda.accelerator import Accelerator
from quire.backends.cuda.slot_sampling import SlotSampling, samples_on_device
from quire.backends.cuda.slot_tables import SlotTables
from quire.backends.slots import Slot
from quire.program.batch import Batch
from quire.sampling.pipeline import SamplerState
from quire.types import Admission, Row, Step


@dataclass(slots=True)
class DeviceSlot(Slot):
    """A slot whose last token may be known to the accelerator alone, until its step is collected.

    Its tokens are sampled by `sampling`, or without it on the host, by `sampler`.
    """

    sampling: SlotSampling | None = None


class DeviceSlots:
    """Applies the deltas of steps and lays steps out as batches, without block tables: these are `tables`.

    Slot number `spare` is no request's: its tables name `spare_blocks`, of each cache group the block that
    no request has.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        num_slots: int,
        spare_blocks: Sequence[int],
        vocab_size: int,
        block_size: int,
    ) -> None:
        self.tables = SlotTables(accelerator, num_slots + 1, len(spare_blocks))
        self.spare = num_slots
        for group, block in enumerate(spare_blocks):
            self.tables.grant(group, self.spare, 0, [block])
        self.tables.set_lengths(np.array([self.spare]), np.array([1]))
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._slots: dict[int, DeviceSlot] = {}

    def apply(self, step: Step) -> list[DeviceSlot]:
        """Apply the deltas of a step; return the slots of its rows."""
        for number in step.released:
            del self._slots[number]
        brought = {row.slot: row.token_ids for row in step.rows}
        for admission in step.admitted:
            self._slots[admission.slot] = self._admit(admission, list(brought[admission.slot]))
        for grant in step.granted:
            self.tables.grant(grant.group, grant.slot, grant.first, grant.block_ids)
        return [self._slots[row.slot] for row in step.rows]

    def _admit(self, admission: Admission, token_ids: list[int]) -> DeviceSlot:
        if samples_on_device(admission):
            return DeviceSlot(admission, token_ids, None, sampling=SlotSampling(admission, self._vocab_size))
        return DeviceSlot(admission, token_ids, SamplerState(admission, token_ids, self._vocab_size))

    def slot(self, number: int) -> DeviceSlot:
        """Return an admitted slot."""
        return self._slots[number]

    def batch(self, step: Step) -> Batch:
        """Lay out a step whose deltas were applied. Token -1 - s is the last one drawn for slot s."""
        slots = [self._slots[row.slot] for row in step.rows]
        counts = np.array([row.count for row in step.rows])
        ends = np.array([row.start + row.count for row in step.rows])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        numbers = np.array([row.slot for row in step.rows])
        self.tables.set_lengths(numbers, ends)
        logits = [
            np.arange(end - row.num_logits, end) for end, row in zip(offsets[1:], step.rows, strict=True)
        ]
        tokens = [_tokens(row, slot) for row, slot in zip(step.rows, slots, strict=True)]
        return Batch(
            token_ids=np.concatenate(tokens),
            positions=np.arange(offsets[-1]) + np.repeat(ends - counts - offsets[:-1], counts),
            row_offsets=offsets,
            block_tables=(),
            context_lens=ends,
            slots=numbers,
            variants=np.array([slot.admission.context_variant for slot in slots]),
            logit_rows=np.concatenate(logits),
            block_size=self._block_size,
            admissions=tuple(slot.admission for slot in slots),
            restored=step.restored,
            saved=step.saved,
        )


def _tokens(row: Row, slot: DeviceSlot) -> list[int]:
    """Return the tokens of a row: known ones, one that a step in flight may draw, and drafted ones."""
    end = row.start + row.count - len(row.drafted)
    known = slot.token_ids[row.start : end]
    drawn = [-1 - row.slot] * (end - row.start - len(known))
    return [*known, *drawn, *row.drafted]
