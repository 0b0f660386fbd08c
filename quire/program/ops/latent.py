"""Paged causal attention over latents, and the choice of the positions that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.program.caches import PagedIndex, PagedLatent, PagedVectors
from quire.program.features import Feature
from quire.program.numerics import Array
from quire.program.ops.context import PARTITION, Context, attend, in_blocks, of_entries, stored
from quire.program.program import Load, Op, Run, Value

if TYPE_CHECKING:
    from quire.program.batch import Batch


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

    With `chosen` [T, n] (ChoosePositions) a token that sees more than n positions attends to those of its
    list alone. They take the place of the context: the first 64 are its first partition, and so on.
    """

    q: Value
    q_rope: Value
    c: Value
    r: Value
    layer: int
    scale: float
    chosen: Value | None = None

    @property
    def spec(self) -> PagedLatent:
        return PagedLatent(self.c.width, self.r.width)

    @property
    def most(self) -> int | None:
        """Positions that a token attends to, at most; None if all that it sees."""
        return None if self.chosen is None else self.chosen.width

    def inputs(self) -> tuple[Value, ...]:
        own = (self.q, self.q_rope, self.c, self.r)
        return own if self.chosen is None else (*own, self.chosen)

    def flops(self, load: Load) -> float:
        """Count scores and weighted latents of all pairs."""
        return 2 * load.pairs(self.most) * (self.q.width + self.q_rope.width + self.out.width)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): each row reads the positions visible to any of its tokens once.

        Of chosen ones as many as in a window of that length, as if each token chose one that others do not.
        """
        token = self.spec.token_bytes(load.kv_itemsize, load.kv_scale_bytes)
        return token * load.positions(self.most), token * load.num_tokens

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        q, q_rope, c, r, *lists = inputs
        vectors, group, rank = run.caches[self.layer], run.groups[self.layer], self.c.width
        c, r = c.astype(vectors.dtype), r.reshape(len(r), -1).astype(vectors.dtype)
        lost = ~np.isfinite(c).all(axis=-1)
        c[lost], r[lost, 0] = 0, np.nan
        vectors[run.batch.places(group)] = np.concatenate([c, r], axis=-1)
        q = np.concatenate([q, q_rope], axis=-1)
        out, batch = np.empty((len(q), *self.out.shape), np.float32), run.batch
        for row, length in enumerate(batch.context_lens.tolist()):
            table, end = batch.block_tables[group][row], batch.row_offsets[row + 1]
            first = end if self.most is None else _first_beyond(batch, row, self.most)
            tokens = slice(batch.row_offsets[row], first)
            if len(q[tokens]):
                context = Context(vectors[:, :, None], vectors[:, :, None, :rank], table, length)
                out[tokens] = attend(q[tokens], batch.positions[tokens], context, self.scale)
            for token in range(first, end):
                block, place = np.divmod(lists[0][token], batch.block_size)
                picked = in_blocks(vectors[table[block], place][:, None])
                blocks = np.arange(len(picked))
                context = Context(picked, picked[..., :rank], blocks, len(block))
                own = slice(token, token + 1)
                out[own] = attend(q[own], np.array([len(block) - 1]), context, self.scale)
        return out


@dataclass(frozen=True, slots=True)
class ChoosePositions(Op):
    """out[t] = the n positions with the highest scores s[t], for a token that sees more than n:
    s[t] = sum over heads h of factors[t, h] max(0, q[t, h] . K) (DeepSeek-V3.2, arXiv:2512.02556).

    q [T, heads, dim], factors [T, heads] and k [T, 1, dim], which is written to the cache and read back from
    it as stored: K, for scores of all positions up to the token's own. out [T, n] int32 are positions in
    ascending order, of equal scores the lowest; the list of a token that sees no more is arbitrary. A score
    of NaN counts as infinite; if k is not finite as stored, its first number is NaN, so that all who see it
    choose it.

    If `every` is more than 1, entries of so many tokens take the place of positions (CompressedAttention): k
    of the last of these is the key of an entry, and a token sees those that are complete.
    """

    q: Value
    factors: Value
    k: Value
    layer: int
    every: int = 1

    @property
    def spec(self) -> PagedIndex | PagedVectors:
        return PagedIndex(self.k.width) if self.every == 1 else PagedVectors(self.k.width, self.every)

    @property
    def number(self) -> int:
        return self.out.width

    def flops(self, load: Load) -> float:
        """Count the products of pairs of a token that sees more than n positions, and their sums."""
        pairs = load.value(Feature("pairs_beyond", self._reach))
        return 2 / self.every * pairs * (self.q.width + self.factors.width)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): rows with such tokens read all positions once."""
        share = PagedIndex(self.k.width).token_bytes(load.kv_itemsize, load.kv_scale_bytes) / self.every
        return share * load.value(Feature("positions_beyond", self._reach)), share * load.num_tokens

    @property
    def _reach(self) -> int:
        """The most positions that a token sees without a choice."""
        return (self.number + 1) * self.every - 1

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        q, factors, k = inputs
        keys, group, batch = run.caches[self.layer], run.groups[self.layer], run.batch
        tokens, places = batch.entry_places(group, self.every)
        keys[places] = stored(k[tokens], keys.dtype)
        chosen = np.zeros((len(q), self.number), np.int32)
        for row, length in enumerate(batch.context_lens.tolist()):
            own = slice(_first_beyond(batch, row, self._reach), batch.row_offsets[row + 1])
            if len(q[own]):
                table = of_entries(batch.block_tables[group][row], self.every, batch.block_size)
                context = Context(keys[:, :, None], keys[:, :, None], table, length // self.every)
                last = (batch.positions[own] + 1) // self.every - 1
                scores = _scores(q[own], factors[own], last, context)
                best = np.argsort(-scores, axis=-1, kind="stable")[:, : self.number]
                chosen[own] = np.sort(best, axis=-1)
        return chosen


def _first_beyond(batch: Batch, row: int, number: int) -> int:
    """Return the first token of a row that sees more than so many positions; the end if none does."""
    begin, end = (int(offset) for offset in batch.row_offsets[row : row + 2])
    return min(end, begin + max(0, number - int(batch.positions[begin])))


def _scores(q: Array, factors: Array, last: np.ndarray, context: Context) -> Array:
    """Return those of all positions for tokens of one row, [t, positions]: up to the `last` of each."""
    parts = []
    for start in range(0, context.length, PARTITION):
        keys, _ = context.partition(start, 0)
        products = np.maximum(np.matmul(q, keys), np.float32(0))  # [t, heads, PARTITION]
        part = np.matmul(factors[:, None], products)[:, 0]
        part[np.isnan(part)] = np.inf
        part[np.arange(start, start + PARTITION) > last[:, None]] = -np.inf
        parts.append(part)
    return np.concatenate(parts, axis=-1)
