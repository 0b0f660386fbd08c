"""Mamba-2's state space: a recurrence of matrices with a scalar decay by head (arXiv:2405.21060)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.caches import SlotState
from quire.program.numerics import Array
from quire.program.ops.slot_states import CHUNK, boundary_bytes, by_chunks, rows_of
from quire.program.program import Load, Op, Run, Value, WeightSpec


@dataclass(frozen=True, slots=True)
class StateSpace(Op):
    """S[t] = e^g[t] S[t-1] + B[t] u[t]^T, out[t] = S[t]^T C[t] + D x[t].

    x [T, n] has the inputs [heads, dim], then B [groups, state_dim], then C [groups, state_dim] of a token;
    heads / groups heads in turn share B and C of a group. u = step x and g = -exp(A_log) step, with step
    [T, heads] = softplus(step + dt_bias) within `limits`. S before the first position is zero.

    Returned are the heads side by side, [T, heads * dim].

    Computed from Z, the state at the boundary of the chunk of 64 positions, and of each position s since: B,
    u, and G, the sum of g from the boundary on, which are what the layer's state keeps of it:
    out[t] = e^G[t] Z^T C[t] + sum over s <= t of e^(G[t] - G[s]) (B[s] . C[t]) u[s] + D x[t]; at the next
    boundary Z becomes e^G Z + sum over s of e^(G - G[s]) B[s] u[s]^T with G of the last position.
    """

    x: Value
    step: Value
    log_rate: WeightSpec
    bias: WeightSpec
    skip: WeightSpec
    groups: int
    limits: tuple[float, float]
    layer: int
    state: SlotState

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.log_rate, self.bias, self.skip)

    def flops(self, load: Load) -> float:
        """Count for each token a product with a state, its share of an update, and half a chunk."""
        heads, state_dim, dim = self.state.shape
        chunk = CHUNK / 2 * 2 * (self.groups * state_dim + heads * dim)
        return load.num_tokens * (4 * heads * state_dim * dim + chunk)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        return boundary_bytes(self.state, load)

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        x, step = inputs
        heads, state_dim, dim = self.state.shape
        u, bc = x[:, : heads * dim].reshape(len(x), heads, dim), x[:, heads * dim :]
        step = np.logaddexp(np.float32(0), step + run.weights[self.bias.name])
        step = np.clip(step, np.float32(self.limits[0]), np.float32(self.limits[1]))
        rate = -np.exp(run.weights[self.log_rate.name])
        tokens = _Tokens(bc.reshape(len(x), 2, self.groups, state_dim), step[..., None] * u, rate * step)
        out = np.empty((len(x), heads, dim), np.float32)
        for row in rows_of(run, self.layer):
            by_chunks(run.caches[self.layer], row, lambda state: _Chunk.empty(self, state, tokens), out)
        return (out + run.weights[self.skip.name][:, None] * u).reshape(len(x), -1)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a step: B and C [T, 2, groups, state_dim], u [T, heads, dim], g [T, heads]."""

    bc: Array
    u: Array
    g: Array


@dataclass(slots=True)
class _Chunk:
    """The state at a boundary and what was kept since; zero where no position was yet."""

    tokens: _Tokens
    state: Array  # [heads, state_dim, dim]
    b: Array  # [groups, CHUNK, state_dim]
    u: Array  # [heads, CHUNK, dim]
    total: Array  # [heads, CHUNK], G

    @classmethod
    def empty(cls, op: StateSpace, state: np.ndarray | None, tokens: _Tokens) -> _Chunk:
        heads, state_dim, dim = op.state.shape
        found = np.zeros(op.state.shape, np.float32) if state is None else state.copy()
        shapes = ((op.groups, CHUNK, state_dim), (heads, CHUNK, dim), (heads, CHUNK))
        return cls(tokens, found, *(np.zeros(shape, np.float32) for shape in shapes))

    def set(self, place: int, kept: np.ndarray) -> None:
        parts = (self.b[:, place], self.u[:, place], self.total[:, place])
        ends = np.cumsum([part.size for part in parts])
        for part, numbers in zip(parts, np.split(kept, ends[:-1]), strict=True):
            part[...] = numbers.reshape(part.shape)

    def step(self, place: int, token: int) -> tuple[Array, Array]:
        """Return (out [heads, dim], what is kept) of the next position. Every product has one shape."""
        (b, c), each = self.tokens.bc[token], len(self.u) // len(self.b)
        total = self.tokens.g[token] + (self.total[:, place - 1] if place else np.float32(0))
        self.total[:, place], self.b[:, place], self.u[:, place] = total, b, self.tokens.u[token]
        with np.errstate(under="ignore"):
            fallen = np.exp(total[:, None] - self.total[:, : place + 1])
            since = np.exp(total)[:, None]
        weights = np.zeros(self.total.shape, np.float32)
        dots = np.repeat(np.matmul(c[:, None], self.b.swapaxes(1, 2))[:, 0], each, axis=0)
        weights[:, : place + 1] = dots[:, : place + 1] * fallen
        before = np.matmul(np.repeat(c, each, axis=0)[:, None], self.state)[:, 0]
        out = since * before + np.matmul(weights[:, None], self.u)[:, 0]
        return out, np.concatenate([b.ravel(), self.u[:, place].ravel(), total])

    def after(self) -> Array:
        total = self.total[:, -1:]
        with np.errstate(under="ignore"):
            weighted = self.u * np.exp(total - self.total)[..., None]
            since = np.exp(total)[..., None]
        b = np.repeat(self.b, len(self.u) // len(self.b), axis=0)
        return since * self.state + np.matmul(b.swapaxes(1, 2), weighted)
