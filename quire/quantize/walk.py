"""A walk through a program on calibration text: two models side by side, one operation at a time.

The original and the quantized model compute the same tokens. Before an operation with matrices is computed in
the quantized model, its matrices may be quantized, with the inputs that both models have for them. Weights
are pulled when an operation needs them and dropped after it, so memory holds one operation and the values
that later ones read, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from quire.program.batch import Batch
from quire.program.cache_arrays import paged_arrays
from quire.program.caches import CacheSpec, SlotState
from quire.program.ops.slot_states import States
from quire.program.passes import plan_buffers
from quire.program.program import Op, Program, Run, Value, WeightSpec
from quire.quantize.kinds import Array, Floats

BLOCK_SIZE = 64  # tokens

Pull = Callable[[WeightSpec], Floats]  # a weight in canonical shape, float32
Values = dict[int, Array]
Watch = Callable[[str, int, Floats], None]  # (weight, expert, inputs [T, in])


class Matrix:
    """A matrix, or one for each expert, as ops multiply it (program.Quantized): by the BLAS, in float32.

    `watch` is told the inputs of every product.
    """

    def __init__(self, values: Floats, watch: Callable[[int, Floats], None], expert: int = 0) -> None:
        self._values, self._watch, self._expert = values, watch, expert

    def product(self, x: Floats) -> Floats:
        """Return x [T, in] times the matrix transposed."""
        self._watch(self._expert, x)
        return x @ self._values.T

    def rows(self, ids: Array) -> Floats:
        return self._values[ids]

    def __getitem__(self, expert: int) -> Matrix:
        return Matrix(self._values[expert], self._watch, expert)


class LayerCaches(Sequence[Any]):
    """The caches of all layers, of which only the two used last are held: no operation has more."""

    def __init__(self, program: Program, rows: int, blocks: int) -> None:
        self._specs, self._rows, self._blocks = program.caches, rows, blocks
        self._held: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._specs)

    def __getitem__(self, layer: Any) -> Any:
        if layer not in self._held:
            if len(self._held) == 2:
                del self._held[next(iter(self._held))]
            self._held[layer] = self._made(self._specs[layer])
        return self._held[layer]

    def _made(self, spec: CacheSpec) -> Any:
        if isinstance(spec, SlotState):
            return States.empty(spec, self._rows, 0)
        return paged_arrays(spec, self._blocks, BLOCK_SIZE, np.dtype(np.float32))


def text_batch(program: Program, ids: Array, variant: int) -> Batch:
    """Return a batch of texts of one length, [texts, T], each in a cache of its own, logits for all."""
    rows, length = ids.shape
    blocks = -(-length // BLOCK_SIZE)
    table = np.arange(rows * blocks).reshape(rows, blocks)
    return Batch(
        token_ids=ids.reshape(-1),
        positions=np.tile(np.arange(length), rows),
        row_offsets=np.arange(0, rows * length + 1, length),
        block_tables=(table,) * len(program.cache_groups),
        context_lens=np.full(rows, length),
        slots=np.arange(rows),
        variants=np.full(rows, variant),
        logit_rows=np.arange(rows * length),
        block_size=BLOCK_SIZE,
    )


class TextRun:
    """A model on a batch of texts: the values computed so far, and what a later operation still reads."""

    def __init__(self, program: Program, batch: Batch) -> None:
        self.program, self.batch = program, batch
        blocks = sum(-(-int(n) // BLOCK_SIZE) for n in batch.context_lens)
        self._caches = LayerCaches(program, len(batch.context_lens), blocks)
        self._values: Values = {}
        self._last_use = plan_buffers(program).last_use

    def fork(self) -> TextRun:
        """Return a run that goes on from here. Caches are not shared: each layer fills its own."""
        other = TextRun(self.program, self.batch)
        other._values = dict(self._values)
        return other

    def compute(self, number: int, weights: dict[str, Floats], watch: Watch | None = None) -> None:
        """Compute op `number`, keeping its results."""
        op = self.program.ops[number]
        results = self.results(op, weights, watch)
        for value, array in zip(op.outputs(), results, strict=True):
            self._values[value.index] = array.astype(value.dtype, copy=False)
        for value in (*op.inputs(), *op.outputs()):
            if self._last_use[value.index] == number:
                self._values.pop(value.index, None)

    def results(self, op: Op, weights: dict[str, Floats], watch: Watch | None = None) -> tuple[Array, ...]:
        """Return the results of an op, which `watch` sees the inputs of matrices of."""
        quantized = {
            spec.name: Matrix(weights[spec.name], _watching(spec.name, watch))
            for spec in op.weights()
            if len(spec.shape) > 1
        }
        groups = self.program.layer_groups
        run = Run(self.batch, weights, self._caches, groups, quantized)
        found = op.reference(run, *(_read(self._values[v.index]) for v in op.inputs()))
        return found if isinstance(found, tuple) else (found,)

    def inputs(self, value: Value) -> Floats:
        """Return a value that a matrix multiplies, [T, in]."""
        x = _read(self._values[value.index])
        return x.reshape(len(x), -1)

    def output(self) -> Floats:
        """Return the logits, once every op is computed."""
        return _read(self._values[self.program.output.index])


def quantizable(op: Op) -> Iterator[WeightSpec]:
    """Yield the matrices that an op multiplies and that may be quantized."""
    if not hasattr(op, "table"):
        yield from (spec for spec in op.weights() if spec.quantizable)


def tables(program: Program) -> frozenset[str]:
    """Return the names of matrices that are also embedding tables (tied)."""
    return frozenset(
        spec.name for op in program if hasattr(op, "table") for spec in op.weights() if spec.quantizable
    )


def _watching(name: str, watch: Watch | None) -> Callable[[int, Floats], None]:
    if watch is None:
        return lambda expert, x: None
    return lambda expert, x: watch(name, expert, x)


def _read(stored: Array) -> Array:
    return stored if stored.dtype == np.int32 else stored.astype(np.float32, copy=False)
