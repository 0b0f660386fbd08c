"""Builder: records the ops of a model function, and checks shapes as they are recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from quire.errors import ConfigError, quoted
from quire.program import ops
from quire.program.caches import CacheSpec, PagedKV, PagedLatent, SlotState
from quire.program.dtypes import DType
from quire.program.numerics import ACTIVATIONS
from quire.program.ops.experts import ExpertWeights, Routing
from quire.program.ops.slot_states import CHUNK
from quire.program.program import MAX_TENSORS, Count, LeftOut, Op, Program, Rows, Value, WeightSpec
from quire.program.rope import Rope

AnyOp = TypeVar("AnyOp", bound=Op)


class Names(str):
    """A path in the checkpoint's tree of names: `w / "model.norm"` is a name below `w`."""

    def __truediv__(self, name: str) -> Names:
        return Names(f"{self}.{name}" if self else name)


class Builder:
    """Records ops in order, after those of the program `begun`. Every method returns the Value it writes."""

    def __init__(self, begun: Program | None = None) -> None:
        self._ops: list[Op] = list(begun.ops) if begun else []
        self._caches: list[CacheSpec] = list(begun.caches) if begun else []
        self._num_values = 1 + max((value.index for op in self._ops for value in op.outputs()), default=-1)
        self._num_tensors = 0

    def program(
        self, output: Value, ignored: Iterable[str] = (), left_out: Iterable[LeftOut] = ()
    ) -> Program:
        """Return the finished program; `output` are the logits [L, vocab]."""
        return Program(tuple(self._ops), output, tuple(self._caches), tuple(ignored), tuple(left_out))

    # Embedding and output

    def embed(
        self,
        w: Names,
        vocab_size: int,
        out: int | tuple[int, ...],
        tied: bool = False,
        in_place: bool = False,
        replaced: tuple[int, int] | None = None,
    ) -> Value:
        """Map token ids to vectors (see Embed). `tied`: the table is also the head, and may be quantized."""
        value = self.value((out,) if isinstance(out, int) else out)
        table = _matrix(w, vocab_size, value.width, quantizable=tied)
        return self.record(ops.Embed(value, table, in_place, replaced)).out

    def position_embed(self, w: Names, num_positions: int, hidden_size: int) -> Value:
        table = _matrix(w, num_positions, hidden_size, quantizable=False)
        return self.record(ops.PositionEmbed(self.value((hidden_size,)), table)).out

    def sampled_rows(self, x: Value) -> Value:
        """Select the rows that need logits, [L, ...]; x itself if it has only those."""
        return x if x.count == "L" else self.record(ops.SampledRows(self.value(x.shape, "L"), x)).out

    # Matrix products

    def linear(
        self,
        x: Value,
        w: Names,
        out: int | tuple[int, ...],
        *,
        bias: bool = False,
        transposed: bool = False,
        rows: Rows | None = None,
        part: str = "",
    ) -> Value:
        """Compute x weight^T (+ bias). `transposed`: the checkpoint stores [in, out].

        With `rows`, only these outputs of the stored matrix, as a weight with the name of this `part` of it.
        """
        shape = (out,) if isinstance(out, int) else out
        weight = _matrix(w, math.prod(shape), x.width, transposed=transposed)
        if rows is not None:
            weight = replace(weight, name=w / part / "weight", rows=rows)
        b = _vector(w / "bias", math.prod(shape)) if bias else None
        if b is not None and rows is not None:
            b = replace(b, name=w / part / "bias", rows=rows)
        return self.record(ops.Linear(self.value(shape, x.count), x, weight, b)).out

    def experts(
        self,
        x: Value,
        scores: Value,
        experts: ExpertWeights,
        *,
        routing: Routing,
        activation: str = "silu",
        limit: float | None = None,
        shifted: bool = True,
    ) -> Value:
        """Mix the experts of each token that its router's `scores` [T, experts] choose."""
        _known(activation)
        size, rest = divmod(scores.width, routing.groups)
        pairs = size >= 2 or routing.group_rank == "max"
        if rest or not pairs or not 0 < routing.kept_groups <= routing.groups:
            groups = f"{routing.kept_groups} of {routing.groups} groups"
            raise ConfigError(f"cannot choose {groups} of {scores.width} experts")
        if not 0 < routing.chosen <= routing.kept_groups * size:
            raise ConfigError(f"cannot choose {routing.chosen} of {routing.kept_groups * size} experts")
        out = self.value(x.shape, x.count)
        return self.record(ops.Experts(out, x, scores, experts, routing, activation, limit, shifted)).out

    # Norms and elementwise

    def rms_norm(self, x: Value, w: Names | None, eps: float, offset: float = 0.0) -> Value:
        weight = None if w is None else _vector(w / "weight", x.shape[-1])
        return self.record(ops.RMSNorm(self.value(x.shape, x.count), x, weight, eps, offset)).out

    def gated_rms_norm(
        self,
        x: Value,
        gate: Value,
        w: Names,
        eps: float,
        activation: str = "silu",
        *,
        gate_first: bool = False,
        groups: int = 1,
    ) -> Value:
        """Normalize x over its last axis and multiply by activation(gate), or (`gate_first`) the reverse."""
        _same(x, gate)
        _known(activation)
        if groups < 1 or x.shape[-1] % groups:
            raise ConfigError(f"cannot normalize {x.shape[-1]} numbers in {groups} equal groups")
        weight = _vector(w / "weight", x.shape[-1])
        out = self.value(x.shape, x.count)
        return self.record(ops.GatedRMSNorm(out, x, gate, weight, eps, activation, gate_first, groups)).out

    def match_magnitude(self, x: Value, like: Value, floor: float) -> Value:
        """Scale each row of x to the root mean square of `like`; one below sqrt(floor) counts as that."""
        _same(x, like)
        return self.record(ops.MatchMagnitude(self.value(x.shape, x.count), x, like, floor)).out

    def above_cutoff(self, x: Value, deviations: float) -> Value:
        """Keep what is beyond so many standard deviations above the mean of its row, less that cutoff."""
        return self.record(ops.AboveCutoff(self.value(x.shape, x.count), x, deviations)).out

    def layer_norm(self, x: Value, w: Names | None, eps: float, bias: bool = True) -> Value:
        weight = None if w is None else _vector(w / "weight", x.shape[-1])
        b = _vector(w / "bias", x.shape[-1]) if bias and w is not None else None
        return self.record(ops.LayerNorm(self.value(x.shape, x.count), x, weight, b, eps)).out

    def add(self, x: Value, y: Value) -> Value:
        _same(x, y)
        return self.record(ops.Add(self.value(x.shape, x.count), x, y)).out

    def scale(self, x: Value, factor: float) -> Value:
        return self.record(ops.Scale(self.value(x.shape, x.count), x, factor)).out if factor != 1 else x

    def scale_by_position(self, x: Value, beta: float, period: int, first: int = 0) -> Value:
        """Multiply the values of each token by a factor that grows with its position."""
        return self.record(ops.ScaleByPosition(self.value(x.shape), x, beta, period, first)).out

    def scale_by_weight(self, x: Value, w: Names, size: int) -> Value:
        """Multiply by a vector of the checkpoint, as wide as the last axis of x, or by a number (size 1)."""
        if size not in (1, x.shape[-1]):
            raise ConfigError(f"cannot multiply a value of shape {x.shape} by {size} numbers")
        return self.record(ops.ScaleByWeight(self.value(x.shape, x.count), x, _vector(w, size))).out

    def scale_parts(self, x: Value, parts: tuple[tuple[int, float], ...]) -> Value:
        """Multiply the columns of x by the factors of parts (columns, factor), one after the other."""
        if sum(columns for columns, _ in parts) != x.width or len(x.shape) != 1:
            raise ConfigError(f"factors of {sum(columns for columns, _ in parts)} columns for {x.shape}")
        if all(factor == 1 for _, factor in parts):
            return x
        return self.record(ops.ScaleParts(self.value(x.shape, x.count), x, parts)).out

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self.record(ops.SoftCap(self.value(x.shape, x.count), x, cap)).out

    def activation(self, x: Value, activation: str) -> Value:
        _known(activation)
        return self.record(ops.Unary(self.value(x.shape, x.count), x, activation)).out

    def gated_activation(self, gate: Value, up: Value, activation: str) -> Value:
        """Multiply activation(gate) by up; a gate [T, 1] applies to all values of its token."""
        if gate.shape != (1,):
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
        chunked: bool = False,
        softcap: float | None = None,
        sinks: Names | None = None,
        causal: bool = False,
    ) -> Value:
        """Apply attention (see its op) of q [T, heads, dim], k [T, kv_heads, dim] and v in the next cache."""
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
            chunked=chunked,
            softcap=softcap,
            sinks=_vector(sinks, heads) if sinks is not None else None,
            causal=causal,
        )
        return self.record(op).out

    def shared_attention(self, q: Value, layer: int, *, scale: float, causal: bool = False) -> Value:
        """Apply attention of q [T or L, heads, dim] over the cache that `layer` writes before."""
        spec, (heads, dim) = self._caches[layer], q.shape
        if not isinstance(spec, PagedKV) or spec.key_dim != dim or heads % spec.num_heads:
            raise ConfigError(f"queries {q.shape} cannot use the cache {spec} of another layer")
        out = self.value((heads * spec.value_dim,), q.count)
        return self.record(ops.SharedAttention(out, q, spec, layer, scale, causal)).out

    def linear_by_head(self, x: Value, weight: WeightSpec) -> Value:
        """Multiply the vector of each head, x [T, heads, in], with its own matrix."""
        heads, rows, width = weight.shape
        if x.shape != (heads, width):
            raise ConfigError(f"shapes differ: {x.shape} by head, matrices {weight.shape}")
        return self.record(ops.LinearByHead(self.value((heads, rows), x.count), x, weight)).out

    def latent_attention(
        self, q: Value, q_rope: Value, c: Value, r: Value, *, scale: float, chosen: Value | None = None
    ) -> Value:
        """Apply causal attention of q [T, heads, rank] and q_rope [T, heads, rope_dim] over cached latents.

        c [T, rank] and r [T, rope_dim] are what the cache of the next layer gets. Returns mixed latents.
        """
        if q.shape[1:] != (c.width,) or q_rope.shape != (q.shape[0], r.width):
            raise ConfigError(f"shapes differ: {q.shape} and {q_rope.shape}, latents {c.shape} and {r.shape}")
        layer = self.cache(PagedLatent(c.width, r.width))
        op = ops.LatentAttention(self.value(q.shape), q, q_rope, c, r, layer, scale, chosen)
        return self.record(op).out

    # States

    def short_convolution(
        self,
        x: Value,
        w: Names,
        kernel: int,
        dtype: DType = "float32",
        *,
        bias: bool = False,
        activation: str = "linear",
    ) -> Value:
        """Convolve each channel causally over `kernel` positions; inputs are cached as `dtype`."""
        _known(activation)
        weight = WeightSpec(w / "weight", (x.width, 1, kernel), (w / "weight",))
        b = _vector(w / "bias", x.width) if bias else None
        state = SlotState((0,), x.width, kernel - 1, dtype)
        op = ops.ShortConvolution(self.value(x.shape), x, weight, b, activation, self.cache(state), state)
        return self.record(op).out

    def gated_recurrence(self, x: Value, decay: Value, dtype: DType = "float32") -> Value:
        """Compute h[t] = decay[t] * h[t - 1] + x[t]; states and inputs are cached as `dtype`."""
        _same(x, decay)
        state = SlotState((x.width,), 2 * x.width, CHUNK - 1, dtype)
        return self.record(ops.GatedRecurrence(self.value(x.shape), x, decay, self.cache(state), state)).out

    def delta_rule(
        self,
        x: Value | tuple[Value, Value, Value],
        decay: Value,
        beta: Value,
        w: Names,
        key_heads: int,
        key_dim: int,
        *,
        beta_factor: float = 1.0,
        rate: WeightSpec | None = None,
    ) -> Value:
        """Apply the gated delta rule to queries, keys and values by head, side by side in x or apart.

        beta [T, heads] and decay, [T, heads] or by channel [T, heads, key_dim], are before their sigmoid and
        softplus. `rate` is A_log where it is not stored as a vector. Returns [T, heads, value_dim].
        """
        (q, *apart), heads = (x,) if isinstance(x, Value) else x, beta.width
        if decay.shape != (heads, key_dim):
            _same(decay, beta)
        width = sum(value.width for value in (q, *apart))
        value_dim = _shared(width, heads, key_heads, key_dim)
        kept = key_heads * key_dim + heads * value_dim + decay.width
        state = SlotState((heads, key_dim, value_dim), kept, CHUNK - 1)
        rate, bias = rate or _vector(w / "A_log", heads), _vector(w / "dt_bias", decay.width)
        out, layer, rest = self.value((heads, value_dim)), self.cache(state), tuple(apart)
        op = ops.DeltaRule(out, q, decay, beta, rate, bias, key_heads, layer, state, rest, beta_factor)
        return self.record(op).out

    def state_space(
        self,
        x: Value,
        step: Value,
        w: Names,
        groups: int,
        state_dim: int,
        limits: tuple[float, float] = (0.0, math.inf),
    ) -> Value:
        """Apply Mamba-2's state space to inputs, B and C, side by side in x. Returns [T, heads * dim].

        step [T, heads] is before its softplus, which is kept within the limits.
        """
        heads = step.width
        dim = _shared(x.width, heads, groups, state_dim)
        state = SlotState((heads, state_dim, dim), groups * state_dim + heads * (dim + 1), CHUNK - 1)
        rate, bias, skip = (_vector(w / name, heads) for name in ("A_log", "dt_bias", "D"))
        out, layer = self.value((heads * dim,)), self.cache(state)
        op = ops.StateSpace(out, x, step, rate, bias, skip, groups, limits, layer, state)
        return self.record(op).out

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


def _shared(width: int, heads: int, groups: int, size: int) -> int:
    """Return the numbers of each head in a value that has two of `size` numbers of each group beside them."""
    dim, rest = divmod(width - 2 * groups * size, heads)
    if rest or dim <= 0 or heads % groups:
        problem = f"{heads} heads cannot share {groups} groups of {size} numbers evenly"
        raise ConfigError(f"{problem}, in a value of width {width}")
    return dim


def _same(x: Value, y: Value) -> None:
    if (x.count, x.shape) != (y.count, y.shape):
        raise ConfigError(f"shapes differ: {x.count} x {x.shape} and {y.count} x {y.shape}")


def _known(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ConfigError(f"unknown activation {quoted(activation)}", f"known: {', '.join(ACTIVATIONS)}")
