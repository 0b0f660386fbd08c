"""Compressed attention: entries of several tokens each, and attention to them beside a window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.caches import PagedInputs, PagedVectors
from quire.program.numerics import Array
from quire.program.ops.context import Context, attend, in_blocks, of_entries, stored
from quire.program.program import Load, Op, Run, Value, WeightSpec


@dataclass(frozen=True, slots=True)
class Compress(Op):
    """out[t] = sum over j of softmax(gates + bias)[j] values[j] for a token that ends an entry, else zeros.

    An entry is of `every` tokens, counted from position 0; bias [every, width] has a row for each. values and
    gates are [T, width], out is [T, 1, dim], and each of its numbers has a softmax of its own over the tokens
    of the entry. If `overlapping`, width is 2 dim: of the tokens of an entry the last dim numbers count, and
    of those of the entry before it, if there is one, the first (DeepSeek-V4: CSA; else HCA).

    Values and gates are written to the cache in float32, and all read back from it; sums are over positions
    in their order.
    """

    values: Value
    gates: Value
    bias: WeightSpec
    layer: int

    @property
    def every(self) -> int:
        return self.bias.shape[0]

    @property
    def overlapping(self) -> bool:
        return self.values.width > self.out.width

    @property
    def spec(self) -> PagedInputs:
        return PagedInputs(2 * self.values.width, self.every * (2 if self.overlapping else 1))

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.bias,)

    def flops(self, load: Load) -> float:
        """Count for each number of each token a bias, an exponential, a product and two sums."""
        return 5 * load.num_tokens * self.values.width

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): what each token adds is read once."""
        written = load.num_tokens * self.spec.token_bytes(load.kv_itemsize)
        return written, written

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        values, gates = (x.reshape(len(x), -1) for x in inputs)
        rows, bias = run.caches[self.layer], run.weights[self.bias.name]
        group, batch = run.groups[self.layer], run.batch
        rows[batch.places(group)] = np.concatenate([values, gates], axis=-1)
        out = np.zeros((len(values), *self.out.shape), np.float32)
        for token in np.flatnonzero((batch.positions + 1) % self.every == 0):
            end = int(batch.positions[token]) + 1
            at = np.arange(max(0, end - self.spec.window), end)
            table = batch.block_tables[group][batch.token_rows[token]]
            own, own_gates = np.split(rows[table[at // batch.block_size], at % batch.block_size], 2, axis=-1)
            own_gates = own_gates + bias[at % self.every]
            if self.overlapping:
                own, own_gates = (_overlapped(x, self.every) for x in (own, own_gates))
            weights = np.exp(own_gates - own_gates.max(axis=0))
            out[token] = (weights * own).sum(axis=0) / weights.sum(axis=0)
        return out


def _overlapped(x: Array, every: int) -> Array:
    """Return the last half of the last `every` rows, after the first half of those before them."""
    first, last = np.split(x, 2, axis=-1)
    return np.concatenate([first[:-every], last[-every:]])


@dataclass(frozen=True, slots=True)
class CompressedAttention(Op):
    """out[t, h] = softmax(scale q[t, h] K^T) K over a window of vectors and the entries before (DeepSeek-V4).

    q [T, heads, dim], out [T, heads, dim]. K has first the vectors k [T, 1, dim] of the last `window`
    positions, the token's own included, then the entries that are complete at the token: of `every` tokens
    each, with the numbers that `entries` [T, 1, dim] has for the last of these; its other rows are ignored.
    With `chosen` [T, n] (ChoosePositions) a token that sees more than n entries attends to those of its list
    alone. `sinks` as in Attention. Vectors and entries are written to their caches and read back as stored;
    the first number of one that is not finite as stored is NaN.

    All of K, in this order, takes the place of the context of Attention, and sums have the order of these: so
    it depends only on the token's position and list.
    """

    q: Value
    k: Value
    layer: int
    window: int
    scale: float
    sinks: WeightSpec | None = None
    entries: Value | None = None
    every: int = 0
    entry_layer: int = -1
    chosen: Value | None = None

    @property
    def spec(self) -> PagedVectors:
        return PagedVectors(self.k.width, window=self.window)

    @property
    def entry_spec(self) -> PagedVectors:
        return PagedVectors(self.k.width, self.every)

    @property
    def most(self) -> int | None:
        """Entries that a token attends to, at most; None if all that it sees."""
        return None if self.chosen is None else self.chosen.width

    def inputs(self) -> tuple[Value, ...]:
        more = (self.entries, self.chosen)
        return (self.q, self.k, *(value for value in more if value is not None))

    def weights(self) -> tuple[WeightSpec, ...]:
        return () if self.sinks is None else (self.sinks,)

    def flops(self, load: Load) -> float:
        """Count scores and weighted vectors of all visible pairs, of entries as if they came in parts."""
        pairs = load.pairs(self.window)
        if self.entries is not None:
            pairs = pairs + (1 / self.every) * load.pairs(self._reach)
        return 2 * pairs * (self.q.width + self.out.width)

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        """Return (read, written): each row reads what is visible to any of its tokens once.

        Of chosen entries as many as if each token chose one that others do not.
        """
        token = self.spec.token_bytes(load.kv_itemsize, load.kv_scale_bytes)
        read: float = token * load.positions(self.window)
        written: float = token * load.num_tokens
        if self.entries is not None:
            share = token / self.every
            read, written = read + share * load.positions(self._reach), written + share * load.num_tokens
        return read, written

    @property
    def _reach(self) -> int | None:
        """Positions that the entries of a token stand for, at most; None: all."""
        return None if self.most is None else self.most * self.every

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        q, k, *rest = inputs
        batch, vectors = run.batch, run.caches[self.layer]
        vectors[batch.places(run.groups[self.layer])] = stored(k, vectors.dtype)
        if self.entries is not None:
            cache, group = run.caches[self.entry_layer], run.groups[self.entry_layer]
            tokens, places = batch.entry_places(group, self.every)
            cache[places] = stored(rest[0][tokens], cache.dtype)
        sinks = None if self.sinks is None else run.weights[self.sinks.name]
        out = np.empty((len(q), *self.out.shape), np.float32)
        for token in range(len(q)):
            seen = in_blocks(self._seen(run, token, None if self.chosen is None else rest[1])[:, None])
            count = self._count(int(batch.positions[token]))
            context = Context(seen, seen, np.arange(len(seen)), count)
            own = slice(token, token + 1)
            out[own] = attend(q[own], np.array([count - 1]), context, self.scale, sinks=sinks)
        return out

    def _num_entries(self, position: int) -> int:
        """Return the entries that a token at a position sees."""
        return 0 if self.entries is None else (position + 1) // self.every

    def _count(self, position: int) -> int:
        """Return the vectors that it attends to."""
        entries = self._num_entries(position)
        return min(position + 1, self.window) + (entries if self.most is None else min(entries, self.most))

    def _seen(self, run: Run, token: int, lists: Array | None) -> Array:
        """Return the vectors that a token attends to, [vectors, dim]."""
        batch, position = run.batch, int(run.batch.positions[token])
        row = batch.token_rows[token]
        table = batch.block_tables[run.groups[self.layer]][row]
        at = np.arange(max(0, position + 1 - self.window), position + 1)
        found = [run.caches[self.layer][table[at // batch.block_size], at % batch.block_size]]
        if number := self._num_entries(position):
            which = np.arange(number)
            if lists is not None and number > lists.shape[1]:
                which = lists[token]
            table = of_entries(
                batch.block_tables[run.groups[self.entry_layer]][row], self.every, batch.block_size
            )
            cache = run.caches[self.entry_layer]
            found.append(cache[table[which // cache.shape[1]], which % cache.shape[1]])
        return np.concatenate(found).astype(np.float32)
