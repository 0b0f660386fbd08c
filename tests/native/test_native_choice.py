"""Choices of positions, and attention to them, of the native backend against the reference twin."""

from __future__ import annotations

import numpy as np
import pytest
from lowered import BF16_ISAS, ISAS, OneOp, distance, in_used_blocks, on_native
from test_choice import Shape, choices, draw, parts
from tiny import same_bits

from quire.program import Builder, PagedIndex, Value
from quire.program.ops import ChoosePositions

LENGTHS = (150, 1, 65, 20)
CLOSE = 3e-6
DTYPES = ("float32", "float16", "bfloat16", "int8")
SHAPES = [
    Shape(1, 1, 1),
    Shape(4, 16, 10, 4, 16, 4),
    Shape(3, 7, 64, 1, 1, 1),
    Shape(70, 5, 65, 37, 64, 8),
    Shape(17, 32, 100, 20, 33, 6),
    Shape(6, 9, 149, 70, 17, 15),
]


def chosen(b: Builder, number: int, q: Value, factors: Value, k: Value) -> Value:
    lists, layer = b.value((number,), dtype="int32"), b.cache(PagedIndex(k.width))
    return b.record(ChoosePositions(lists, q, factors, k, layer)).out


def sparse(shape: Shape, inputs: list[np.ndarray], lengths: tuple[int, ...] = LENGTHS) -> OneOp:
    def record(b: Builder, q: Value, factors: Value, k: Value, *rest: Value) -> Value:
        lists = chosen(b, shape.number, q, factors, k)
        return b.latent_attention(*rest, scale=0.3, chosen=lists)

    return OneOp(inputs, record, lengths)


def drawn(shape: Shape, tokens: int = sum(LENGTHS), seed: int = 0) -> list[np.ndarray]:
    return [np.ascontiguousarray(part) for part in parts(shape, draw(shape, tokens, seed))]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_to_chosen_positions(shape: Shape, isa: str) -> None:
    """Scores are exact in every format, so that the positions are the same, also those of equal scores."""
    op = sparse(shape, drawn(shape))
    for dtype in ("float32", "float16", "bfloat16"):
        rounded = dtype == "bfloat16" and isa in BF16_ISAS
        found = op.native(isa, kv_cache_dtype=dtype)
        assert distance(found, op.reference(kv_cache_dtype=dtype)) < (3e-2 if rounded else CLOSE), dtype


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_lists_are_in_order_and_have_the_lowest_of_equal_scores(threads: int, isa: str) -> None:
    for number, tokens in ((1, 100), (64, 100), (70, 1200)):
        shape = Shape(2, 3, number)
        inputs = drawn(shape, tokens)[:3]
        op = OneOp(inputs, lambda b, *values, n=number: chosen(b, n, *values), (tokens,))
        found = op.native(isa, threads=threads, num_blocks=200).view(np.int32)
        assert (found[number:] == op.reference(num_blocks=200)[number:]).all()


@np.errstate(invalid="ignore")
@pytest.mark.parametrize("isa", ISAS)
def test_scores_that_are_not_numbers_are_the_highest(isa: str) -> None:
    """Of an infinite query products are infinite, negative, which counts as nothing, or no number."""
    shape = Shape(2, 3, 10)
    q, factors, k = drawn(shape, 100)[:3]
    q[:, 1, 2], factors[:, 1] = np.inf, 1
    op = OneOp([q, factors, k], lambda b, *values: chosen(b, 10, *values), (100,))
    found, expected = (way(num_blocks=20) for way in (lambda **how: op.native(isa, **how), op.reference))
    assert (found.view(np.int32)[10:] == expected[10:]).all()
    infinite = [(k[: token + 1, 0, 2] >= 0).nonzero()[0][:10].tolist() for token in range(40, 100)]
    assert expected[40:].tolist() == infinite


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("number", [30, 70])
def test_an_int8_cache(number: int, isa: str) -> None:
    """Keys of an index have one scale, latents and their rest one each, at the places of what is chosen."""
    shape = Shape(1, 6, number, 20, 33, 6)
    q, factors, k, *rest, c, r = drawn(shape)
    k, factors = np.sign(k), np.sign(factors)
    c, r = (np.rint(20 * x) for x in (c, r))
    c[:, 0] = r[:, 0, 0] = 127  # the largest: these are kept as they are, times scales of tokens
    scales = np.float32(2) ** (np.arange(len(q)) % 5)
    kept = [c * scales[:, None], r * scales[::-1, None, None]]
    kept = [(x / 256).astype(np.float32) for x in kept]
    op = sparse(shape, [q, factors, k, *rest, *kept])
    assert distance(op.native(isa, kv_cache_dtype="int8"), op.reference()) < 1e-5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("number", "dtype"), [*((70, dtype) for dtype in DTYPES), (600, "int8")])
