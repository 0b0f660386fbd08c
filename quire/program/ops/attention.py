"""Paged causal attention over keys and values: one op for prompt chunks, decode rows, mixed steps and
verification rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from quire.program.caches import PagedKV
from quire.program.numerics import Array
from quire.program.ops.context import PARTITION, Context, attend, in_blocks
from quire.program.program import Load, Op, Run, Value, WeightSpec

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
            context = Context(in_blocks(k[begin:end]), in_blocks(v[begin:end]), blocks, count)
            positions, at = np.arange(count), np.arange(len(blocks) * PARTITION)
            how: Any = {"both": True}
            if self.distances is not None and biases is not None:
                apart = self.distances.longest - 1 + at - positions[:, None]
                how["biases"] = biases[:, apart].transpose(1, 0, 2)
            out[begin:end] = attend(q[begin:end], positions, context, self.scale, self.reach, **how)
        return out.reshape(len(q), *self.out.shape)
