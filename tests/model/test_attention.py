"""Attention against a dense masked softmax in float64, and its exactness: the bits of a row depend on
that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Paged, Sequence, batch_of, random_weights, same_bits, tiny

from quire.backends.kv_cache import KV_DTYPES
from quire.program import Builder, Names
from quire.program.ops import Attention
from quire.program.program import Run


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    groups: int = 2
    dim: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    value_dim: int = 0  # 0: dim
    chunked: bool = False

    @property
    def dims(self) -> tuple[int, int]:
        """Of a key, and of a value."""
        return self.dim, self.value_dim or self.dim


SHAPES = [
    Shape(),
    Shape(heads=3, groups=3, dim=5),
    Shape(heads=6, groups=1, dim=16),
    Shape(heads=1, groups=1, dim=4),
    Shape(heads=4, groups=4, dim=2, window=1),
    Shape(window=7),
    Shape(window=64),
    Shape(window=100, softcap=1.5),
    Shape(window=5000, sinks=True),
    Shape(softcap=0.7),
    Shape(heads=6, sinks=True, window=9),
    Shape(scale=1.7),
    Shape(scale=0.01, softcap=3.0, sinks=True, window=33),
    Shape(value_dim=3),
    Shape(window=7, chunked=True),
    Shape(window=100, chunked=True, sinks=True),
    Shape(dim=5, value_dim=12, window=20, sinks=True),
]


class Layer:
    """One attention op with queries, keys and values that are fixed by sequence and position.

    The last sequences have `images`, (first, end) each.
    """

    def __init__(
        self,
        shape: Shape,
        lengths: list[int],
        seed: int = 0,
        images: tuple[tuple[tuple[int, int], ...], ...] = (),
    ) -> None:
        b = Builder()
        q = b.linear(b.embed(Names("e"), 4, 4), Names("q"), (shape.heads, shape.dim))
        pairs = zip("kv", shape.dims, strict=True)
        k, v = (b.linear(q, Names(name), (shape.groups, dim)) for name, dim in pairs)
        out = b.attention(
            q,
            k,
            v,
            scale=shape.scale,
            window=shape.window,
            chunked=shape.chunked,
            softcap=shape.softcap,
            sinks=Names("s") if shape.sinks else None,
        )
        (self.op,) = (op for op in b.program(out) if isinstance(op, Attention))
        rng = np.random.default_rng(seed)

        def draw(heads: int, dim: int = shape.dim) -> list[np.ndarray]:
            return [rng.standard_normal((n, heads, dim)).astype(np.float32) * 2 for n in lengths]

        self.shape, self.lengths = shape, lengths
        self.images = (*[()] * (len(lengths) - len(images)), *images)
        self.q, self.k, self.v = draw(shape.heads), draw(shape.groups), draw(shape.groups, shape.dims[1])
        self.sinks = rng.standard_normal(shape.heads).astype(np.float32)

    def cache(self, num_blocks: int, block_size: int, fill: float = np.nan) -> list[tuple]:
        size = (num_blocks, block_size, self.shape.groups)
        return [tuple(np.full((*size, dim), fill, np.float32) for dim in self.shape.dims)]

    def sequences(self, block_size: int, rng: np.random.Generator, spare: int = 5) -> tuple[list, int]:
        """A sequence for each length over shuffled blocks, and how many blocks there are."""
        needs = [-(-n // block_size) for n in self.lengths]
        blocks = rng.permutation(sum(needs) + spare).tolist()
        tables = [[blocks.pop() for _ in range(need)] for need in needs]
        made = [Sequence([0] * n, table) for n, table in zip(self.lengths, tables, strict=True)]
        for sequence, images in zip(made, self.images, strict=True):
            sequence.images = images
        return made, sum(needs) + spare

    def run(self, kv: list, rows: list[tuple[int, int]], sequences: list, block_size: int) -> list:
        """One batch: for each (sequence number, count) its outputs [count, heads * dim]."""
        taken = [(i, slice(sequences[i].computed, sequences[i].computed + n)) for i, n in rows]
        batch = batch_of([(sequences[i], n) for i, n in rows], block_size)
        inputs = (np.concatenate([part[i][s] for i, s in taken]) for part in (self.q, self.k, self.v))
        weights = {} if self.op.sinks is None else {self.op.sinks.name: self.sinks}
        out = self.op.reference(Run(batch, weights, kv, [0]), *inputs)
        for i, n in rows:
            sequences[i].computed += n
        return np.split(out, np.cumsum([n for _, n in rows])[:-1])

    def dense(self, i: int) -> np.ndarray:
        """Softmax over a full masked matrix in float64: what sequence i must give, [n, heads * dim]."""
        s = self.shape
        q, k, v = (part[i].astype(np.float64) for part in (self.q, self.k, self.v))
        n, out = len(q), np.empty((len(q), s.heads, s.dims[1]))
        ahead = np.arange(n)[:, None] - np.arange(n)[None, :]
        hidden = ahead < 0
        for first, end in self.images[i]:
            hidden[first:end, first:end] = False
        hidden |= ahead >= (s.window or n + 1)
        if s.chunked:
            chunk = np.arange(n) // s.window
            hidden |= chunk[:, None] != chunk[None, :]
        for h in range(s.heads):
            group = h // (s.heads // s.groups)
            scores = q[:, h] @ k[:, group].T * (s.dim**-0.5 if s.scale is None else s.scale)
            if s.softcap:
                scores = s.softcap * np.tanh(scores / s.softcap)
            scores[hidden] = -np.inf
            if s.sinks:
                scores = np.concatenate([scores, np.full((n, 1), self.sinks[h], np.float64)], axis=1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[:, h] = weights[:, :n] @ v[:, group]
        return out.reshape(n, -1)

    def alone(self, i: int, block_size: int = 16) -> np.ndarray:
        """Sequence i whole, by itself."""
        sequences, num_blocks = self.sequences(block_size, np.random.default_rng(1))
        return self.run(self.cache(num_blocks, block_size), [(i, self.lengths[i])], sequences, block_size)[0]


def _steps(rng: np.random.Generator, layer: Layer, kv: list, sequences: list, block_size: int) -> list:
    """All sequences to their end by batches of random chunks, decode rows and rows of a few tokens."""
    parts: list[list[np.ndarray]] = [[] for _ in sequences]
    while left := [i for i, s in enumerate(sequences) if s.computed < len(s.token_ids)]:
        some = rng.permutation(left)[: rng.integers(1, len(left) + 1)].tolist()
        rows = []
        for i in some:
            own = sequences[i]
            wanted = int(rng.choice([1, 1, 4, rng.integers(1, 90)]))
            wanted = min(wanted, len(own.token_ids) - own.computed)
            rows.append((i, max(wanted, int(own.visible_ends(wanted)[-1]) - own.computed)))
        for (i, _), out in zip(rows, layer.run(kv, rows, sequences, block_size), strict=True):
            parts[i].append(out)
    return [np.concatenate(part) for part in parts]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_dense_softmax_and_is_exact_in_every_schedule(shape: Shape) -> None:
    """Never-written cache positions hold NaN; any schedule gives the same bits and the right numbers."""
    layer = Layer(shape, [150, 1, 65, 64, 20])
    whole = [layer.alone(i) for i in range(5)]
    for i, out in enumerate(whole):
        np.testing.assert_allclose(out, layer.dense(i), rtol=2e-5, atol=2e-5)
    for block_size in (8, 16, 32, 64):
        rng = np.random.default_rng(block_size)
        sequences, num_blocks = layer.sequences(block_size, rng)
        outs = _steps(rng, layer, layer.cache(num_blocks, block_size), sequences, block_size)
        assert all(same_bits(a, b) for a, b in zip(outs, whole, strict=True))


@pytest.mark.parametrize(
    "shape", [Shape(), Shape(window=7), Shape(heads=6, window=40, sinks=True), Shape(softcap=0.7)], ids=str
)
def test_tokens_of_an_image_see_each_other(shape: Shape) -> None:
    """They see to the end of their image, from where their window begins; others see as ever."""
    layer = Layer(shape, [40, 150, 70], images=(((10, 90), (90, 94), (100, 130)), ((0, 70),)))
    whole = [layer.alone(i) for i in range(3)]
    for i, out in enumerate(whole):
        np.testing.assert_allclose(out, layer.dense(i), rtol=2e-5, atol=2e-5)
    for block_size in (8, 64):
        rng = np.random.default_rng(block_size)
        sequences, num_blocks = layer.sequences(block_size, rng)
        outs = _steps(rng, layer, layer.cache(num_blocks, block_size), sequences, block_size)
        assert all(same_bits(a, b) for a, b in zip(outs, whole, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.none() | st.integers(1, 200),
    st.none() | st.floats(0.5, 20),
    st.booleans(),
    st.lists(st.integers(1, 140), min_size=1, max_size=4),
    st.sampled_from([8, 16, 32, 64]),
    st.integers(0, 99),
)
def test_random_shapes(groups, share, dim, window, softcap, sinks, lengths, block_size, seed) -> None:
    layer = Layer(Shape(groups * share, groups, dim, window, softcap, sinks), lengths, seed)
    rng = np.random.default_rng(seed)
    sequences, num_blocks = layer.sequences(block_size, rng)
    outs = _steps(rng, layer, layer.cache(num_blocks, block_size), sequences, block_size)
    for i, out in enumerate(outs):
        np.testing.assert_allclose(out, layer.dense(i), rtol=3e-5, atol=3e-5)
        assert same_bits(out, layer.alone(i))


@pytest.mark.parametrize("window", [None, 20, 70])
def test_nothing_outside_the_visible_positions_is_read(window: int | None) -> None:
    """NaN in free blocks, beyond the context, and in blocks that no token of the row can see anymore; of
    those that were given back not even the table's entries are read."""
    layer = Layer(Shape(window=window), [200])
    expected = layer.alone(0)
    sequences, num_blocks = layer.sequences(8, np.random.default_rng(2))
    kv = layer.cache(num_blocks, 8)
    layer.run(kv, [(0, 150)], sequences, 8)
    if window:
        gone = sequences[0].blocks[: (151 - window) // 8]
        for part in kv[0]:
            part[gone] = np.nan
        sequences[0].blocks[: len(gone)] = [1 << 40] * len(gone)
    out = layer.run(kv, [(0, 50)], sequences, 8)[0]
    assert same_bits(out, expected[150:])


def test_keys_are_read_as_the_cache_stores_them() -> None:
    """A cache of fewer bits rounds the keys of this very step too: chunked equals whole."""
    layer = Layer(Shape(), [100])

    def outputs(chunks: list[int]) -> np.ndarray:
        sequences, num_blocks = layer.sequences(16, np.random.default_rng(3))
        kv = [tuple(np.zeros((num_blocks, 16, 2, 8), np.float16) for _ in range(2))]
        return np.concatenate([layer.run(kv, [(0, n)], sequences, 16)[0] for n in chunks])

    whole = outputs([100])
    assert same_bits(outputs([1, 40, 59]), whole)
    assert not same_bits(whole, layer.alone(0))
    rounded = Layer(Shape(), [100])
    rounded.k, rounded.v = ([x.astype(np.float16) for x in part] for part in (layer.k, layer.v))
    np.testing.assert_allclose(whole, rounded.dense(0), rtol=2e-5, atol=2e-5)


def test_rejected_drafts_are_overwritten() -> None:
    """A verification row writes drafts; when they are refused, the next step starts before them."""
    layer = Layer(Shape(window=40), [90])
    expected = layer.alone(0)
    sequences, num_blocks = layer.sequences(16, np.random.default_rng(4))
    kv = layer.cache(num_blocks, 16)
    layer.run(kv, [(0, 60)], sequences, 16)
    kept = [part[0].copy() for part in (layer.q, layer.k, layer.v)]
    for part in (layer.q, layer.k, layer.v):
        part[0][63:68] = 100.0
    layer.run(kv, [(0, 8)], sequences, 16)
    layer.q[0], layer.k[0], layer.v[0] = kept
    sequences[0].computed = 63
    out = layer.run(kv, [(0, 27)], sequences, 16)[0]
    assert same_bits(out, expected[63:])


@pytest.mark.parametrize("shape", [Shape(), Shape(window=20, softcap=1.5, sinks=True)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", np.nan), ("float32", -np.inf), ("float16", 1e5), ("bfloat16", 3.4e38), ("bfloat16", np.nan)],
)
def test_a_value_that_is_not_finite_reaches_those_who_see_it_alone(
    shape: Shape, dtype: str, value: float
) -> None:
    """As the cache stores it: 1e5 is beyond float16. Whatever the chunks, all else has the bits it had."""
    layer = Layer(shape, [90])

    def outputs(chunks: list[int]) -> np.ndarray:
        sequences, num_blocks = layer.sequences(16, np.random.default_rng(5))
        held = (num_blocks, 16, shape.groups, shape.dim)
        kv = [(np.zeros(held, KV_DTYPES[dtype]), np.zeros(held, KV_DTYPES[dtype]))]
        with np.errstate(all="ignore"):
            out = np.concatenate([layer.run(kv, [(0, n)], sequences, 16)[0] for n in chunks])
        return out.reshape(-1, shape.groups, out.shape[1] // shape.groups)

    for place in (0, 30, 63, 64):
        clean, kept = outputs([90]), layer.v[0].copy()
        layer.v[0][place, 1, 3] = value
        hit = np.zeros((90, shape.groups), bool)
        hit[place : place + (shape.window or 90), 1] = True
        for chunks in ([90], [31, 1, 40, 18]):
            out = outputs(chunks)
            assert np.isnan(out[hit]).all(), (place, chunks)
            assert same_bits(out[~hit], clean[~hit]), (place, chunks)
        layer.v[0] = kept


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_shared_prefix_is_not_harmed_by_what_follows_it(name: str, bad: float) -> None:
    """A token whose numbers are not finite, and a request that finds the blocks before it in the cache."""
    program = tiny(name).program
    weights = random_weights(program)
    weights["model.embed_tokens.weight"].array[5, 7] = bad
    prefix = [t for t in np.random.default_rng(6).integers(0, 32, 40).tolist() if t != 5][:24]
    with np.errstate(all="ignore"):
        alone = Paged(program, weights)
        expected = alone.prefill(alone.sequence([*prefix, 8, 9]))
        paged = Paged(program, weights, block_size=8)
        first, second = paged.sequence([*prefix, 5, 7]), paged.sequence([*prefix, 8, 9])
        lost = paged.prefill(first)
        second.blocks[:3], second.computed = first.blocks[:3], 24
        found = paged.prefill(second)
    assert np.isnan(lost[24:]).all(axis=-1).all()
    assert same_bits(lost[:24], expected[:24])
    assert same_bits(found, expected[24:])


def test_extreme_scores_stay_finite() -> None:
    layer = Layer(replace(SHAPES[0], sinks=True), [80])
    layer.q[0] *= 1e3
    layer.k[0] *= 1e3
    assert np.isfinite(layer.alone(0)).all()
