"""Paged causal attention, over keys and values or over latents: one op for prompt chunks, decode rows, mixed
steps and verification rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from quire.program.caches import PagedKV, PagedLatent
from quire.program.numerics import Array
from quire.program.program import Load, Op, Run, Value, WeightSpec

PARTITION = 64  # context positions summed together; a multiple of every block size
FARTHEST = 128  # positions apart: what is farther has the bias of this distance


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """out[t] = softmax(scale q[t] K^T) V over the positions a token may see, for each query head.

    q [T, heads, dim], k [T, kv_heads, dim], v [T, kv_heads, value_dim], out [T, heads * value_dim]; heads is
    a multiple of kv_heads and query head h reads key head h // (heads / kv_heads). Keys and values are first
    written to the cache, then all are read back from it as stored. A token at position p sees positions
    max(0, p - window + 1) ... p, if `chunked` those from the last multiple of the window to p, each to the
    end that the batch gives for it instead of p if it gives any, as for tokens of an image, unless the op is
    `causal`. It is not
    affected by any other position: if the value of a head is not finite as stored, zeros are stored instead
    and NaN as its key. The score, and so the result, is then NaN for exactly the tokens that see it.
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
    chunked: bool = False
    causal: bool = False

    def weights(self) -> tuple[WeightSpec, ...]:
        return () if self.sinks is None else (self.sinks,)

    def flops(self, load: Load) -> float:
        """Count scores and weighted values of all visible pairs: a multiply-add per number of q and out."""
        return 2 * load.pairs(self.window, self.chunked) * (self.q.width + self.out.width)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): each row reads the positions visible to any of its tokens once."""
        spec = PagedKV(self.k.shape[0], self.k.shape[1], self.v.shape[1])
        token = spec.token_bytes(load.kv_itemsize, load.kv_scale_bytes)
        return token * load.positions(self.window, self.chunked), token * load.num_tokens

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        q, k, v = inputs
        keys, values = run.caches[self.layer]
        places = run.batch.places(run.groups[self.layer])
        k, v = k.astype(keys.dtype), v.astype(values.dtype)
        lost = ~np.isfinite(v).all(axis=-1)  # 0, the weight of an invisible position, times these is not 0
        k[lost], v[lost] = np.nan, 0
        keys[places], values[places] = k, v
        sinks = None if self.sinks is None else run.weights[self.sinks.name]
        how = (self.scale, self.window, self.softcap, sinks, self.chunked, self.causal)
        return _attend_rows(run, self.layer, q, *how).reshape(len(q), *self.out.shape)


@dataclass(frozen=True, slots=True)
class SharedAttention(Op):
    """Attention over the cache of another layer, which an Attention before it has written in the same step.

    q [T, heads, dim], out [T, heads * value_dim]; `spec` is that of the cache of the layer. Or q and out are
    [L, ...]: since nothing is written, only the rows that need logits have to be computed. Their cost is that
    of one for each row of the batch.
    """

    q: Value
    spec: PagedKV
    layer: int
    scale: float
    causal: bool = False

    @property
    def window(self) -> int | None:
        return self.spec.window

    def flops(self, load: Load) -> float:
        """Count scores and weighted values of all visible pairs."""
        pairs = load.pairs(self.window) if self.q.count == "T" else load.positions(self.window)
        return 2 * pairs * (self.q.width + self.out.width)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): each row reads the positions visible to any of its tokens once."""
        token = self.spec.token_bytes(load.kv_itemsize, load.kv_scale_bytes)
        return token * load.positions(self.window), 0

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        sampled = None if self.q.count == "T" else run.batch.logit_rows
        how = (self.scale, self.window)
        out = _attend_rows(run, self.layer, inputs[0], *how, causal=self.causal, sampled=sampled)
        return out.reshape(len(out), *self.out.shape)


def _attend_rows(
    run: Run,
    layer: int,
    q: Array,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Array | None = None,
    chunked: bool = False,
    causal: bool = False,
    sampled: np.ndarray | None = None,
) -> Array:
    """Compute all rows over the keys and values of a layer, [T, heads, value_dim].

    `sampled` are the tokens that q has instead of all.
    """
    (keys, values), batch = run.caches[layer], run.batch
    all_ends = None if causal else batch.visible_ends
    out = np.empty((*q.shape[:2], values.shape[3]), np.float32)
    for row, length in enumerate(batch.context_lens.tolist()):
        tokens: Any = slice(batch.row_offsets[row], batch.row_offsets[row + 1])
        own: Any = tokens
        if sampled is not None:
            own = np.flatnonzero(batch.token_rows[sampled] == row)
            tokens = sampled[own]
        if len(positions := batch.positions[tokens]):
            context = Context(keys, values, batch.block_tables[run.groups[layer]][row], length)
            how = (scale, window, softcap, sinks, chunked)
            ends = None if all_ends is None else all_ends[tokens]
            out[own] = attend(q[own], positions, context, *how, ends=ends)
    return out


