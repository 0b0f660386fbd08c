"""Attention to chosen positions: against a formula in float64, and the bits of each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Paged, random_weights, same_bits

from quire.program import Builder, Load, Names, PagedIndex, PagedLatent, Program
from quire.program.ops import ChoosePositions, LatentAttention

E = Names("e")


@dataclass(frozen=True)
class Shape:
    heads: int  # of the index
    dim: int
    number: int
    attending: int = 2  # heads
    rank: int = 5
    rope_dim: int = 3

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """Of index queries, factors, index keys, queries, their rest, the latent and its rest."""
        index = (self.heads, self.dim), (self.heads,), (1, self.dim)
        heads, rank, rest = self.attending, self.rank, self.rope_dim
        return *index, (heads, rank), (heads, rest), (rank,), (1, rest)


def program(shape: Shape, tokens: int, chooses: bool = True, attends: bool = True) -> Program:
    """The inputs of a token are the row of its id. One that does not attend gives the lists of positions."""
    b, first, values = Builder(), 0, []
    x = b.embed(E, tokens, sum(int(np.prod(width)) for width in shape.widths))
    for width in shape.widths:
        values.append(b.slice(x, first, width))
        first += values[-1].width
    chosen = None
    if chooses:
        lists = b.value((shape.number,), dtype="int32")
        chosen = b.record(ChoosePositions(lists, *values[:3], b.cache(PagedIndex(shape.dim)))).out
        if not attends:
            return b.program(chosen)
    return b.program(b.latent_attention(*values[3:], scale=0.7, chosen=chosen))


def parts(shape: Shape, table: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum([int(np.prod(width)) for width in shape.widths])
    return [
        part.reshape(len(table), *width)
        for part, width in zip(np.split(table, ends[:-1], axis=1), shape.widths, strict=True)
    ]


def choices(shape: Shape, table: np.ndarray) -> list[list[int]]:
    """The positions of each token: one by one, by the definition."""
    q, factors, k = parts(shape, table.astype(np.float64))[:3]
    found = []
    for token in range(len(table)):
        scores = [
            sum(f * max(0.0, h @ k[at, 0]) for f, h in zip(factors[token], q[token], strict=True))
            for at in range(token + 1)
        ]
        best = sorted(range(token + 1), key=lambda at, of=scores: (-of[at], at))
        found.append(sorted(best[: shape.number]))
    return found


def expected(shape: Shape, table: np.ndarray) -> np.ndarray:
    q, q_rope, c, r = parts(shape, table.astype(np.float64))[3:]
    out = np.empty(q.shape)
    for token, chosen in enumerate(choices(shape, table)):
        scores = 0.7 * (q[token] @ c[chosen].T + q_rope[token] @ r[chosen, 0].T)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[token] = weights / weights.sum(axis=-1, keepdims=True) @ c[chosen]
    return out


def computed(
    shape: Shape, table: np.ndarray, chunks: tuple[int, ...] = (), chooses: bool = True, **how: object
) -> np.ndarray:
    made = program(shape, len(table), chooses)
    weights = random_weights(made)
    weights["e.weight"].array[...] = table
    paged = Paged(made, weights, **how)
    found = paged.prefill(paged.sequence(range(len(table))), chunks)
    return found.reshape(len(table), shape.attending, -1)


def draw(shape: Shape, tokens: int, seed: int = 0) -> np.ndarray:
    """Index queries, factors and keys are small integers: scores are exact, and many of them are equal."""
    rng = np.random.default_rng(seed)
    widths = [int(np.prod(each)) for each in shape.widths]
    whole = [rng.integers(-2, 3, (tokens, width)) for width in widths[:3]]
    rest = [rng.standard_normal((tokens, width)) for width in widths[3:]]
    return np.concatenate([*whole, *rest], axis=1).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 90), st.integers(1, 150), st.integers(0, 99))
def test_attention_to_chosen_positions(heads: int, dim: int, number: int, tokens: int, seed: int) -> None:
    shape = Shape(heads, dim, number)
    table = draw(shape, tokens, seed)
    np.testing.assert_allclose(computed(shape, table), expected(shape, table), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [1, 20, 64])
def test_lists_are_in_order_and_have_the_lowest_of_equal_scores(number: int) -> None:
    shape = Shape(2, 3, number)
    made, table = program(shape, 100, attends=False), draw(shape, 100)
    weights = random_weights(made)
    weights["e.weight"].array[...] = table
    paged = Paged(made, weights)
    found = paged.prefill(paged.sequence(range(100)), (70, 1))
    assert found.dtype == np.int32
    assert found[number:].tolist() == choices(shape, table)[number:]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bits_are_equal_in_any_chunks_and_blocks(dtype: str) -> None:
    shape = Shape(3, 10, 70)
    table = np.random.default_rng(1).standard_normal(draw(shape, 150).shape).astype(np.float32)
    whole = computed(shape, table, kv_cache_dtype=dtype)
    for block_size, chunks in ((8, (1,) * 150), (16, (63, 1, 1, 70)), (64, (7, 64)), (16, (69, 1, 1))):
        how = {"block_size": block_size, "kv_cache_dtype": dtype}
        assert same_bits(computed(shape, table, chunks, **how), whole), chunks


def test_tokens_that_see_no_more_have_the_bits_they_have_without_a_choice() -> None:
    shape = Shape(3, 4, 70)
    table = draw(shape, 100)
    found, plain = computed(shape, table), computed(shape, table, chooses=False)
    assert same_bits(found[:70], plain[:70])
    assert not (found[70:] == plain[70:]).all(axis=(-1, -2)).any()


def test_an_index_key_that_is_not_finite_is_chosen_by_all_who_see_it() -> None:
    shape = Shape(1, 2, 3)
    table = draw(shape, 40)
    table[:, :3] = 1  # the query and the factor, so that scores are sums of keys
    clean = computed(shape, table)
    for lost in (np.nan, np.inf, -np.inf):
        spoiled = table.copy()
        spoiled[10, 4] = lost  # a key
        best = table.copy()
        best[10, 3:5] = 50
        assert same_bits(computed(shape, spoiled), computed(shape, best))
        assert same_bits(computed(shape, spoiled)[:10], clean[:10])


def test_a_latent_that_is_not_finite_reaches_those_who_choose_it_alone() -> None:
    shape = Shape(2, 3, 12)
    table = draw(shape, 60)
    spoiled = table.copy()
    spoiled[20, -1] = np.nan
    found, clean = computed(shape, spoiled), computed(shape, table)
    reached = np.array([20 in chosen for chosen in choices(shape, table)])
    assert 0 < reached[20:].sum() < 40
    assert np.isnan(found[reached]).all()
    assert same_bits(found[~reached], clean[~reached])


def test_costs_of_a_choice() -> None:
    shape = Shape(3, 4, 10)
    made = program(shape, 9)
    choose, attend = (
        next(op for op in made if isinstance(op, kind)) for kind in (ChoosePositions, LatentAttention)
    )
    assert made.caches == (PagedIndex(4), PagedLatent(5, 3))
    assert made.kv_token_bytes(2) == 8 + 16
    assert PagedIndex(4).token_bytes(1, 4) == 8  # one scale
    short, load = Load(((0, 4), (9, 1)), 1, 2), Load(((0, 4), (8, 4), (40, 1)), 1, 2)
    assert (choose.flops(short), choose.kv_bytes(short)) == (0, (0, 5 * 8))
    assert choose.flops(load) == 2 * (11 + 12 + 41) * 3 * (4 + 1)
    assert choose.kv_bytes(load) == ((12 + 41) * 8, 9 * 8)
    assert attend.flops(load) == 2 * (1 + 2 + 3 + 4 + 9 + 3 * 10 + 10) * 2 * (5 + 3 + 5)
    assert attend.kv_bytes(load) == ((4 + 12 + 10) * 16, 9 * 16)
