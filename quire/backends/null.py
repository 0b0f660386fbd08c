"""The null backend: computes nothing and counts what computing would have taken."""

from __future__ import annotations

import numpy as np

from quire.backends.backend import Masks
from quire.backends.slots import Deferred, Slots
from quire.program.batch import Batch
from quire.program.program import Cost, Load, Program, WeightBytes
from quire.types import Step


class NullBackend:
    """Gives zeros for logits, so every greedy token is 0; `cost` is the sum over all batches so far."""

    name = "null"

    def __init__(self, program: Program, nbytes: WeightBytes, kv_itemsize: int, block_size: int) -> None:
        self.program = program
        self.cost = Cost()
        self._nbytes = nbytes
        self._kv_itemsize = kv_itemsize
        self._slots = Slots(program.output.width, block_size, max(1, len(program.cache_groups)))
        self._zeros = np.zeros((1, *program.output.shape), np.float32)

    def launch(self, step: Step, masks: Masks | None = None) -> Deferred:
        return Deferred(lambda: self._slots.finish(step, self.execute(self._slots.batch(step)), masks))

    def execute(self, batch: Batch) -> np.ndarray:
        counts = np.diff(batch.row_offsets)
        rows = zip((batch.context_lens - counts).tolist(), counts.tolist(), strict=True)
        load = Load(tuple(rows), len(batch.logit_rows), self._kv_itemsize)
        self.cost += self.program.cost(load, self._nbytes)
        return np.broadcast_to(self._zeros, (len(batch.logit_rows), *self.program.output.shape))
