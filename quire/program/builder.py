"""Builder: records the ops of a model function, and checks shapes as they are recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from quire.errors import ConfigError, quoted
from quire.program import ops
from quire.program.caches import CacheSpec, PagedKV, SlotState
from quire.program.dtypes import DType
from quire.program.numerics import ACTIVATIONS
from quire.program.ops.experts import ExpertWeights, Routing
from quire.program.ops.state import CHUNK
from quire.program.program import MAX_TENSORS, Count, Op, Program, Value, WeightSpec
from quire.program.rope import Rope

AnyOp = TypeVar("AnyOp", bound=Op)


class Names(str):
    """A path in the checkpoint's tree of names: `w / "model.norm"` is a name below `w`."""

    def __truediv__(self, name: str) -> Names:
        return Names(f"{self}.{name}" if self else name)


class Builder:
    """Records ops in order. Every method returns the Value it writes; nothing is computed."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._caches: list[CacheSpec] = []
        self._num_values = 0
        self._num_tensors = 0

    def program(self, output: Value, ignored: Iterable[str] = ()) -> Program:
        """Return the finished program; `output` are the logits [L, vocab]."""
        return Program(tuple(self._ops), output, tuple(self._caches), tuple(ignored))

    # Embedding and output

    def embed(self, w: Names, vocab_size: int, hidden_size: int, tied: bool = False) -> Value:
        """Map token ids to vectors. `tied`: the table is also the output head, so it may be quantized."""
        table = _matrix(w, vocab_size, hidden_size, quantizable=tied)
        return self.record(ops.Embed(self.value((hidden_size,)), table)).out

    def position_embed(self, w: Names, num_positions: int, hidden_size: int) -> Value:
        table = _matrix(w, num_positions, hidden_size, quantizable=False)
        return self.record(ops.PositionEmbed(self.value((hidden_size,)), table)).out

    def sampled_rows(self, x: Value) -> Value:
        """Select the rows that need logits, [L, ...]."""
        return self.record(ops.SampledRows(self.value(x.shape, "L"), x)).out

    # Matrix products

    def linear(
        self, x: Value, w: Names, out: int | tuple[int, ...], *, bias: bool = False, transposed: bool = False
    ) -> Value:
        """Compute x weight^T (+ bias). `transposed`: the checkpoint stores [in, out]."""
        shape = (out,) if isinstance(out, int) else out
        weight = _matrix(w, math.prod(shape), x.width, transposed=transposed)
        b = _vector(w / "bias", math.prod(shape)) if bias else None
        return self.record(ops.Linear(self.value(shape, x.count), x, weight, b)).out

    def experts(
        self,
        x: Value,
        scores: Value,
        experts: ExpertWeights,
        *,
        chosen: int,
        routing: Routing,
        activation: str = "silu",
        limit: float | None = None,
    ) -> Value:
        """Mix the `chosen` experts of each token by its router's `scores` [T, experts]."""
        _known(activation)
        if not 0 < chosen <= scores.width:
            raise ConfigError(f"cannot choose {chosen} of {scores.width} experts")
        out = self.value(x.shape, x.count)
        return self.record(ops.Experts(out, x, scores, experts, chosen, routing, activation, limit)).out

    # Norms and elementwise

    def rms_norm(self, x: Value, w: Names, eps: float, offset: float = 0.0) -> Value:
        weight = _vector(w / "weight", x.shape[-1])
        return self.record(ops.RMSNorm(self.value(x.shape, x.count), x, weight, eps, offset)).out

    def layer_norm(self, x: Value, w: Names, eps: float, bias: bool = True) -> Value:
        weight = _vector(w / "weight", x.shape[-1])
        b = _vector(w / "bias", x.shape[-1]) if bias else None
        return self.record(ops.LayerNorm(self.value(x.shape, x.count), x, weight, b, eps)).out

    def add(self, x: Value, y: Value) -> Value:
        _same(x, y)
        return self.record(ops.Add(self.value(x.shape, x.count), x, y)).out

    def scale(self, x: Value, factor: float) -> Value:
        return self.record(ops.Scale(self.value(x.shape, x.count), x, factor)).out if factor != 1 else x

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self.record(ops.SoftCap(self.value(x.shape, x.count), x, cap)).out

    def activation(self, x: Value, activation: str) -> Value:
        _known(activation)
        return self.record(ops.Unary(self.value(x.shape, x.count), x, activation)).out

    def gated_activation(self, gate: Value, up: Value, activation: str) -> Value:
        _same(gate, up)
        _known(activation)
        return self.record(ops.GatedActivation(self.value(up.shape, up.count), gate, up, activation)).out

    def slice(self, x: Value, first: int, out: int | tuple[int, ...]) -> Value:
        """Take the columns of a packed projection from `first` on."""
        value = self.value((out,) if isinstance(out, int) else out, x.count)
        if first + value.width > x.width:
            raise ConfigError(f"slice {first} + {value.width} leaves a value of width {x.width}")
        return self.record(ops.Slice(value, x, first)).out

    # Attention

    def rotary(self, x: Value, rope: Rope) -> Value:
        if not 0 < rope.dim <= x.shape[-1] or rope.dim % 2:
            raise ConfigError(f"cannot rotate {rope.dim} of {x.shape[-1]} numbers per head")
        return self.record(ops.Rotary(self.value(x.shape, x.count), x, rope)).out

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Names | None = None,
    ) -> Value:
        """Apply causal attention of q [T, heads, dim] over the cache of the next layer.

        The keys k [T, kv_heads, dim] are as wide as the queries; the values v may have another width.
        """
        (heads, dim), (groups, key_dim), (_, value_dim) = q.shape, k.shape, v.shape
        if (dim, groups) != (key_dim, v.shape[0]):
            raise ConfigError(f"shapes differ: queries {q.shape}, keys {k.shape}, values {v.shape}")
        if heads % groups:
            raise ConfigError(f"{heads} query heads cannot share {groups} key heads evenly")
        op = ops.Attention(
            self.value((heads * value_dim,)),
            q,
            k,
            v,
            layer=self.cache(PagedKV(groups, key_dim, value_dim, window)),
            scale=dim**-0.5 if scale is None else scale,
            window=window,
            softcap=softcap,
            sinks=_vector(sinks, heads) if sinks is not None else None,
        )
        return self.record(op).out

    # States

    def short_convolution(self, x: Value, w: Names, kernel: int, dtype: DType = "float32") -> Value:
        """Convolve each channel causally over `kernel` positions; inputs are cached as `dtype`."""
        weight = WeightSpec(w / "weight", (x.width, 1, kernel), (w / "weight",))
        state = SlotState((0,), x.width, kernel - 1, dtype)
        return self.record(ops.ShortConvolution(self.value(x.shape), x, weight, self.cache(state), state)).out

    def gated_recurrence(self, x: Value, decay: Value, dtype: DType = "float32") -> Value:
        """Compute h[t] = decay[t] * h[t - 1] + x[t]; states and inputs are cached as `dtype`."""
        _same(x, decay)
        state = SlotState((x.width,), 2 * x.width, CHUNK - 1, dtype)
        return self.record(ops.GatedRecurrence(self.value(x.shape), x, decay, self.cache(state), state)).out

    # For ops without a method here

    def value(self, shape: tuple[int, ...], count: Count = "T", dtype: DType = "float32") -> Value:
        """Create a value for an op to write."""
        self._num_values += 1
        return Value(self._num_values - 1, count, shape, dtype)

    def cache(self, spec: CacheSpec) -> int:
        """Add a layer whose cache has this spec; return its index, by which ops refer to the cache."""
        self._caches.append(spec)
        return len(self._caches) - 1

    def record(self, op: AnyOp) -> AnyOp:
        """Append an op that writes values of this builder."""
        self._ops.append(op)
        self._num_tensors += sum(len(weight.sources) for weight in op.weights())
        if self._num_tensors > MAX_TENSORS:
            problem = f"layers and experts together take more than {MAX_TENSORS:,} tensors"
            raise ConfigError(f"config.json: {problem}", "no model has so many: the file is damaged")
        return op


def _matrix(
    w: Names, rows: int, width: int, *, transposed: bool = False, quantizable: bool = True
) -> WeightSpec:
    name = w / "weight"
    return WeightSpec(name, (rows, width), (name,), transposed=transposed, quantizable=quantizable)


def _vector(name: Names, size: int) -> WeightSpec:
    return WeightSpec(name, (size,), (name,))


def _same(x: Value, y: Value) -> None:
    if (x.count, x.shape) != (y.count, y.shape):
        raise ConfigError(f"shapes differ: {x.count} x {x.shape} and {y.count} x {y.shape}")


def _known(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ConfigError(f"unknown activation {quoted(activation)}", f"known: {', '.join(ACTIVATIONS)}")
