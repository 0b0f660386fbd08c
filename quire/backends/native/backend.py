"""The native backend behind the Backend protocol."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.backends.backend import Masks
from quire.backends.native import _core
from quire.backends.native.lower import Lowering, Matrices, Vectors
from quire.backends.slots import Deferred, Slots
from quire.errors import ConfigError
from quire.program.batch import Batch
from quire.program.caches import CacheSpec, PagedKV
from quire.program.passes import gather_products
from quire.program.program import Program
from quire.types import Step, StepResult


class NativeBackend:
    """Runs a program with the kernels of one instruction set. Bits depend on it, not on threads."""

    name = "native"

    def __init__(
        self,
        program: Program,
        matrices: Matrices,
        vectors: Vectors,
        *,
        num_blocks: Sequence[int],
        block_size: int,
        kv_cache_dtype: str,
        isa: str,
        num_threads: int,
    ) -> None:
        self.program = gather_products(program)
        self._native = _core.Native(isa, num_threads)
        (blocks,) = num_blocks  # the core knows one table: all groups share their blocks
        self._caches = _caches(self.program, kv_cache_dtype, blocks, block_size)
        lowering = Lowering(self._native, self.program, matrices, vectors, self._caches)
        self._output, self._width = lowering.output, program.output.width
        self._ropes = lowering.ropes
        self._slots = Slots(program.output.width, block_size, 1, _core.Sampling(isa))
        self._variants: set[int] = set()
        self.isa = isa
        self.num_threads = num_threads

    def launch(self, step: Step, masks: Masks | None = None) -> Deferred:
        return Deferred(lambda: self._run(step, masks))

    def _run(self, step: Step, masks: Masks | None) -> StepResult:
        batch = self._slots.batch(step)
        began_s = time.monotonic()
        logits = self.execute(batch)
        result = self._slots.finish(step, logits, masks)
        return replace(result, began_s=began_s, ended_s=time.monotonic())

    def execute(self, batch: Batch) -> np.ndarray:
        """Logits [L, vocab] of the batch's logit rows; overwritten by the next call."""
        self._add_frequencies(batch)
        return self._native.run(
            batch.token_ids,
            batch.positions,
            batch.row_offsets,
            batch.block_tables[0],
            batch.context_lens,
            batch.variants,
            batch.logit_rows,
            self._output,
            self._width,
        )

    def _add_frequencies(self, batch: Batch) -> None:
        """Tell the core the rope frequencies of context variants it has not seen."""
        for variant in set(batch.variants.tolist()) - self._variants:
            for rope, table in self._ropes.items():
                self._native.frequencies(table, variant, rope.frequencies(variant))
            self._variants.add(variant)


def _caches(
    program: Program, dtype: str, num_blocks: int, block_size: int
) -> list[tuple[_core.KVCache, int]]:
    """For each layer the cache that it shares with all layers of its shape, and its number there."""
    shapes = [_heads(spec) for spec in program.caches]
    shared = {
        shape: _core.KVCache(dtype, count, num_blocks, block_size, *shape)
        for shape, count in Counter(shapes).items()
    }
    return [(shared[shape], shapes[:i].count(shape)) for i, shape in enumerate(shapes)]


def _heads(spec: CacheSpec) -> tuple[int, int]:
    """How many heads a layer caches, and the numbers of a key, which are those of a value."""
    if isinstance(spec, PagedKV) and spec.key_dim == spec.value_dim:
        return spec.num_heads, spec.key_dim
    raise ConfigError(f"the native backend has no cache of the kind {spec}", "use device='reference'")
