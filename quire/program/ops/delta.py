"""The gated delta rule: a recurrence with a matrix as state (gated delta nets, arXiv:2412.06464)."""

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
    """S[t] = e^g[t] S[t-1] + k[t] u[t]^T, u[t] = beta (v[t] - e^g[t] S[t-1]^T k[t]), out[t] = S[t]^T q[t].

    x [T, n] has the queries [key_heads, dk], then the keys [key_heads, dk], then the values [heads, dv] of a
    token; heads / key_heads heads of values in turn share those of a query and a key. Queries and keys are
    divided by sqrt(sum of squares + 1e-6), queries then by sqrt(dk). beta = sigmoid(beta), and
    g = -exp(A_log) * softplus(decay + dt_bias), with decay and beta [T, heads]. S before the first position
    is zero.

    Computed from Z, the state at the boundary of the chunk of 64 positions, and of each position s since: k,
    u, and G, the sum of g from the boundary on, which are what the layer's state keeps of it:
    u[t] = beta (v[t] - e^G[t] Z^T k[t] - sum over s < t of e^(G[t] - G[s]) (k[s] . k[t]) u[s]),
    out[t] = e^G[t] Z^T q[t] + sum over s <= t of e^(G[t] - G[s]) (k[s] . q[t]) u[s]; at the next boundary
    Z becomes e^G Z + sum over s of e^(G - G[s]) k[s] u[s]^T with G of the last position.
    """

    x: Value
    decay: Value
    beta: Value
    log_rate: WeightSpec
    bias: WeightSpec
    key_heads: int
    layer: int
    state: SlotState

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.log_rate, self.bias)

    def flops(self, load: Load) -> float:
        """Count for each token two products with a state, its update, and half a chunk of positions."""
        heads, key_dim, value_dim = self.state.shape
        chunk = CHUNK / 2 * 4 * (self.key_heads * key_dim + heads * value_dim)
        return load.num_tokens * (6 * heads * key_dim * value_dim + chunk)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        return boundary_bytes(self.state, load)

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x, decay, beta = inputs
        heads, key_dim, value_dim = self.state.shape
        keys = self.key_heads * key_dim
        q, k = (x[:, at : at + keys].reshape(len(x), self.key_heads, key_dim) for at in (0, keys))
        q = _unit(q) * np.float32(key_dim**-0.5)
        v = x[:, 2 * keys :].reshape(len(x), heads, value_dim)
        softplus = np.logaddexp(np.float32(0), decay + run.weights[self.bias.name])
        g = -np.exp(run.weights[self.log_rate.name]) * softplus
        tokens = _Tokens(np.stack([_unit(k), q], axis=2), v, g, sigmoid(beta))
        out = np.empty((len(x), heads, value_dim), np.float32)
        for row in rows_of(run, self.layer):
            by_chunks(run.caches[self.layer], row, lambda state: _Chunk.empty(self, state, tokens), out)
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
    total: Array  # [heads, CHUNK], G

    @classmethod
    def empty(cls, op: DeltaRule, state: np.ndarray | None, tokens: _Tokens) -> _Chunk:
        heads, key_dim, value_dim = op.state.shape
        found = np.zeros(op.state.shape, np.float32) if state is None else state.copy()
        shapes = ((op.key_heads, CHUNK, key_dim), (heads, CHUNK, value_dim), (heads, CHUNK))
        return cls(tokens, found, *(np.zeros(shape, np.float32) for shape in shapes))

    def set(self, place: int, kept: np.ndarray) -> None:
        """Set what was kept of a position."""
        parts = (self.keys[:, place], self.u[:, place], self.total[:, place])
        ends = np.cumsum([part.size for part in parts])
        for part, numbers in zip(parts, np.split(kept, ends[:-1]), strict=True):
            part[...] = numbers.reshape(part.shape)

    def step(self, place: int, token: int) -> tuple[Array, Array]:
        """Return (out [heads, dv], what is kept) of the next position. Every product has one shape."""
        tokens = self.tokens
        kq, each = tokens.kq[token], len(self.u) // len(self.keys)
        total = tokens.g[token] + (self.total[:, place - 1] if place else np.float32(0))
        self.total[:, place], self.keys[:, place] = total, kq[:, 0]
        with np.errstate(under="ignore"):
            fallen = np.exp(total[:, None] - self.total[:, : place + 1])
            since = np.exp(total)[:, None]
        weights = np.zeros((2, *self.total.shape), np.float32)  # of u for the key, for the query
        dots = np.repeat(np.matmul(kq, self.keys.swapaxes(1, 2)), each, axis=0)  # [heads, 2, CHUNK]
        weights[0, :, :place] = dots[:, 0, :place] * fallen[:, :place]
        weights[1, :, : place + 1] = dots[:, 1, : place + 1] * fallen
        before = np.matmul(np.repeat(kq, each, axis=0), self.state)  # [heads, 2, dv]
        told = since * before[:, 0] + np.matmul(weights[0, :, None], self.u)[:, 0]
        self.u[:, place] = tokens.beta[token][:, None] * (tokens.v[token] - told)
        out = since * before[:, 1] + np.matmul(weights[1, :, None], self.u)[:, 0]
        return out, np.concatenate([kq[:, 0].ravel(), self.u[:, place].ravel(), total])

    def after(self) -> Array:
        """Return the state at the next boundary."""
        total = self.total[:, -1:]
        with np.errstate(under="ignore"):
            weighted = self.u * np.exp(total - self.total)[..., None]
            since = np.exp(total)[..., None]
        keys = np.repeat(self.keys, len(self.u) // len(self.keys), axis=0)
        return since * self.state + np.matmul(keys.swapaxes(1, 2), weighted)


def _unit(x: Array) -> Array:
    """Return x divided by its length over the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + _EPS)
