"""The reference backend: interprets a program op by op in NumPy, float32. Slow, simple and exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ml_dtypes  # noqa: F401  # gives NumPy the name bfloat16
import numpy as np
from threadpoolctl import ThreadpoolController

from quire.backends.backend import Capacity, GetMasks
from quire.backends.host import HostDevice
from quire.backends.kv_cache import KV_DTYPES
from quire.backends.slots import Deferred, Slots
from quire.errors import ConfigError
from quire.program.batch import Batch
from quire.program.caches import PagedKV, PagedLatent, SlotState
from quire.program.ops.state import States
from quire.program.passes import plan_buffers
from quire.program.program import Program, Quantized, Run, Weight
from quire.quantize.kinds import FloatStorage, Storage
from quire.types import Step
from quire.weights.load import Progress, load
from quire.weights.plan import Layout, WeightPlan


class ReferenceBackend:
    """Runs a program in NumPy. Every sum has one order (quire.program.numerics).

    Float weights are converted to float32 once, at load; quantized ones stay as stored and multiply quantized
    activations. `num_blocks` are the blocks of each cache group; a group of states has `num_slots` and
    `num_snapshots` entries instead.
    """

    name = "reference"

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        *,
        num_blocks: Sequence[int],
        block_size: int,
        kv_cache_dtype: str = "auto",
        num_slots: int = 0,
        num_snapshots: int = 0,
    ) -> None:
        self.program = program
        # A BLAS may split a sum over K among threads, which changes its order: limit it to one thread.
        self._blas = ThreadpoolController().select(user_api="blas")
        self._quantized = {name: w for name, w in weights.items() if isinstance(w, Quantized)}
        self._weights = {
            name: np.ascontiguousarray(weight.dense())
            for name, weight in weights.items()
            if name not in self._quantized
        }
        self._groups = program.layer_groups
        self._slots = Slots(program.output.width, block_size, len(num_blocks))
        self._last_use = plan_buffers(program).last_use
        dtype = KV_DTYPES[kv_cache_dtype]
        self._caches: list[Any] = []
        for spec, group in zip(program.caches, self._groups, strict=True):
            if isinstance(spec, SlotState):
                self._caches.append(States.empty(spec, num_slots, num_snapshots))
            else:
                self._caches.append(_paged(spec, num_blocks[group], block_size, dtype))

    def launch(self, step: Step, masks: GetMasks | None = None) -> Deferred:
        return Deferred(lambda: self._slots.run(step, self.execute, masks))

    def execute(self, batch: Batch) -> np.ndarray:
        """Return the logits [L, vocab] of the batch's logit rows."""
        with self._blas.limit(limits=1):
            return self._execute(batch)

    def _execute(self, batch: Batch) -> np.ndarray:
        run = Run(batch, self._weights, self._caches, self._groups, self._quantized)
        values: dict[int, np.ndarray] = {}
        for number, op in enumerate(self.program):
            result = op.reference(run, *(_read(values[v.index]) for v in op.inputs()))
            results = result if isinstance(result, tuple) else (result,)
            for value, array in zip(op.outputs(), results, strict=True):
                values[value.index] = array.astype(value.dtype, copy=False)
            for value in (*op.inputs(), *op.outputs()):
                if self._last_use[value.index] == number:
                    values.pop(value.index, None)
        return _read(values[self.program.output.index])


def _read(stored: np.ndarray) -> np.ndarray:
    """Return a value as ops read it: numbers as float32, indices unchanged."""
    return stored if stored.dtype == np.int32 else stored.astype(np.float32, copy=False)


def _paged(spec: PagedKV | PagedLatent, num_blocks: int, block_size: int, dtype: np.dtype[Any]) -> Any:
    """Return the arrays of one layer's cache (quire.program.program.Run)."""
    if isinstance(spec, PagedLatent):
        return np.zeros((num_blocks, block_size, spec.dim), dtype)
    shapes = [(num_blocks, block_size, spec.num_heads, dim) for dim in (spec.key_dim, spec.value_dim)]
    return tuple(np.zeros(shape, dtype) for shape in shapes)


class ReferenceDevice(HostDevice):
    """NumPy on the host. For exactness, float weights and by default the cache are float32.

    `num_threads` threads load weights; one computes.
    """

    name = "reference"
    keeps_floats_as = "float32"
    kv_dtypes = tuple(name for name in KV_DTYPES if name != "auto")

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads

    def in_words(self) -> str:
        return "NumPy, float32"

    def facts(self) -> Mapping[str, str | int]:
        return {}

    def layout(self, program: Program, storage: Mapping[str, Storage]) -> Layout:
        """Lay out floats as float32, quantized weights as stored."""
        specs = program.weights()
        kept = {name: FloatStorage("f32") if storage[name].is_float else storage[name] for name in specs}
        return Layout.of((n, kept[n].kind, s.shape, kept[n].nbytes(s.shape)) for n, s in specs.items())

    def own_kv_dtype(self, floats: str) -> str:
        return "float32"

    def step_bytes(self, program: Program, weights: WeightPlan, num_tokens: int) -> int:
        """Return the bytes of values, and of the largest quantized matrix unpacked."""
        values = super().step_bytes(program, weights, num_tokens)
        return values + max(weights.storage[w.name].product_bytes(w.shape) for w in weights.specs.values())

    def build(
        self,
        program: Program,
        weights: WeightPlan,
        capacity: Capacity,
        progress: Progress | None = None,
    ) -> ReferenceBackend:
        loaded = load(weights, progress, self._num_threads)
        return ReferenceBackend(
            program,
            loaded,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            kv_cache_dtype=capacity.kv_dtype,
            num_slots=capacity.max_num_seqs,
            num_snapshots=capacity.num_snapshots,
        )

    def loops(self) -> NoReturn:
        raise ConfigError("the reference backend has no ceilings to measure", "leave device out")
