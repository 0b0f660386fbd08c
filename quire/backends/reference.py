"""The reference backend: interprets a program op by op in NumPy, float32. Slow, simple and exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import ml_dtypes  # noqa: F401  # gives NumPy the name bfloat16
import numpy as np
from threadpoolctl import ThreadpoolController

from quire.backends.backend import Capacity, GetMasks
from quire.backends.block_memory import BlockMemory, layout_of
from quire.backends.draft_model import DraftModel, shared_table, spare_blocks
from quire.backends.drafting import HostPasses, ModelDrafts
from quire.backends.host import HostDevice
from quire.backends.kv_cache import KV_DTYPES
from quire.backends.slot_images import SlotImages
from quire.backends.slots import Deferred, Slots
from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.program.batch import Batch
from quire.program.cache_arrays import paged_arrays
from quire.program.caches import SlotState
from quire.program.ops.slot_states import States
from quire.program.passes import plan_buffers
from quire.program.program import LowRank, Program, Quantized, Run, Weight
from quire.quantize.kinds import Dense, FloatStorage, Storage, to_float32
from quire.types import Step
from quire.weights.load import Progress, load
from quire.weights.plan import Layout, WeightPlace, WeightPlan


class ReferenceBackend:
    """Runs a program in NumPy. Every sum has one order (quire.program.numerics).

    Float weights are converted to float32 once, at load; quantized ones stay as stored and multiply quantized
    activations. `num_blocks` are the blocks of each cache group; a group of states has `num_slots` and
    `num_snapshots` entries instead. `draft` proposes tokens, in caches of its own.
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
        draft: DraftModel[Mapping[str, Weight]] | None = None,
        vision: Vision | None = None,
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
        self._adapters: dict[str, Mapping[str, LowRank]] = {}
        drafting = None
        if draft is not None:
            table = shared_table(program, draft.program)
            own_blocks = num_blocks[table.group]
            drafter = ReferenceBackend(
                draft.program,
                self._shared(draft.program, weights) if draft.weights is None else draft.weights,
                num_blocks=[own_blocks + num_slots * spare_blocks(block_size)]
                * len(draft.program.cache_groups),
                block_size=block_size,
                kv_cache_dtype=kv_cache_dtype,
            )
            passes = HostPasses(drafter.compute, program.output.width)
            drafting = ModelDrafts(draft, passes, table, own_blocks, block_size, num_slots)
        self._drafting = drafting
        images = None
        if vision is not None:
            tower = ReferenceBackend(
                vision.program, self._shared(vision.program, weights), num_blocks=[], block_size=block_size
            )
            images = SlotImages(vision, tower.begin)
        self._slots = Slots(program.output.width, block_size, len(num_blocks), drafting, images)
        self._last_use = plan_buffers(program).last_use
        dtype = KV_DTYPES[kv_cache_dtype]
        self._caches: list[Any] = []
        for spec, group in zip(program.caches, self._groups, strict=True):
            if isinstance(spec, SlotState):
                self._caches.append(States.empty(spec, num_slots, num_snapshots))
            else:
                self._caches.append(paged_arrays(spec, num_blocks[group], block_size, dtype))
        groups = program.cache_groups
        self._memory = BlockMemory(self._arrays(group) for group in range(len(groups)))
        self._layout = layout_of(self.name, kv_cache_dtype, block_size, groups, self._groups)

    def _shared(self, program: Program, weights: Mapping[str, Weight]) -> dict[str, Weight]:
        """Return the weights of a program among those of this one, converted already."""
        kept, own = self._quantized, self._weights
        return {name: weights[name] if name in kept else Dense(own[name]) for name in program.weights()}

    def _arrays(self, group: int) -> Iterator[np.ndarray]:
        """Yield the arrays with the blocks of a group, or its snapshots."""
        for cache, of in zip(self._caches, self._groups, strict=True):
            if of != group:
                continue
            if isinstance(cache, States):
                yield from (cache.snapshot_borders, cache.snapshot_inputs)
            else:
                yield from cache if isinstance(cache, tuple) else (cache,)

    def add_adapter(self, adapter: str, parts: Mapping[str, LowRank]) -> None:
        self._adapters[adapter] = {
            name: LowRank(to_float32(part.down), to_float32(part.up), part.scale)
            for name, part in parts.items()
        }

    def drop_adapter(self, adapter: str) -> None:
        del self._adapters[adapter]

    def block_layout(self) -> str:
        return self._layout

    def block_bytes(self, group: int) -> int:
        return self._memory.num_bytes[group]

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        return self._memory.read(group, block_ids)

    def write_blocks(
        self, group: int, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]
    ) -> None:
        self._memory.write(group, block_ids, contents)
        self._slots.replaced(group, block_ids)

    def launch(self, step: Step, masks: GetMasks | None = None) -> Deferred:
        return Deferred(lambda: self._slots.run(step, self._logits, masks))

    def execute(self, batch: Batch) -> np.ndarray:
        """Return the logits [L, vocab] of the batch's logit rows."""
        return self.compute(batch)[0]

    def compute(self, batch: Batch) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the same, and the hidden states that the program hands out, if it does."""
        one = self.begin(batch)
        one.advance(1.0)
        return one.output(), one.hidden()

    def _logits(self, batch: Batch) -> np.ndarray:
        logits, hidden = self.compute(batch)
        if self._drafting is not None and hidden is not None:
            self._drafting.keep(batch.places(self._drafting.table.group), hidden)
        return logits

    def begin(self, batch: Batch) -> Pass:
        """Return a batch on its way through the program, of which nothing is computed yet."""
        run = Run(batch, self._weights, self._caches, self._groups, self._quantized, self._adapters)
        return Pass(self.program, run, self._last_use, self._blas)


class Pass:
    """A batch on its way through a program, op by op. A value is kept until its last use."""

    def __init__(
        self, program: Program, run: Run, last_use: Mapping[int, int], blas: ThreadpoolController
    ) -> None:
        self._program, self._run, self._last_use, self._blas = program, run, last_use, blas
        self._values: dict[int, np.ndarray] = {}
        self._num_done = 0

    def advance(self, share: float) -> None:
        """Compute until so large a share of the ops is done, all if it is 1."""
        end = int(share * len(self._program.ops))
        with self._blas.limit(limits=1):
            for number in range(self._num_done, end):
                self._compute(number)
        self._num_done = max(self._num_done, end)

    def _compute(self, number: int) -> None:
        op, values = self._program.ops[number], self._values
        result = op.reference(self._run, *(_read(values[v.index]) for v in op.inputs()))
        results = result if isinstance(result, tuple) else (result,)
        for value, array in zip(op.outputs(), results, strict=True):
            values[value.index] = array.astype(value.dtype, copy=False)
        for value in (*op.inputs(), *op.outputs()):
            if self._last_use[value.index] == number:
                values.pop(value.index, None)

    def output(self) -> np.ndarray:
        """Return the output of the program, when all ops are done."""
        return _read(self._values[self._program.output.index])

    def hidden(self) -> np.ndarray | None:
        """Return the hidden states that it hands out, if it does."""
        hidden = self._program.hidden
        return None if hidden is None else _read(self._values[hidden.index])


def _read(stored: np.ndarray) -> np.ndarray:
    """Return a value as ops read it: numbers as float32, indices unchanged."""
    return stored if stored.dtype == np.int32 else stored.astype(np.float32, copy=False)


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
        return Layout.of(
            WeightPlace(n, kept[n].kind, s.shape, 0, kept[n].nbytes(s.shape)) for n, s in specs.items()
        )

    def own_kv_dtype(self, floats: str) -> str:
        return "float32"

    def step_bytes(
        self, program: Program, weights: WeightPlan, num_tokens: int, num_logits: int | None = None
    ) -> int:
        """Return the bytes of values, and of the largest quantized matrix unpacked."""
        values = super().step_bytes(program, weights, num_tokens, num_logits)
        return values + max(weights.storage[w.name].product_bytes(w.shape) for w in weights.specs.values())

    def build(
        self,
        program: Program,
        weights: WeightPlan,
        capacity: Capacity,
        progress: Progress | None = None,
        draft: DraftModel[WeightPlan] | None = None,
        vision: Vision | None = None,
    ) -> ReferenceBackend:
        loaded = load(weights, progress, self._num_threads)
        drafter = None
        if draft is not None:
            own = draft.weights
            drafter = draft.having(None if own is None else load(own, None, self._num_threads))
        return ReferenceBackend(
            program,
            loaded,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            kv_cache_dtype=capacity.kv_dtype,
            num_slots=capacity.max_num_seqs,
            num_snapshots=capacity.num_snapshots,
            draft=drafter,
            vision=vision,
        )

    def loops(self) -> NoReturn:
        raise ConfigError("the reference backend has no ceilings to measure", "leave device out")