def test_bits_do_not_depend_on_threads_blocks_or_chunks(number: int, dtype: str, isa: str) -> None:
    """A context of several segments is divided among threads, if few tokens have one."""
    shape = Shape(9, 12, number, 40, 18, 6)
    inputs = [
        np.random.default_rng(2).standard_normal(x.shape).astype(np.float32) for x in drawn(shape, 1300)
    ]
    op = sparse(shape, inputs, (1300,))
    how = {"kv_cache_dtype": dtype, "num_blocks": 200}
    whole = op.native(isa, **how)
    assert same_bits(op.native(isa, threads=3, **how), whole)
    assert same_bits(op.native(isa, block_size=8, **how), whole)
    for threads, cuts in ((1, (number, 1, 1, 600)), (3, (number - 1, 3)), (2, (1100, *[1] * 20))):
        assert same_bits(in_chunks(op, isa, threads, cuts, **how), whole), cuts


def in_chunks(op: OneOp, isa: str, threads: int, cuts: tuple[int, ...], **how: object) -> np.ndarray:
    paged = on_native(op.program, op.checkpoint(), "f32", isa, threads, **how)
    found = paged.prefill(paged.sequence(range(len(op.table))), cuts)
    return found.reshape(len(op.table), -1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_see_no_more_have_the_bits_they_have_without_a_choice(dtype: str, isa: str) -> None:
    shape = Shape(3, 4, 70, 5, 20, 6)
    inputs = drawn(shape, 100)
    plain = OneOp(inputs, lambda b, q, f, k, *rest: b.latent_attention(*rest, scale=0.3), (100,))
    found, dense = (op.native(isa, kv_cache_dtype=dtype) for op in (sparse(shape, inputs, (100,)), plain))
    assert same_bits(found[:70], dense[:70])
    assert not (found[70:] == dense[70:]).all(axis=-1).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_reaches_those_who_choose_it_alone(dtype: str, isa: str) -> None:
    shape = Shape(1, 3, 12, 3, 20, 6)
    inputs = drawn(shape, 60)
    inputs[2] = np.sign(inputs[2])
    clean = sparse(shape, inputs, (60,)).native(isa, kv_cache_dtype=dtype)
    table = np.concatenate([x.reshape(60, -1) for x in inputs], axis=1)
    reached = np.array([20 in chosen for chosen in choices(shape, table)])
    assert 0 < reached[20:].sum() < 40
    inputs[5][20, 3] = np.nan
    found = sparse(shape, inputs, (60,)).native(isa, kv_cache_dtype=dtype)
    assert np.isnan(found[reached]).all()
    assert same_bits(found[~reached], clean[~reached])
    for lost in (np.nan, np.inf, -np.inf):  # as a key of the index: all who see it choose it
        inputs[2][20, 0, 1] = lost
        found = sparse(shape, inputs, (60,)).native(isa, kv_cache_dtype=dtype)
        assert np.isnan(found[20:]).all(), lost
        assert same_bits(found[:20], clean[:20]), lost


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_nothing_beside_the_context_is_read(dtype: str, isa: str) -> None:
    """A sequence in blocks that held NaN has the bits it has in blocks never used."""
    shape = Shape(3, 20, 30, 3, 20, 6)
    inputs = drawn(shape, 150)
    for x in inputs:
        x[:80] = np.nan
    results = in_used_blocks(sparse(shape, inputs, (150,)), dtype, isa, (50, 20))
    assert np.isfinite(results[0]).all()
    assert all(same_bits(result, results[0]) for result in results)
