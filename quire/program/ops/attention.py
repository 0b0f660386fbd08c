"""Paged causal attention: one op for prompt chunks, decode rows, mixed steps and verification rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.caches import PagedKV
from quire.program.numerics import Array
from quire.program.program import Load, Op, Run, Value, WeightSpec

PARTITION = 64  # context positions summed together; a multiple of every block size


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """out[t] = softmax(scale q[t] K^T) V over the positions a token may see, for each query head.

    q [T, heads, dim], k [T, kv_heads, dim], v [T, kv_heads, value_dim], out [T, heads * value_dim]; heads is
    a multiple of kv_heads and query head h reads key head h // (heads / kv_heads). Keys and values are first
    written to the cache, then all are read back from it as stored. A token at position p sees positions
    max(0, p - window + 1) ... p, and is not affected by any other position: if the value of a head is not
    finite as stored, zeros are stored instead and NaN as its key. The score, and so the result, is then NaN
    for exactly the tokens that see it.
    `softcap` replaces each score s by softcap * tanh(s / softcap). `sinks` [heads] are scores of a
    position that is part of the softmax but has no value (gpt-oss, arXiv:2309.17453).

    The sum over the context runs over partitions of 64 positions counted from position 0, with a running
    maximum (FlashAttention, arXiv:2205.14135), each partition padded to full size: so its order depends only
    on the token's position, not on chunks, blocks or other rows.
    """

    q: Value
    k: Value
    v: Value
    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: WeightSpec | None = None

    def weights(self) -> tuple[WeightSpec, ...]:
        return () if self.sinks is None else (self.sinks,)

    def flops(self, load: Load) -> float:
        """Count scores and weighted values of all visible pairs: a multiply-add per number of q and out."""
        return 2 * load.pairs(self.window) * (self.q.width + self.out.width)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): each row reads the positions visible to any of its tokens once."""
        spec = PagedKV(self.k.shape[0], self.k.shape[1], self.v.shape[1])
        token = spec.token_bytes(load.kv_itemsize, load.kv_scale_bytes)
        return token * load.positions(self.window), token * load.num_tokens

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        q, k, v = inputs
        keys, values = run.caches[self.layer]
        group = run.groups[self.layer]
        places = run.batch.places(group)
        k, v = k.astype(keys.dtype), v.astype(values.dtype)
        lost = ~np.isfinite(v).all(axis=-1)  # 0, the weight of an invisible position, times these is not 0
        k[lost], v[lost] = np.nan, 0
        keys[places], values[places] = k, v
        sinks = None if self.sinks is None else run.weights[self.sinks.name]
        out = np.empty((len(q), self.q.shape[0], self.v.shape[1]), np.float32)
        batch = run.batch
        for row, length in enumerate(batch.context_lens.tolist()):
            tokens = slice(batch.row_offsets[row], batch.row_offsets[row + 1])
            context = _Context(keys, values, batch.block_tables[group][row], length)
            out[tokens] = self._attend(q[tokens], batch.positions[tokens], context, sinks)
        return out.reshape(len(q), *self.out.shape)

    def _attend(self, q: Array, positions: np.ndarray, context: _Context, sinks: Array | None) -> Array:
        """Compute one row, [t, heads, value_dim]: a running softmax over the partitions of the context."""
        tokens, heads, dim = q.shape
        groups = self.k.shape[0]
        q = (q * np.float32(self.scale)).reshape(tokens, groups, heads // groups, dim)
        peak = np.full((*q.shape[:3], 1), -np.inf, np.float32)
        total = np.zeros_like(peak)
        if sinks is not None:
            peak[:] = sinks.reshape(groups, -1, 1)
            total[:] = 1.0
        mixed = np.zeros((*q.shape[:3], self.v.shape[1]), np.float32)
        oldest = max(0, positions[0] + 1 - self.window) if self.window else 0
        for start in range(oldest // PARTITION * PARTITION, context.length, PARTITION):
            keys, values = context.partition(start, oldest)
            scores = np.matmul(q, keys)  # [t, groups, heads a group, PARTITION]
            if self.softcap is not None:
                scores = np.float32(self.softcap) * np.tanh(scores / np.float32(self.softcap))
            scores[~self._sees(positions, start)] = -np.inf
            higher = np.maximum(peak, scores.max(axis=-1, keepdims=True))
            finite = np.where(np.isneginf(higher), np.float32(0), higher)
            weights, keep = np.exp(scores - finite), np.exp(peak - finite)
            total = total * keep + weights.sum(axis=-1, keepdims=True)
            mixed = mixed * keep + np.matmul(weights, values)
            peak = higher
        return (mixed / total).reshape(tokens, heads, -1)

    def _sees(self, positions: np.ndarray, start: int) -> np.ndarray:
        """Return the positions of a partition visible to each token, [t, 1, 1, PARTITION], like scores."""
        distance = positions[:, None] - np.arange(start, start + PARTITION)
        seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        shape = (len(positions), self.k.shape[0], self.q.shape[0] // self.k.shape[0], PARTITION)
        return np.broadcast_to(seen[:, None, None, :], shape)


@dataclass(frozen=True, slots=True)
class _Context:
    """The cached keys and values of one row."""

    keys: np.ndarray  # [blocks, block_size, groups, dim]
    values: np.ndarray  # [blocks, block_size, groups, value_dim]
    block_table: np.ndarray
    length: int

    def partition(self, start: int, oldest: int) -> tuple[Array, Array]:
        """Return keys [groups, dim, PARTITION] and values [groups, PARTITION, value_dim] from `start` on.

        Positions before `oldest` and beyond the length are zero: the ids of their blocks are arbitrary, and
        zero times their content need not be zero.
        """
        first, last = max(start, oldest), min(start + PARTITION, self.length)
        held = slice(first - start, last - start)
        keys = self._gather(self.keys, first, last, held)
        values = self._gather(self.values, first, last, held)
        return np.ascontiguousarray(keys.transpose(1, 2, 0)), np.ascontiguousarray(values.transpose(1, 0, 2))

    def _gather(self, cache: np.ndarray, first: int, last: int, held: slice) -> Array:
        """Copy positions first ... last - 1 of a cache to `held` of a partition, [PARTITION, ...]."""
        size = cache.shape[1]
        begin = first // size * size
        blocks = cache[self.block_table[begin // size : -(-last // size)]]
        gathered = np.zeros((PARTITION, *cache.shape[2:]), np.float32)
        gathered[held] = blocks.reshape(-1, *cache.shape[2:])[first - begin : last - begin]
        return gathered
