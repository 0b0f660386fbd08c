"""Sums over a cached context: its partitions, and a running softmax over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.program.numerics import Array

PARTITION = 64  # context positions summed together; a multiple of every block size


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


def in_blocks(x: Array) -> Array:
    """Return vectors [count, heads, dim] in blocks of a partition each, padded with zeros."""
    padding = np.zeros((-len(x) % PARTITION, *x.shape[1:]), np.float32)
    return np.concatenate([x, padding]).reshape(-1, PARTITION, *x.shape[1:])


def of_entries(block_table: np.ndarray, every: int, block_size: int) -> np.ndarray:
    """Return the blocks of a table that have entries of `every` tokens: those of their last tokens."""
    apart = max(1, every // block_size)
    return block_table[apart - 1 :: apart]


def stored(x: Array, dtype: np.dtype[Any]) -> np.ndarray:
    """Return vectors [n, 1, dim] in the format of a cache: NaN is the first number if one is not finite."""
    vectors = x.reshape(len(x), x.shape[-1]).astype(dtype)
    vectors[~np.isfinite(vectors).all(axis=-1), 0] = np.nan
    return vectors
