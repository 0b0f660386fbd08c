"""Latent attention and products by head of the native backend against the reference twin."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from coded import Mixed, coded
from lowered import (
    BF16_ISAS,
    FORMATS,
    ISAS,
    OneOp,
    distance,
    in_used_blocks,
    on_native,
    on_reference,
    rounds_to_bf16,
)
from test_coded import KINDS
from test_latent import Shape, draw, parts
from tiny import Paged, same_bits

from quire.program import Builder, Names, Rows, Value, WeightSpec

W = Names("w")
LENGTHS = (150, 1, 65, 64, 20)
CLOSE = 3e-6
SHAPES = [
    Shape(4, 16, 4),
    Shape(1, 1, 1),
    Shape(16, 48, 16),
    Shape(20, 33, 6),
    Shape(5, 31, 2),
    Shape(70, 17, 15),
    Shape(37, 64, 8),
]


def attention(shape: Shape, inputs: list[np.ndarray], lengths: tuple[int, ...] = LENGTHS) -> OneOp:
    def record(b: Builder, q: Value, q_rope: Value, c: Value, r: Value) -> Value:
        return b.latent_attention(q, q_rope, c, r, scale=0.3)

    return OneOp(inputs, record, lengths)


def drawn(shape: Shape, tokens: int = sum(LENGTHS)) -> list[np.ndarray]:
    return [np.ascontiguousarray(part) for part in parts(shape, draw(shape, tokens))]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: Shape, isa: str) -> None:
    """Where the machine multiplies pairs of bfloat16, queries and weights are rounded to it as well."""
    op = attention(shape, drawn(shape))
    for dtype in ("float32", "float16", "bfloat16"):
        rounded = dtype == "bfloat16" and isa in BF16_ISAS
        found = op.native(isa, kv_cache_dtype=dtype)
        assert distance(found, op.reference(kv_cache_dtype=dtype)) < (3e-2 if rounded else CLOSE), dtype


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_an_int8_cache(shape: Shape, isa: str) -> None:
    """A latent and its rest are kept as rint(x * (127 / amax)), each with its scale amax / 127."""
    q, q_rope, c, r = drawn(shape)
    c[3], r[5], r[7] = 0, 0, 5 * r[7]
    kept = []
    for x in (c, r):
        amax = np.abs(x).max(axis=-1, keepdims=True)
        inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
        kept.append(np.rint(x * inverse) * (amax / np.float32(127)))
    found = attention(shape, [q, q_rope, c, r]).native(isa, kv_cache_dtype="int8")
    assert distance(found, attention(shape, [q, q_rope, *kept]).reference()) < CLOSE


@pytest.mark.parametrize("isa", ISAS)
def test_a_context_of_several_segments(isa: str) -> None:
    shape = Shape(40, 18, 6)
    op = attention(shape, drawn(shape, 1100), (1100,))
    whole = op.native(isa)
    assert distance(whole, op.reference()) < CLOSE
    assert same_bits(op.native(isa, threads=3), whole)
    assert same_bits(op.native(isa, block_size=8, num_blocks=160), whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_what_is_not_finite_reaches_those_who_see_it_alone(dtype: str, isa: str) -> None:
    shape = Shape(3, 20, 6)
    clean = attention(shape, drawn(shape, 90), (90,)).native(isa, kv_cache_dtype=dtype)
    for part, place in ((2, 0), (2, 30), (3, 63), (3, 64)):
        inputs = drawn(shape, 90)
        inputs[part][place, ..., 1] = np.nan
        out = attention(shape, inputs, (90,)).native(isa, kv_cache_dtype=dtype)
        assert np.isnan(out[place:]).all(), (part, place)
        assert same_bits(out[:place], clean[:place]), (part, place)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_nothing_beside_the_context_is_read(dtype: str, isa: str) -> None:
    """A sequence in blocks that held NaN has the bits it has in blocks never used."""
    shape = Shape(3, 20, 6)
    inputs = drawn(shape, 150)
    for x in inputs:
        x[:80] = np.nan
    results = in_used_blocks(attention(shape, inputs, (150,)), dtype, isa, (50, 20))
    assert np.isfinite(results[0]).all()
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_products_by_head(format: str, isa: str) -> None:
    """With quantized weights the bits are those of the reference; and of any number of rows."""
    for heads, inputs, outputs in ((1, 20, 7), (3, 33, 130), (5, 90, 16)):
        spec = WeightSpec("w", (heads, outputs, inputs), ("w",), quantizable=True)
        x = np.random.default_rng(inputs).standard_normal((39, heads, inputs)).astype(np.float32)
        op = OneOp([x], lambda b, v, s=spec: b.linear_by_head(v, s))
        found = op.native(isa, format, threads=2)
        expected = op.reference(format, rounded=rounds_to_bf16(isa, format))
        if format in ("int8", "int4") and isa != "portable":
            assert same_bits(found, expected), (heads, inputs)
        assert distance(found, expected) < 2e-6, (heads, inputs)
        for count in (1, 5, 17):
            op.lengths = (count,)
            assert same_bits(op.native(isa, format), found[:count]), count


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["q4_k", "q8_0", "act-order"])
def test_products_by_head_with_codes(kind: str, isa: str) -> None:
    """One matrix of codes: those of values are multiplied as they are, those of keys in bf16."""
    heads, plain, values, rank = 3, 20, 24, 64
    rows = {name: Rows(plain + values, (part,)) for name, part in (("k", (0, plain)), ("v", (plain, values)))}
    how = {"quantizable": True}
    of_keys = WeightSpec("k", (heads, rank, plain), ("kv_b",), rows=rows["k"], by_head="inputs", **how)
    of_values = WeightSpec("v", (heads, values, rank), ("kv_b",), rows=rows["v"], by_head="outputs", **how)
    b = Builder()
    x = b.embed(W, 19, heads * plain)
    out = b.linear_by_head(b.linear_by_head(b.slice(x, 0, (heads, plain)), of_keys), of_values)
    table = np.random.default_rng(1).standard_normal((19, heads * plain)).astype(np.float32)
    matrix = coded((heads * (plain + values), rank), **KINDS[kind])
    program, checkpoint = b.program(out), Mixed({"w.weight": table}, {"kv_b": matrix})
    found, expected = (
        computed(on(program, checkpoint, "f32"), 19) for on in (partial(on_native, isa=isa), on_reference)
    )
    errors = [distance(a, e) for a, e in zip(found, expected, strict=True)]
    if isa not in BF16_ISAS:
        assert sum(error > 1e-5 for error in errors) <= 2  # a number between the products rounds over
    assert max(errors) < 2e-2


def computed(paged: Paged, tokens: int) -> np.ndarray:
    return paged.prefill(paged.sequence(range(tokens))).reshape(tokens, -1)
