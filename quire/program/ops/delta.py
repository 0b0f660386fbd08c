"""The gated delta rule: a recurrence with a matrix as state (gated delta nets, arXiv:2412.06464), which
decays as a whole or by channel (Kimi Delta Attention, arXiv:2510.26692).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.caches import SlotState
from quire.program.numerics import Array, sigmoid
from quire.program.ops.slot_states import CHUNK, boundary_bytes, by_chunks, rows_of
from quire.program.program import Load, Op, Run, Value, WeightSpec

_EPS = np.float32(1e-6)  # added to the squared length of queries and keys


@dataclass(frozen=True, slots=True)
class DeltaRule(Op):
    """S[t] = D[t] S[t-1] + k[t] u[t]^T, u[t] = beta (v[t] - (D[t] S[t-1])^T k[t]), out[t] = S[t]^T q[t].

    D[t] = diag(e^g[t]), with g [T, heads] one number for a head or [T, heads, dk] one for each channel of its
    keys. x [T, n] has the queries [key_heads, dk], then the keys [key_heads, dk], then the values [heads, dv]
    of a token; or queries alone, if keys and values are `apart`. heads / key_heads heads of values in turn
    share those of a query and a key. Queries and keys are divided by sqrt(sum of squares + 1e-6), queries
    then by sqrt(dk). beta = beta_factor * sigmoid(beta), and g = -exp(A_log) * softplus(decay + dt_bias),
    with A_log [heads], beta [T, heads], and decay and dt_bias of the shape of g. S before the first position
    is zero.

    Computed from Z, the state at the boundary of the chunk of 64 positions, and of each position s since: k,
    u, and G, the sum of g from the boundary on, which are what the layer's state keeps of it:
    u[t] = beta (v[t] - Z^T e^G[t] k[t] - sum over s < t of (k[s] . e^(G[t] - G[s]) k[t]) u[s]),
    out[t] = Z^T e^G[t] q[t] + sum over s <= t of (k[s] . e^(G[t] - G[s]) q[t]) u[s]; at the next boundary Z
    becomes e^G Z + sum over s of e^(G - G[s]) k[s] u[s]^T with G of the last position. G falls from position
    to position, so that no exponent is above zero; e^-G[s] by itself would overflow.
    """

    x: Value
    decay: Value
    beta: Value
    log_rate: WeightSpec
    bias: WeightSpec
    key_heads: int
    layer: int
    state: SlotState
    apart: tuple[Value, ...] = ()
    beta_factor: float = 1.0

    @property
    def by_channel(self) -> bool:
        return len(self.decay.shape) > 1

    def inputs(self) -> tuple[Value, ...]:
        return self.x, *self.apart, self.decay, self.beta

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.log_rate, self.bias)

    def flops(self, load: Load) -> float:
        """Count for each token two products with a state, its update, and half a chunk of positions."""
        heads, key_dim, value_dim = self.state.shape
        # By channel each head has products of its own, with an exponential, which is some ten operations.
        keys = 16 * heads if self.by_channel else 4 * self.key_heads
        chunk = CHUNK / 2 * (keys * key_dim + 4 * heads * value_dim)
        return load.num_tokens * (6 * heads * key_dim * value_dim + chunk)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        return boundary_bytes(self.state, load)

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        *x, decay, beta = inputs
        heads, key_dim, value_dim = self.state.shape
        keys = self.key_heads * key_dim
        q, k, v = x if self.apart else np.split(x[0], (keys, 2 * keys), axis=1)
        q, k = (of.reshape(len(of), self.key_heads, key_dim) for of in (q, k))
        q = _unit(q) * np.float32(key_dim**-0.5)
        v = v.reshape(len(v), heads, value_dim)
        bias = run.weights[self.bias.name].reshape(self.decay.shape)
        softplus = np.logaddexp(np.float32(0), decay.reshape(len(decay), *bias.shape) + bias)
        rate = -np.exp(run.weights[self.log_rate.name])
        g = (rate[:, None] if self.by_channel else rate) * softplus
        beta = sigmoid(beta) * np.float32(self.beta_factor)
        tokens, kind = _Tokens(np.stack([_unit(k), q], axis=2), v, g, beta), _Chunk
        if self.by_channel:
            kind = _ChunkByChannel
        out = np.empty((len(v), heads, value_dim), np.float32)
        for row in rows_of(run, self.layer):
            by_chunks(run.caches[self.layer], row, lambda state: kind.empty(self, state, tokens), out)
        return out


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a step: keys beside queries [T, key_heads, 2, dk], values, decays, beta."""

    kq: Array
    v: Array
    g: Array
    beta: Array


