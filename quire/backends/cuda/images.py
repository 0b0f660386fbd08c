"""Images on an accelerator: the tower beside the program, and the embeddings, which stay in its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, DeviceArray, HostCopy, Launch
from quire.backends.cuda.kernels.variant import row_block
from quire.backends.cuda.launch_list import Record
from quire.backends.cuda.step_arrays import StepArrays, StepMemory
from quire.backends.slot_images import SlotImages
from quire.images.vision import Vision
from quire.program.batch import Batch
from quire.types import Step


def keeps_halves(kv_dtype: str) -> bool:
    """Return whether attention in towers has keys and values in bfloat16: beside caches that round more."""
    return kv_dtype in ("bfloat16", "int8")


class DeviceImages:
    """The images of slots, and the launches of the tower that encodes them, to the buffer `output`."""

    def __init__(
        self,
        vision: Vision,
        launches: Sequence[Record],
        output: int,
        memory: StepMemory,
        accelerator: Accelerator,
    ) -> None:
        self._launches, self._output = launches, output
        self._memory, self._accelerator = memory, accelerator
        self._slots = SlotImages(vision, self._begin)
        self._marker = accelerator.allocate(1)
        self._read: list[DeviceArray] = []  # by the launches of the last step

    def apply(self, step: Step) -> HostCopy | None:
        """Take in what a step changes, and launch what it encodes; return a copy that ends behind that."""
        self._slots.apply(step)
        return self._accelerator.fetch(self._marker) if self._slots.encode_s else None

    def place(self, step: Step, batch: Batch) -> Batch:
        """Return the batch of a step with what its ops need of images.

        Their embeddings are kept until the next call, before which the step is to be launched.
        """
        ends = self._slots.visible_ends(step.rows)
        seen = self._slots.seen(step.rows, batch.row_offsets)
        batch = replace(batch, rotary_positions=self._slots.positions(step.rows))
        self._read = [one.embeddings for one in seen]
        if not seen:
            return batch
        addresses = [
            np.add.outer(
                self._accelerator.addresses(one.embeddings), one.rows * one.embeddings.rows(0, 1).num_bytes
            )
            for one in seen
        ]
        return replace(
            batch,
            image_tokens=np.concatenate([one.tokens for one in seen]),
            image_addresses=np.concatenate(addresses, axis=1),
            visible_ends=ends,
        )

    def _begin(self, batch: Batch) -> _TowerRun:
        return _TowerRun(self._accelerator, self._launches, self._output, self._memory.put(batch))


class _TowerRun:
    """An image on its way through the tower, whose values belong to the image that was begun last."""

    def __init__(
        self, accelerator: Accelerator, launches: Sequence[Record], output: int, step: StepArrays
    ) -> None:
        self._accelerator, self._step = accelerator, step
        self._launches, self._output = launches, output
        self._num_done = 0

    def advance(self, share: float) -> None:
        """Launch until so large a share of the launches is made; nothing waits for them."""
        end = int(share * len(self._launches))
        for launch in self._launches[self._num_done : end]:
            self._accelerator.launch(launch(self._step))
        self._num_done = max(self._num_done, end)

    def output(self) -> DeviceArray:
        """Return a copy of the embeddings."""
        found = self._step.values[self._output]
        (count, width), block = found.shape, row_block(found.shape[1])
        kept = self._accelerator.allocate(found.num_bytes).part(0, found.shape, found.dtype)
        grid = (count, -(-width // block), 1)
        self._accelerator.launch(
            Launch("take_columns", grid, (kept, found, width, width, 0), {"BLOCK": block})
        )
        return kept
