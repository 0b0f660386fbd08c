"""Compressed attention of the native backend against the reference twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from lowered import BF16_ISAS, ISAS, OneOp, distance, in_used_blocks, on_native
from test_compressed import E, Shape, draw, parts, record
from tiny import same_bits

from quire.models.compressed import compress
from quire.program import Builder, Value
from quire.program.rope import Rope

LENGTHS = (152, 64, 23, 1)  # but for the last, entries of 4 tokens begin where sequences do
CLOSE = 3e-6
DTYPES = ("float32", "float16", "bfloat16", "int8")
SHAPES = [
    Shape(4, True, heads=4, dim=32, window=20),
    Shape(4, True, 7, heads=37, dim=33, window=128),
    Shape(16, heads=70, dim=16, window=1),
    Shape(32, heads=1, dim=1, window=100),
    Shape(2, False, 12, heads=3, dim=17, window=5, index_heads=70, index_dim=5),
    Shape(0, entries=False, heads=5, dim=20, window=70),
]


def whole_op(shape: Shape, table: np.ndarray, lengths: tuple[int, ...] = LENGTHS) -> OneOp:
    given = {name: np.ascontiguousarray(part) for name, part in parts(shape, table).items()}

    def made(b: Builder, *values: Value) -> Value:
        return record(shape, b, dict(zip(given, values, strict=True)))

    return OneOp(list(given.values()), made, lengths)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_to_a_window_and_entries(shape: Shape, isa: str) -> None:
    op = whole_op(shape, exact(shape, sum(LENGTHS)))
    for dtype in ("float32", "float16", "bfloat16"):
        rounded = dtype == "bfloat16" and isa in BF16_ISAS
        found = op.native(isa, kv_cache_dtype=dtype)
        assert distance(found, op.reference(kv_cache_dtype=dtype)) < (3e-2 if rounded else CLOSE), dtype


def exact(shape: Shape, tokens: int) -> np.ndarray:
    """Random inputs by which entries of an index are powers of two: scores are exact in any format."""
    table = draw(shape, tokens)
    of = parts(shape, table)
    for name in ("index_q", "factors"):
        if name in of:
            of[name][...] = np.sign(of[name])
    if "index_values" in of:
        groups = np.arange(tokens) // shape.every
        of["index_values"][...] = 2.0 ** np.random.default_rng(1).integers(-2, 3, (tokens, 1))[groups]
        if shape.overlapping:  # the entry before has no weight
            of["index_gates"][:, : shape.index_dim] = -1e4
    return table


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [Shape(4, True, dim=37), Shape(16, dim=16), Shape(128, dim=5)], ids=str)
def test_entries(shape: Shape, isa: str) -> None:
    """They are made of float32, whatever the format of the cache, and have the bits of any chunks."""
    lengths = (300, 3, 40)
    rng, width = np.random.default_rng(0), shape.widths["values"]
    inputs = [rng.standard_normal((sum(lengths), *width)).astype(np.float32) for _ in range(2)]
    inputs[1] *= 20

    def made(b: Builder, values: Value, gates: Value) -> Value:
        return compress(b, values, gates, E / "bias", shape.every, overlapping=shape.overlapping)

    op = OneOp(inputs, made, lengths)
    found, expected = op.native(isa, kv_cache_dtype="int8"), op.reference()
    assert distance(found, expected) < 1e-6
    ends = np.concatenate([np.arange(1, length + 1) for length in lengths]) % shape.every == 0
    assert (found[~ends] == 0).all()
    assert same_bits(op.native(isa, threads=3, block_size=8, num_blocks=99), found)
    one = OneOp([x[:300] for x in inputs], made, (300,))
    one.weights["e.bias"] = op.weights["e.bias"]
    for cuts in ((1,) * 300, (shape.every - 1, 1, 200)):
        assert same_bits(in_chunks(one, isa, 2, cuts), found[:300]), cuts


def in_chunks(op: OneOp, isa: str, threads: int, cuts: tuple[int, ...], **how: object) -> np.ndarray:
    paged = on_native(op.program, op.checkpoint(), "f32", isa, threads, **how)
    return paged.prefill(paged.sequence(range(len(op.table))), cuts).reshape(len(op.table), -1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [Shape(4, True, 70, heads=40, dim=18, window=100), Shape(2, dim=20)], ids=str
)
def test_bits_do_not_depend_on_threads_blocks_or_chunks(shape: Shape, dtype: str, isa: str) -> None:
    """Lists of several segments are divided among threads, if few tokens have one."""
    op = whole_op(shape, draw(shape, 1300), (1300,))
    how = {"kv_cache_dtype": dtype, "num_blocks": 200}
    whole = op.native(isa, **how)
    assert same_bits(op.native(isa, threads=3, **how), whole)
    assert same_bits(op.native(isa, block_size=8, **how), whole)
    for threads, cuts in ((1, (99, 1, 1, 600)), (3, (281, 3)), (2, (1100, *[1] * 20))):
        assert same_bits(in_chunks(op, isa, threads, cuts, **how), whole), cuts


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("number", [0, 30])
def test_an_int8_cache(number: int, isa: str) -> None:
    """Vectors, entries and keys of an index have one scale each."""
    shape = Shape(4, False, number, heads=20, dim=33, window=50, index_dim=6)
    table = exact(shape, sum(LENGTHS))
    of, ends = parts(shape, table), np.arange(len(table)) // 4
    for name in ("k", "values"):
        kept = np.rint(20 * of[name].reshape(len(table), -1))
        kept[:, 0] = 127  # the largest: these are kept as they are, times scales of tokens
        if name == "values":
            kept = kept[4 * ends]  # tokens of an entry have the same, so that it has it, too
        scales = 2.0 ** (ends % 5 - 8)
        of[name][...] = (kept * scales[:, None]).reshape(of[name].shape)
    op = whole_op(shape, table)
    assert distance(op.native(isa, kv_cache_dtype="int8"), op.reference()) < 1e-5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["k", "values", "gates"])
def test_what_is_not_finite_reaches_those_who_see_it(name: str, dtype: str, isa: str) -> None:
    shape = Shape(4, True, dim=20, window=3)
    table = draw(shape, 60)
    clean = whole_op(shape, table, (60,)).native(isa, kv_cache_dtype=dtype)
    first, last = (20, 23) if name == "k" else (23, 60)
    for lost in (np.nan, np.inf):
        spoiled = table.copy()
        parts(shape, spoiled)[name].reshape(60, -1)[20, -1] = lost
        found = whole_op(shape, spoiled, (60,)).native(isa, kv_cache_dtype=dtype)
        assert np.isnan(found[first:last]).all(), lost
        assert same_bits(np.delete(found, np.s_[first:last], 0), np.delete(clean, np.s_[first:last], 0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("number", [0, 5])
def test_nothing_beside_what_tokens_see_is_read(number: int, dtype: str, isa: str) -> None:
    """Blocks that other requests filled hold anything, also what is not finite."""
    shape = Shape(4, True, number, dim=20, window=30)
    table = draw(shape, 150)
    table[:80] = np.nan
    op = whole_op(shape, table, (150,))
    first, *others = in_used_blocks(op, dtype, isa, (50, 1, 19))
    assert np.isfinite(first).all()
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("isa", ISAS)
def test_entries_rotate_as_their_first_tokens_do(isa: str) -> None:
    x = np.random.default_rng(0).standard_normal((40, 3, 10)).astype(np.float32)
    rope = Rope(6, 100.0, interleaved=True)
    ops = [OneOp([x], lambda b, x, r=r: b.rotary(x, r), (30, 10)) for r in (rope, replace(rope, behind=3))]
    plain, found = (op.native(isa) for op in ops)
    assert distance(found, ops[1].reference()) < 1e-6
    assert not same_bits(found, plain)
