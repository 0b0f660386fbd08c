"""Attention of the native backend against its reference twin, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
from lowered import BF16_ISAS, ISAS, OneOp, distance, on_native
from test_attention import Shape
from tiny import same_bits

from quire.errors import ConfigError
from quire.program import Builder, Names, Value

LENGTHS = (150, 1, 65, 64, 20)
CLOSE = 3e-6


SHAPES = [
    Shape(),
    Shape(heads=3, groups=3, dim=5),
    Shape(heads=6, groups=1, dim=16),
    Shape(heads=1, groups=1, dim=1),
    Shape(heads=4, groups=4, dim=2, window=1),
    Shape(dim=33, window=7),
    Shape(heads=10, groups=2, dim=24, window=64),
    Shape(window=100, softcap=1.5),
    Shape(window=5000, sinks=True, dim=17),
    Shape(softcap=0.7),
    Shape(heads=6, sinks=True, window=9),
    Shape(heads=2, dim=80, scale=0.3),
    Shape(scale=0.01, softcap=3.0, sinks=True, window=33),
    Shape(heads=70, groups=1, dim=4),
]


def draw(shape: Shape, tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Queries, keys and values of all tokens."""
    rng = np.random.default_rng(seed)
    heads = (shape.heads, shape.groups, shape.groups)
    return [2 * rng.standard_normal((tokens, n, shape.dim)).astype(np.float32) for n in heads]


def attention(shape: Shape, inputs: list[np.ndarray], lengths: tuple[int, ...] = LENGTHS) -> OneOp:
    def record(b: Builder, q: Value, k: Value, v: Value) -> Value:
        sinks = Names("s") if shape.sinks else None
        how = {"scale": shape.scale, "window": shape.window, "softcap": shape.softcap}
        return b.attention(q, k, v, **how, sinks=sinks)

    return OneOp(inputs, record, lengths)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: Shape, isa: str) -> None:
    op = attention(shape, draw(shape, sum(LENGTHS)))
    for dtype in ("float32", "float16"):
        found = op.native(isa, kv_cache_dtype=dtype)
        assert distance(found, op.reference(kv_cache_dtype=dtype)) < CLOSE, dtype


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_a_bfloat16_cache(shape: Shape, isa: str) -> None:
    """Where the machine multiplies pairs of bfloat16, queries and weights are rounded to it as well."""
    op = attention(shape, draw(shape, sum(LENGTHS)))
    found, expected = op.native(isa, kv_cache_dtype="bfloat16"), op.reference(kv_cache_dtype="bfloat16")
    assert distance(found, expected) < (3e-2 if isa in BF16_ISAS else CLOSE)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_an_int8_cache(shape: Shape, isa: str) -> None:
    """Numbers of a token's head are kept as rint(x * (127 / amax)), with the scale amax / 127."""
    q, k, v = draw(shape, sum(LENGTHS))
    k[3], v[5] = 0, 0
    kept = []
    for x in (k, v):
        amax = np.abs(x).max(axis=-1, keepdims=True)
        inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
        kept.append(np.rint(x * inverse) * (amax / np.float32(127)))
    found = attention(shape, [q, k, v]).native(isa, kv_cache_dtype="int8")
    assert distance(found, attention(shape, [q, *kept]).reference()) < CLOSE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [None, 600])
def test_a_context_of_several_segments(isa: str, window: int | None) -> None:
    shape = Shape(heads=2, groups=1, window=window, sinks=True)
    op = attention(shape, draw(shape, 1100), (1100,))
    whole = op.native(isa)
    assert distance(whole, op.reference()) < CLOSE
    assert same_bits(op.native(isa, threads=3), whole)


def test_values_of_another_width_than_keys_are_refused() -> None:
    q, k, v = draw(Shape(), 5)
    with pytest.raises(ConfigError, match="beside values of 3"):
        attention(Shape(), [q, k, np.ascontiguousarray(v[..., :3])], (5,)).native(ISAS[-1])


@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_stay_finite(isa: str) -> None:
    shape = Shape(sinks=True)
    q, k, v = draw(shape, 80)
    assert np.isfinite(attention(shape, [q * 1e3, k * 1e3, v], (80,)).native(isa)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [Shape(), Shape(window=20), Shape(window=530, sinks=True)], ids=str)
def test_what_is_not_a_number_reaches_every_token_that_sees_it(shape: Shape, dtype: str, isa: str) -> None:
    """One NaN among the queries, keys or values; the first, in the middle, on either side of a segment."""
    tokens = 700 if shape.window == 530 else 90
    reach = shape.window or tokens
    for part, place in ((0, 30), (1, 0), (1, 30), (1, 63), (1, 64), (2, 0), (2, 30), (1, 511), (2, 512)):
        if place >= tokens:
            continue
        inputs = draw(shape, tokens)
        inputs[part][place, 0, 3] = np.nan
        out = attention(shape, inputs, (tokens,)).native(isa, kv_cache_dtype=dtype)
        lost = np.isnan(out.reshape(tokens, shape.heads, shape.dim)[:, 0]).any(axis=-1)
        seen = slice(place, place + 1) if part == 0 else slice(place, place + reach)
        assert lost[seen].all(), (part, place)
        assert not lost[:place].any(), (part, place)


# Not finite as the cache stores it; that of int8 would be the greatest float32 with its scale.
_BEYOND = {"float32": np.inf, "float16": 1e5, "bfloat16": 3.4e38, "int8": np.finfo(np.float32).max}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", _BEYOND)
@pytest.mark.parametrize("shape", [Shape(), Shape(dim=5, window=20), Shape(softcap=2.0, sinks=True)], ids=str)
def test_a_value_that_is_not_finite_reaches_those_who_see_it_alone(
    shape: Shape, dtype: str, isa: str
) -> None:
    """All else has the bits it had; also of the last position of a segment, which a window may see alone."""
    for tokens, place in ((90, 0), (90, 30), (90, 63), (90, 64), (540, 511)):
        clean = attention(shape, draw(shape, tokens), (tokens,)).native(isa, kv_cache_dtype=dtype)
        hit = np.zeros((tokens, shape.groups), bool)
        hit[place : place + (shape.window or tokens), 1] = True
        for value in (np.nan, _BEYOND[dtype]):
            inputs = draw(shape, tokens)
            inputs[2][place, 1, 3] = value
            out = attention(shape, inputs, (tokens,)).native(isa, kv_cache_dtype=dtype)
            out, expected = (x.reshape(*hit.shape, -1) for x in (out, clean))
            assert np.isnan(out[hit]).all(), (place, value)
            assert same_bits(out[~hit], expected[~hit]), (place, value)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [None, 20, 70])
def test_nothing_beside_the_context_is_read(window: int | None, dtype: str, isa: str) -> None:
    """A sequence in blocks that held infinities and NaN has the bits it has in blocks never used."""
    shape = Shape(window=window, dim=5)
    inputs = draw(shape, 150)
    for x in inputs:
        x[:80] = np.nan
    op = attention(shape, inputs, (150,))
    results = []
    for block_size, spoil in [(16, False), (8, True), (16, True), (64, True)]:
        how = {"kv_cache_dtype": dtype, "block_size": block_size, "num_blocks": 20}
        paged = on_native(op.program, op.checkpoint(), "f32", isa, **how)
        if spoil:
            before = paged.sequence(range(80))
            paged.step([(before, 80)])
            paged.free += before.blocks
        after = paged.sequence(range(80, 150))
        results.append(np.concatenate([*paged.step([(after, 50)]), *paged.step([(after, 20)])]))
    assert np.isfinite(results[0]).all()
    assert all(same_bits(result, results[0]) for result in results)
