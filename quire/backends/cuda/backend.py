"""The cuda implementation of the Backend protocol: programs as launches on an accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.backends.backend import Capacity, GetMasks
from quire.backends.block_memory import layout_of
from quire.backends.cuda.accelerator import Accelerator
from quire.backends.cuda.caches import DeviceCaches
from quire.backends.cuda.launch_list import LaunchList
from quire.backends.cuda.lower import record
from quire.backends.cuda.products import rounded_row_bytes
from quire.backends.cuda.step_arrays import StepMemory, rotations_of
from quire.backends.cuda.weights import DeviceWeight
from quire.backends.slots import Deferred, Slots
from quire.errors import ConfigError
from quire.program.batch import Batch
from quire.program.passes import gather_products, plan_buffers
from quire.program.program import LowRank, Program
from quire.types import Step


class CudaBackend:
    """Runs a program by launches on an accelerator. Bits depend on its kernels and their target alone.

    Tokens are sampled on the host, by the definition in quire.sampling: the logits of rows that need them are
    copied there, and a step is computed when it is collected.
    """

    name = "cuda"

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, DeviceWeight],
        accelerator: Accelerator,
        capacity: Capacity,
    ) -> None:
        self.program = program = gather_products(program)
        self._accelerator = accelerator
        self._caches = DeviceCaches(
            accelerator, program, capacity.num_blocks, capacity.block_size, capacity.kv_dtype
        )
        plan = plan_buffers(program)
        recording = LaunchList(program, weights, self._caches.layers, plan, capacity.block_size, accelerator)
        for op in program:
            record(op, recording)
        self._launches, self._output = recording.launches, plan.buffer[program.output.index]
        sizes = (*plan.sizes, ("T", rounded_row_bytes(program)))
        self._memory = StepMemory(accelerator, sizes, rotations_of(program))
        self._slots = Slots(program.output.width, capacity.block_size, len(capacity.num_blocks))
        self._layout = layout_of(
            self.name, capacity.kv_dtype, capacity.block_size, program.cache_groups, program.layer_groups
        )

    def launch(self, step: Step, masks: GetMasks | None = None) -> Deferred:
        return Deferred(lambda: self._slots.run(step, self.execute, masks))

    def execute(self, batch: Batch) -> np.ndarray:
        """Return the logits [L, vocab] of the batch's logit rows."""
        step = self._memory.put(batch)
        for launch in self._launches:
            self._accelerator.launch(launch(step))
        return self._accelerator.fetch(step.values[self._output]).result()

    def add_adapter(self, adapter: str, parts: Mapping[str, LowRank]) -> None:
        raise ConfigError("the cuda backend has no kernels for adapters", "use device='native'")

    def drop_adapter(self, adapter: str) -> None:
        """Do nothing: there are none."""

    def block_layout(self) -> str:
        return self._layout

    def block_bytes(self, group: int) -> int:
        return self._caches.block_bytes(group)

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        return self._caches.read(group, block_ids)

    def write_blocks(
        self, group: int, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]
    ) -> None:
        self._caches.write(group, block_ids, contents)
