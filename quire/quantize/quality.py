"""Divergence between the predictions of two models: the cost of quantization, from logits alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.program.batch import Batch
from quire.quantize.kinds import Array

_BLOCK = 1 << 22  # logits processed together, in float64


@dataclass(frozen=True, slots=True)
class Quality:
    """A comparison over many positions. Divergences are in nats a token; 0 is equal.

    `error` is the standard error of `mean`: the variation expected with another text of this length.
    """

    positions: int
    mean: float
    error: float
    worst: float  # 99th percentile of positions
    agreement: float  # share of positions with the same best token


def text_logits(
    execute: Callable[[Batch], Array],
    ids: Sequence[int],
    *,
    num_blocks: Sequence[int],
    block_size: int,
    chunk_size: int,
    variant: int,
) -> Array:
    """Return the logits of every position of one text [T] in an empty cache, [T, vocab].

    `execute` computes a batch; the text is given to it in chunks. `num_blocks` are the blocks of each cache
    group: in a window with fewer than the text needs, what has left the window is overwritten.
    """
    needed = np.arange(-(-len(ids) // block_size))
    tables = tuple(needed[None] % max(held, 1) for held in num_blocks)
    parts = []
    for start in range(0, len(ids), chunk_size):
        chunk = np.array(ids[start : start + chunk_size])
        batch = Batch(
            token_ids=chunk,
            positions=np.arange(start, start + len(chunk)),
            row_offsets=np.array([0, len(chunk)]),
            block_tables=tables,
            context_lens=np.array([start + len(chunk)]),
            slots=np.array([0]),
            variants=np.array([variant]),
            logit_rows=np.arange(len(chunk)),
            block_size=block_size,
        )
        parts.append(execute(batch).copy())  # the next call may overwrite them
    return np.concatenate(parts)


def divergence(base: Array, other: Array) -> Array:
    """Return KL(base || other) of the softmax of logits [T, V], float64 [T], in nats.

    The sum over t of p (log p - log q) is computed in float64; rounding may make it slightly negative.
    """
    rows = max(1, _BLOCK // base.shape[1])
    parts = []
    for start in range(0, len(base), rows):
        p, q = (_log_softmax(logits[start : start + rows]) for logits in (base, other))
        parts.append((np.exp(p) * (p - q)).sum(axis=-1))
    return np.concatenate(parts) if parts else np.zeros(0)


def agreement(base: Array, other: Array) -> Array:
    """Return True where the best tokens of logits [T, V] are equal, bool [T]; ties go to the lowest id."""
    return np.asarray(base.argmax(axis=-1) == other.argmax(axis=-1))


def compare(pairs: Iterable[tuple[Array, Array]]) -> Quality:
    """Compare all positions of several texts: pairs of logits (base, other), [T, V] each."""
    found = [(divergence(base, other), agreement(base, other)) for base, other in pairs]
    nats = np.concatenate([kl for kl, _ in found])
    same = np.concatenate([equal for _, equal in found])
    error = float(nats.std() / np.sqrt(len(nats)))
    return Quality(len(nats), float(nats.mean()), error, float(np.percentile(nats, 99)), float(same.mean()))


def _log_softmax(logits: Array) -> Array:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
