"""Latent attention: against keys and values that are written out, in float64, and the bits of each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Paged, random_weights, same_bits

from quire.errors import ConfigError
from quire.program import Builder, Names, PagedLatent, Program, Value, WeightSpec

E = Names("e")


@dataclass(frozen=True)
class Shape:
    heads: int
    rank: int
    rope_dim: int

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """Of the queries, their rest, the latent and its rest."""
        heads, rank, rest = self.heads, self.rank, self.rope_dim
        return (heads, rank), (heads, rest), (rank,), (1, rest)


def program(shape: Shape, tokens: int) -> Program:
    """The inputs of a token are the row of its id."""
    b, first, values = Builder(), 0, []
    x = b.embed(E, tokens, sum(int(np.prod(width)) for width in shape.widths))
    for width in shape.widths:
        values.append(b.slice(x, first, width))
        first += values[-1].width
    return b.program(b.latent_attention(*values, scale=0.7))


def parts(shape: Shape, table: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum([int(np.prod(width)) for width in shape.widths])
    return [
        part.reshape(len(table), *width)
        for part, width in zip(np.split(table, ends[:-1], axis=1), shape.widths, strict=True)
    ]


def expected(shape: Shape, table: np.ndarray) -> np.ndarray:
    """One sequence of all rows, with scores of every pair at once."""
    q, q_rope, c, r = parts(shape, table.astype(np.float64))
    scores = 0.7 * (np.einsum("thd,sd->hts", q, c) + np.einsum("thd,sd->hts", q_rope, r[:, 0]))
    scores[:, ~np.tri(len(table), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hts,sd->thd", weights / weights.sum(axis=-1, keepdims=True), c)


def computed(shape: Shape, table: np.ndarray, chunks: tuple[int, ...] = (), **how: object) -> np.ndarray:
    made = program(shape, len(table))
    weights = random_weights(made)
    weights["e.weight"].array[...] = table
    paged = Paged(made, weights, **how)
    return paged.prefill(paged.sequence(range(len(table))), chunks).reshape(len(table), shape.heads, -1)


def draw(shape: Shape, tokens: int, seed: int = 0) -> np.ndarray:
    width = sum(int(np.prod(each)) for each in shape.widths)
    return np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 20), st.integers(1, 6), st.integers(1, 150), st.integers(0, 99))
def test_latent_attention(heads: int, rank: int, rope_dim: int, tokens: int, seed: int) -> None:
    shape = Shape(heads, rank, rope_dim)
    table = draw(shape, tokens, seed)
    np.testing.assert_allclose(computed(shape, table), expected(shape, table), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bits_are_equal_in_any_chunks_and_blocks(dtype: str) -> None:
    shape = Shape(3, 10, 4)
    table = draw(shape, 150)
    whole = computed(shape, table, kv_cache_dtype=dtype)
    for block_size, chunks in ((8, (1,) * 150), (16, (63, 1, 1, 70)), (64, (7, 64))):
        how = {"block_size": block_size, "kv_cache_dtype": dtype}
        assert same_bits(computed(shape, table, chunks, **how), whole), chunks


@pytest.mark.parametrize("place", [0, 30, 64])
def test_a_latent_that_is_not_finite_reaches_those_who_see_it_alone(place: int) -> None:
    shape = Shape(2, 6, 3)
    table = draw(shape, 90)
    clean = computed(shape, table)
    for column in (shape.heads * (shape.rank + shape.rope_dim) + 2, -1):  # of the latent, and of its rest
        table = draw(shape, 90)
        table[place, column] = np.nan
        found = computed(shape, table)
        assert np.isnan(found[place:]).all(), column
        assert same_bits(found[:place], clean[:place]), column


def test_the_cache_has_one_vector_of_each_token() -> None:
    made = program(Shape(8, 32, 4), 5)
    assert made.caches == (PagedLatent(32, 4),)
    assert made.kv_token_bytes(2) == 72
    assert PagedLatent(32, 4).token_bytes(1, 4) == 36 + 8  # a scale for the latent, one for its rest


def by_head(b: Builder, x: Value, shape: tuple[int, int, int]) -> Value:
    return b.linear_by_head(x, WeightSpec("w", shape, ("w",)))


def test_products_by_head() -> None:
    b = Builder()
    made = b.program(by_head(b, b.slice(b.embed(E, 9, 21), 0, (3, 7)), (3, 5, 7)))
    weights = random_weights(made)
    paged = Paged(made, weights)
    found = paged.prefill(paged.sequence(range(9)), (2, 4))
    x = weights["e.weight"].array.reshape(9, 3, 7)
    np.testing.assert_allclose(found, np.einsum("thi,hoi->tho", x, weights["w"].array), rtol=1e-5, atol=1e-5)
    whole = Paged(made, weights)
    assert same_bits(whole.prefill(whole.sequence(range(9))), found)


def test_shapes_that_do_not_match_are_refused() -> None:
    b = Builder()
    x = b.embed(E, 9, 30)
    q, rest, c, r = (b.slice(x, 0, shape) for shape in ((2, 6), (2, 3), 6, (1, 3)))
    for wrong in ((c, rest, q, r), (q, q, c, r), (q, rest, x, r)):
        with pytest.raises((ConfigError, ValueError)):
            b.latent_attention(*wrong, scale=1.0)
    with pytest.raises(ConfigError, match="by head"):
        by_head(b, q, (3, 4, 6))