@dataclass(frozen=True, slots=True)
class LatentAttention(Op):
    """Multi-head latent attention in its absorbed form (MLA, DeepSeek-V2, arXiv:2405.04434):
    out[t, h] = softmax(scale (q[t, h] C^T + q_rope[t, h] R^T)) C over the positions that a token may see.

    The key and the value of a head are products of the cached latent with matrices of the head, and are never
    computed: q [T, heads, rank] are queries multiplied by the key matrix of their head, and the result is for
    its value matrix (LinearByHead). q_rope [T, heads, rope_dim] the
    rotated part; c [T, rank] and r [T, rope_dim] are written to the cache as one vector, and all are read
    back from it as stored: C and R. out [T, heads, rank] are mixed latents. A token sees all positions up to
    its own. If c is not finite as stored, zeros are stored instead and NaN as the first number of r: so the
    result is NaN for exactly the tokens that see it. Sums have the order of Attention, over the numbers of
    c, then r.
    """

    q: Value
    q_rope: Value
    c: Value
    r: Value
    layer: int
    scale: float

    @property
    def spec(self) -> PagedLatent:
        return PagedLatent(self.c.width, self.r.width)

    def flops(self, load: Load) -> float:
        """Count scores and weighted latents of all visible pairs."""
        return 2 * load.pairs(None) * (self.q.width + self.q_rope.width + self.out.width)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): each row reads the positions visible to any of its tokens once."""
        token = self.spec.token_bytes(load.kv_itemsize, load.kv_scale_bytes)
        return token * load.positions(None), token * load.num_tokens

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        q, q_rope, c, r = inputs
        vectors, group, rank = run.caches[self.layer], run.groups[self.layer], self.c.width
        c, r = c.astype(vectors.dtype), r.reshape(len(r), -1).astype(vectors.dtype)
        lost = ~np.isfinite(c).all(axis=-1)
        c[lost], r[lost, 0] = 0, np.nan
        vectors[run.batch.places(group)] = np.concatenate([c, r], axis=-1)
        keys, values = vectors[:, :, None], vectors[:, :, None, :rank]
        q = np.concatenate([q, q_rope], axis=-1)
        out, batch = np.empty((len(q), *self.out.shape), np.float32), run.batch
        for row, length in enumerate(batch.context_lens.tolist()):
            tokens = slice(batch.row_offsets[row], batch.row_offsets[row + 1])
            context = Context(keys, values, batch.block_tables[group][row], length)
            out[tokens] = attend(q[tokens], batch.positions[tokens], context, self.scale)
        return out


@dataclass(frozen=True, slots=True)
class Distances:
    """Biases of scores by how far a position is from the token's own, for each head (T5, arXiv:1910.10683).

    `table` [buckets, heads]: the second half of the buckets is for positions after the token's own. Of each
    half, the first half are for distances one by one, the others for ever longer ranges up to `FARTHEST`.
    No text has more than `longest` tokens.
    """

    table: WeightSpec
    longest: int

    def biases(self, table: Array) -> Array:
        """Return those of distances from 1 - `longest` on, [heads, distances], as far as partitions reach."""
        return np.ascontiguousarray(table[self.buckets()].T)

    def buckets(self) -> np.ndarray:
        """Return the rows of the table that have them."""
        distances = np.arange(1 - self.longest, -(-self.longest // PARTITION) * PARTITION)
        half = self.table.shape[0] // 2
        exact, far = half // 2, np.abs(distances)
        steps = np.log(np.maximum(far, exact) / exact) / math.log(FARTHEST / exact) * (half - exact)
        buckets = np.where(far < exact, far, np.minimum(exact + steps.astype(np.int64), half - 1))
        return buckets + half * (distances > 0)


@dataclass(frozen=True, slots=True)
class RowAttention(Op):
    """out[t] = softmax(scale q[t] K^T) V over the tokens of the row on both sides, for each query head.

    q [T, heads, dim], k [T, groups, dim], v [T, groups, value_dim], out [T, heads * value_dim], with heads
    and sums as in Attention. With a `reach` a token sees the positions that far from its own, on either side.
    `distances` has what is added to scores. Keys and values are float32 and belong to the step. With a
    `window` the tokens of a window (Batch.windows), so many at most, take the place of those of the row.
    """

    q: Value
    k: Value
    v: Value
    scale: float
    reach: int | None = None
    distances: Distances | None = None
    window: int | None = None

    def weights(self) -> tuple[WeightSpec, ...]:
        return () if self.distances is None else (self.distances.table,)

    def flops(self, load: Load) -> float:
        """Count scores and weighted values of all visible pairs: those up to each token, mirrored."""
        pairs = 2 * load.pairs(None if self.reach is None else self.reach + 1) + -1 * load.num_tokens
        if self.window is not None:
            pairs = self.window * load.num_tokens
        return 2 * pairs * (self.q.width + self.out.width)

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        q, k, v = inputs
        k, v = k.copy(), v.copy()
        lost = ~np.isfinite(v).all(axis=-1)  # as in Attention
        k[lost], v[lost] = np.nan, 0
        out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
        biases = None
        if self.distances is not None:
            biases = self.distances.biases(run.weights[self.distances.table.name])
        batch = run.batch if self.window is None else run.batch.by_window
        for begin, end in pairwise(batch.row_offsets.tolist()):
            count = end - begin
            blocks = np.arange(-(-count // PARTITION))
            context = Context(_in_blocks(k[begin:end]), _in_blocks(v[begin:end]), blocks, count)
            positions, at = np.arange(count), np.arange(len(blocks) * PARTITION)
            how: Any = {"both": True}
            if self.distances is not None and biases is not None:
                apart = self.distances.longest - 1 + at - positions[:, None]
                how["biases"] = biases[:, apart].transpose(1, 0, 2)
            out[begin:end] = attend(q[begin:end], positions, context, self.scale, self.reach, **how)
        return out.reshape(len(q), *self.out.shape)


def _in_blocks(x: Array) -> Array:
    """Return the vectors of a row, [count, heads, dim], in blocks of a partition each, padded with zeros."""
    padding = np.zeros((-len(x) % PARTITION, *x.shape[1:]), np.float32)
    return np.concatenate([x, padding]).reshape(-1, PARTITION, *x.shape[1:])


def attend(
    q: Array,
    positions: np.ndarray,
    context: Context,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    chunked: bool = False,
    both: bool = False,
    biases: Array | None = None,
    ends: np.ndarray | None = None,
) -> Array:
    """Compute one row, [t, heads, value_dim]: a running softmax over the partitions of the context.

    With `both`, tokens see `window` positions on either side, or all. `ends` [t] are those of what tokens
    see, if not behind themselves. `biases` [t, heads, positions], to the end of the last partition, are added
    to scores.
    """
    tokens, heads, dim = q.shape
    groups = context.keys.shape[2]
    q = (q * np.float32(scale)).reshape(tokens, groups, heads // groups, dim)
    peak = np.full((*q.shape[:3], 1), -np.inf, np.float32)
    total = np.zeros_like(peak)
    if sinks is not None:
        peak[:] = sinks.reshape(groups, -1, 1)
        total[:] = 1.0
    mixed = np.zeros((*q.shape[:3], context.values.shape[3]), np.float32)
    oldest = np.maximum(0, positions + 1 - window) if window else np.zeros_like(positions)
    if window and chunked:
        oldest = positions // window * window
    newest = positions if ends is None else ends - 1
    if both:
        oldest = np.maximum(0, positions - (window or context.length))
        newest = positions + (window or context.length)
    first = int(oldest[0])
    for start in range(first // PARTITION * PARTITION, context.length, PARTITION):
        keys, values = context.partition(start, first)
        scores = np.matmul(q, keys)  # [t, groups, heads a group, PARTITION]
        if softcap is not None:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        at = np.arange(start, start + PARTITION)
        if biases is not None:
            scores += biases[..., start : start + PARTITION].reshape(scores.shape)
        seen = (at <= newest[:, None]) & (at < context.length) & (at >= oldest[:, None])
        scores[~np.broadcast_to(seen[:, None, None, :], scores.shape)] = -np.inf
        higher = np.maximum(peak, scores.max(axis=-1, keepdims=True))
        finite = np.where(np.isneginf(higher), np.float32(0), higher)
        weights, keep = np.exp(scores - finite), np.exp(peak - finite)
        total = total * keep + weights.sum(axis=-1, keepdims=True)
        mixed = mixed * keep + np.matmul(weights, values)
        peak = higher
    return (mixed / total).reshape(tokens, heads, -1)


@dataclass(frozen=True, slots=True)
class Context:
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
