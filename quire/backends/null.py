"""The null backend: computes nothing, and sums the cost of what it would compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from quire.backends.backend import Capacity, GetMasks
from quire.backends.draft_model import DraftModel
from quire.backends.host import HostDevice
from quire.backends.kv_cache import KV_ITEM_BYTES, KV_SCALE_BYTES
from quire.backends.slots import Deferred, Slots
from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.program.batch import Batch
from quire.program.program import Cost, Load, LowRank, Program, WeightBytes
from quire.quantize.kinds import Storage
from quire.types import Step
from quire.weights.load import Progress
from quire.weights.plan import Layout, WeightPlan


class NullBackend:
    """Returns zeros as logits, so every greedy token is 0; `cost` is the sum over all batches so far."""

    name = "null"

    def __init__(
        self,
        program: Program,
        nbytes: WeightBytes,
        kv_itemsize: int,
        block_size: int,
        kv_scale_bytes: int = 0,
    ) -> None:
        self.program = program
        self.cost = Cost()
        self._nbytes = nbytes
        self._kv_bytes = kv_itemsize, kv_scale_bytes  # of a cached number and of a scale
        self._slots = Slots(program.output.width, block_size, len(program.cache_groups))
        self._zeros = np.zeros((1, *program.output.shape), np.float32)

    def launch(self, step: Step, masks: GetMasks | None = None) -> Deferred:
        return Deferred(lambda: self._slots.run(step, self.execute, masks))

    def add_adapter(self, adapter: str, parts: Mapping[str, LowRank]) -> None:
        pass

    def drop_adapter(self, adapter: str) -> None:
        pass

    def block_layout(self) -> str:
        return "null"

    def block_bytes(self, group: int) -> int:
        return 0

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        return [b""] * len(block_ids)

    def write_blocks(
        self, group: int, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]
    ) -> None:
        pass

    def execute(self, batch: Batch) -> np.ndarray:
        counts = np.diff(batch.row_offsets)
        rows = zip((batch.context_lens - counts).tolist(), counts.tolist(), strict=True)
        load = Load(tuple(rows), len(batch.logit_rows), *self._kv_bytes)
        self.cost += self.program.cost(load, self._nbytes)
        return np.broadcast_to(self._zeros, (len(batch.logit_rows), *self.program.output.shape))


class NullDevice(HostDevice):
    """The device of the null backend: it holds nothing, so every model fits."""

    name = "null"
    computes = False
    kv_dtypes = tuple(KV_ITEM_BYTES)

    def in_words(self) -> str:
        return "counts only, computes nothing"

    def facts(self) -> Mapping[str, str | int]:
        return {}

    def layout(self, program: Program, storage: Mapping[str, Storage]) -> Layout:
        return Layout()

    def own_kv_dtype(self, floats: str) -> str:
        return "float32"

    def build(
        self,
        program: Program,
        weights: WeightPlan,
        capacity: Capacity,
        progress: Progress | None = None,
        draft: DraftModel[WeightPlan] | None = None,
        vision: Vision | None = None,
    ) -> NullBackend:
        """Create the backend, which has nothing to propose: a draft model is ignored."""
        item, scale = KV_ITEM_BYTES[capacity.kv_dtype], KV_SCALE_BYTES.get(capacity.kv_dtype, 0)
        return NullBackend(program, weights.stored_bytes, item, capacity.block_size, scale)

    def loops(self) -> NoReturn:
        raise ConfigError("device = 'null' computes nothing that could be measured", "leave it out")
