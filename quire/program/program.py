"""Program: a model recorded once as a flat list of ops over named values.

This is the only interface between model code and backends. A Program has no weights and no batch sizes: the
leading dimension of every value is a *count* ("T" tokens, or "L" rows that need logits) that each step
determines. So its cost can be computed for any batch before weights are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from quire.program.caches import CacheSpec
from quire.program.dtypes import ITEM_BYTES, DType
from quire.program.features import Feature

if TYPE_CHECKING:
    import numpy as np

    from quire.program.batch import Batch

Count = Literal["T", "L"]
MAX_TENSORS = 1 << 17  # of a checkpoint: twice that of the largest published models


@dataclass(frozen=True, slots=True)
class Value:
    """An array of a running program, [T or L, *shape]; written by exactly one op.

    Ops compute in float32: results are rounded to the value's `dtype`, and converted back to float32 when
    read. Values of int32 (indices) are read unchanged.
    """

    index: int
    count: Count
    shape: tuple[int, ...]
    dtype: DType = "float32"

    @property
    def width(self) -> int:
        """Elements in one row."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.width * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some outputs of a stored matrix: of every `period`, those of the `parts` (first, count).

    All of a part come before those of the next: so queries and keys that alternate by head are separated.
    """

    period: int
    parts: tuple[tuple[int, int], ...]

    @property
    def taken(self) -> int:
        """Outputs taken of each period."""
        return sum(count for _, count in self.parts)

    def of(self, total: int) -> slice | list[int]:
        """Return the indices of the outputs taken of so many."""
        first, count = self.parts[0]
        if len(self.parts) == 1 and count == 1:
            return slice(first, total, self.period)
        if len(self.parts) == 1 and self.period == total:
            return slice(first, first + count)
        starts = range(0, total, self.period)
        return [start + first + i for first, count in self.parts for start in starts for i in range(count)]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight in the form the program needs, and its sources in the checkpoint.

    Canonical matrices are [out, in] or [experts, out, in]; vectors are [n]. Several `sources` are
    stacked along a new first axis (one per expert). `transposed` sources are stored with the last two axes
    swapped; "either" ones as their shape says, swapped if both fit. `rows` are the outputs taken of them, if
    not all (gate and up in one matrix). `by_head` splits these into one matrix for each head: [heads, out,
    in] ("outputs"), or with the outputs of a head as its inputs, [heads, in, out] ("inputs"). Only
    `quantizable` weights (the matrices of linear layers) may be quantized. `stored` is the shape of the
    source if it has the same numbers on other axes (convolutions of patches). Sources of a weight of `turns`
    parts have an input of each part in turns; it has one part after the other. If `below`, the numbers are
    integers from 0 to below - 1, and stored as such.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    transposed: bool | Literal["either"] = False
    rows: Rows | None = None
    quantizable: bool = False
    by_head: Literal["outputs", "inputs"] | None = None
    stored: tuple[int, ...] = ()
    turns: int = 1
    below: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Weight(Protocol):
    """A loaded weight of any storage kind, in canonical shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of this weight."""
        ...

    def dense(self) -> np.ndarray:
        """Return the values as float32, exactly as the storage kind defines them."""
        ...


@runtime_checkable
class Quantized(Protocol):
    """A matrix [out, in] of integers, or one for each expert, that multiplies quantized activations."""

    def product(self, x: np.ndarray) -> np.ndarray:
        """Return x [T, in] float32 times the matrix transposed, [T, out] (numerics.quantized_matmul)."""
        ...

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return rows `ids` [n] as float32, [n, in]."""
        ...

    def __getitem__(self, expert: int) -> Quantized: ...


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The part that an adapter adds to the product of x with one weight: up (scale * (down x)).

    down [rank, in] and up [out, rank] are bfloat16, float16 or float32. Source: Hu et al., arXiv:2106.09685.
    """

    down: np.ndarray
    up: np.ndarray
    scale: float

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a computation in operations and bytes. A multiply-add is two operations."""

    flops: float = 0
    weight_bytes: float = 0
    kv_read_bytes: float = 0
    kv_write_bytes: float = 0
    activation_bytes: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_write_bytes + other.kv_write_bytes,
            self.activation_bytes + other.activation_bytes,
        )

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """The batch of a cost estimate: (start, count) of every row, and the number of rows that need logits.

    Ops know it only by its features, of which their costs must be sums: so that a program's costs can be
    folded into coefficients (quire.roofline.folded), which calls them with features in place of numbers.
    """

    rows: tuple[tuple[int, int], ...]
    num_logits: int
    kv_itemsize: int = 4  # bytes of one cached number
    kv_scale_bytes: int = 0  # of the scale of a token's numbers of one head
    _known: dict[Feature, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def value(self, feature: Feature) -> Any:
        """Return a feature of this batch."""
        if feature not in self._known:
            self._known[feature] = feature.value(self.rows, self.num_logits)
        return self._known[feature]

    @property
    def num_tokens(self) -> int:
        return self.size("T")

    def size(self, count: Count) -> int:
        found: int = self.value(_SIZES[count])
        return found

    def positions(self, window: int | None, chunked: bool = False) -> float:
        """Return the cached positions that rows read: those visible to any of their tokens."""
        if window and chunked:
            return self.num_tokens + self.value(Feature("since_boundary", window))
        found: float = self.value(Feature("positions", window or 0))
        return found

    def pairs(self, window: int | None, chunked: bool = False) -> float:
        """Return the pairs of a token and a position visible to it."""
        kind: Literal["chunk_pairs", "pairs"] = "chunk_pairs" if chunked else "pairs"
        found: float = self.value(Feature(kind, window or 0))
        return found

    def touched(self, count: Count, chosen: int, num_experts: int) -> float:
        """Return the expected share of experts that at least one of T tokens or L rows chooses."""
        kind: Literal["experts", "logit_experts"] = "experts" if count == "T" else "logit_experts"
        found: float = self.value(Feature(kind, 0, chosen, num_experts))
        return found


_SIZES: dict[Count, Feature] = {"T": Feature("tokens"), "L": Feature("logits")}
WeightBytes = Callable[[WeightSpec], int]


@dataclass(frozen=True, slots=True)
class Op:
    """One entry of a program. A subclass documents shapes and mathematics, and defines cost and reference.

    It writes the values in the fields `written` and reads those in all others.
    """

    out: Value

    written: ClassVar[tuple[str, ...]] = ("out",)

    def inputs(self) -> tuple[Value, ...]:
        names = _read(type(self))  # type: ignore[arg-type]  # mypy looks at the hash of an instance
        return tuple([getattr(self, name) for name in names])

    def outputs(self) -> tuple[Value, ...]:
        return tuple([getattr(self, name) for name in self.written])

    def weights(self) -> tuple[WeightSpec, ...]:
        return ()

    def flops(self, load: Load) -> float:
        raise TypeError(f"{type(self).__name__} does not state its operations")

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written) bytes of the layer's cache."""
        return 0, 0

    def weight_bytes(self, load: Load, nbytes: WeightBytes) -> float:
        """Return the bytes of weights read: all, unless the op reads only some rows or experts."""
        return sum(nbytes(w) for w in self.weights())

    def activation_bytes(self, load: Load) -> float:
        """Return the bytes of values read and written: all, unless the op reads only a part."""
        return sum(load.size(v.count) * v.row_bytes for v in (*self.inputs(), *self.outputs()))

    def cost(self, load: Load, nbytes: WeightBytes) -> Cost:
        read, written = self.kv_bytes(load)
        touched = self.activation_bytes(load)
        return Cost(self.flops(load), self.weight_bytes(load, nbytes), read, written, touched)

    def reference(self, run: Run, *inputs: np.ndarray) -> np.ndarray | tuple[np.ndarray, ...]:
        """Compute the op in NumPy, from and to float32 (or int32), with one fixed order of every sum."""
        raise TypeError(f"{type(self).__name__} has no reference")