@dataclass(slots=True)
class _Chunk:
    """The state at a boundary and what was kept since; zero where no position was yet."""

    tokens: _Tokens
    state: Array  # [heads, dk, dv]
    keys: Array  # [key_heads, CHUNK, dk]
    u: Array  # [heads, CHUNK, dv]
    total: Array  # [heads, CHUNK] or, by channel, [heads, CHUNK, dk]: G

    @classmethod
    def empty(cls, op: DeltaRule, state: np.ndarray | None, tokens: _Tokens) -> _Chunk:
        heads, key_dim, value_dim = op.state.shape
        found = np.zeros(op.state.shape, np.float32) if state is None else state.copy()
        total = (heads, CHUNK, *op.decay.shape[1:])
        shapes = ((op.key_heads, CHUNK, key_dim), (heads, CHUNK, value_dim), total)
        return cls(tokens, found, *(np.zeros(shape, np.float32) for shape in shapes))

    def set(self, place: int, kept: np.ndarray) -> None:
        """Set what was kept of a position."""
        parts = (self.keys[:, place], self.u[:, place], self.total[:, place])
        ends = np.cumsum([part.size for part in parts])
        for part, numbers in zip(parts, np.split(kept, ends[:-1]), strict=True):
            part[...] = numbers.reshape(part.shape)

    def step(self, place: int, token: int) -> tuple[Array, Array]:
        """Return (out [heads, dv], what is kept) of the next position. Every product has one shape."""
        tokens, kq = self.tokens, self.tokens.kq[token]
        total = tokens.g[token] + (self.total[:, place - 1] if place else np.float32(0))
        self.total[:, place], self.keys[:, place] = total, kq[:, 0]
        with np.errstate(under="ignore"):
            before, dots = self.seen(place, kq)
        weights = np.zeros((2, *dots.shape[::2]), np.float32)  # of u for the key, for the query
        weights[0, :, :place] = dots[:, 0, :place]
        weights[1, :, : place + 1] = dots[:, 1, : place + 1]
        told = before[:, 0] + np.matmul(weights[0, :, None], self.u)[:, 0]
        self.u[:, place] = tokens.beta[token][:, None] * (tokens.v[token] - told)
        out = before[:, 1] + np.matmul(weights[1, :, None], self.u)[:, 0]
        return out, np.concatenate([kq[:, 0].ravel(), self.u[:, place].ravel(), total.ravel()])

    def by_head(self, x: Array) -> Array:
        """Repeat what heads of keys have for the heads of values that share it."""
        return np.repeat(x, len(self.u) // len(self.keys), axis=0)

    def seen(self, place: int, kq: Array) -> tuple[Array, Array]:
        """Return products of a key and a query [heads, 2, ...] with the state and with the keys so far."""
        total = self.total[:, place]
        fallen = np.exp(total[:, None] - self.total[:, : place + 1])
        dots = self.by_head(np.matmul(kq, self.keys.swapaxes(1, 2)))
        dots[:, :, : place + 1] *= fallen[:, None]
        return np.exp(total)[:, None, None] * np.matmul(self.by_head(kq), self.state), dots

    def after(self) -> Array:
        """Return the state at the next boundary."""
        total = self.total[:, -1:]
        with np.errstate(under="ignore"):
            weighted = self.u * np.exp(total - self.total)[..., None]
            since = np.exp(total)[..., None]
        return since * self.state + np.matmul(self.by_head(self.keys).swapaxes(1, 2), weighted)


class _ChunkByChannel(_Chunk):
    """The same where each channel has decays of its own: products are of keys that have fallen."""

    __slots__ = ()

    def seen(self, place: int, kq: Array) -> tuple[Array, Array]:
        total, asked = self.total[:, place, None], self.by_head(kq)
        fallen = np.zeros_like(self.total)
        known = slice(place + 1)
        fallen[:, known] = self.by_head(self.keys)[:, known] * np.exp(total - self.total[:, known])
        return np.matmul(asked * np.exp(total), self.state), np.matmul(asked, fallen.swapaxes(1, 2))

    def after(self) -> Array:
        total = self.total[:, -1:]
        with np.errstate(under="ignore"):
            fallen = self.by_head(self.keys) * np.exp(total - self.total)
            since = np.exp(total).swapaxes(1, 2)
        return since * self.state + np.matmul(fallen.swapaxes(1, 2), self.u)


def _unit(x: Array) -> Array:
    """Return x divided by its length over the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + _EPS)