@cache
def _read(kind: type[Op]) -> tuple[str, ...]:
    """Return the names of the fields with the values that an op reads, in order."""
    values = [f.name for f in fields(kind) if f.type in ("Value", Value)]
    return tuple(name for name in values if name not in kind.written)


@dataclass(slots=True)
class Run:
    """The context of an op's reference, besides its inputs: the batch, the weights, the caches.

    `caches` are those of the layers, by their specs: for PagedKV (keys, values), each
    [blocks, block_size, heads, dim]; for SlotState a `quire.program.ops.state.States`; for others an array
    [blocks, block_size, dim], of entries [blocks, entries, dim] (quire.program.cache_arrays). `groups` are
    the groups of the layers, which index `batch.block_tables`.
    """

    batch: Batch
    weights: Mapping[str, np.ndarray]  # name -> float32 array in canonical shape
    caches: Sequence[Any] = ()
    groups: Sequence[int] = ()
    quantized: Mapping[str, Quantized] = field(default_factory=dict)  # weights not in `weights`
    # By the adapter of admissions, then by the name of a weight; in float32.
    adapters: Mapping[str, Mapping[str, LowRank]] = field(default_factory=dict)

    def matrix(self, weight: WeightSpec) -> np.ndarray | Quantized:
        """Return a weight that may be quantized, for `matmul` and for indexing by expert."""
        name = weight.name
        return self.quantized[name] if name in self.quantized else self.weights[name]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of a checkpoint that is not computed: its tensors, by patterns (fnmatch).

    `stated` tells that config.json describes it. If it is for other input than text, the rest is `text_only`.
    `use` says what would use it, if anything would.
    """

    part: str  # "the vision tower"
    patterns: tuple[str, ...]
    stated: bool = False
    text_only: bool = True
    use: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """A recorded model: its ops in order, the value of the logits [L, vocab], and the cache specs by layer.

    If `pooled`, the output is a vector [L, size] for each row, which is a whole text: no token is sampled.
    `ignored` are patterns (fnmatch) of checkpoint tensors that the model does not need, `left_out` the parts
    of the checkpoint that are not computed. `hidden` are the hidden states that it hands out: a model's, of
    every token, to its prediction layer; that layer's own, of rows with logits, to its next pass.
    """

    ops: tuple[Op, ...]
    output: Value
    caches: tuple[CacheSpec, ...]
    ignored: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    pooled: bool = False
    hidden: Value | None = None

    def weights(self) -> dict[str, WeightSpec]:
        """Return every weight by name, in the order of first use."""
        return {w.name: w for op in self.ops for w in op.weights()}

    def cost(self, load: Load, nbytes: WeightBytes) -> Cost:
        return sum((op.cost(load, nbytes) for op in self.ops), Cost())

    @property
    def cache_groups(self) -> tuple[CacheSpec, ...]:
        """The distinct specs in the order of first appearance; a group is an index into them."""
        return tuple(dict.fromkeys(self.caches))

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The group of each layer."""
        groups = self.cache_groups
        return tuple(groups.index(spec) for spec in self.caches)

    def kv_token_bytes(self, item_bytes: int, scale_bytes: int = 0) -> int:
        """Return the cache bytes of one token over all layers."""
        return sum(spec.token_bytes(item_bytes, scale_bytes) for spec in self.caches)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)
