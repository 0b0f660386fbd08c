"""Attention of the native backend against its reference twin, on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
from lowered import BF16_ISAS, ISAS, OneOp, distance, in_used_blocks, on_native, on_reference
from test_attention import Shape
from tiny import Paged, batch_of, same_bits

from quire.program import Builder, Names, Value
from quire.program.rope import Rope

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
    Shape(heads=2, dim=80, scale=0.1),
    Shape(scale=0.01, softcap=3.0, sinks=True, window=33),
    Shape(heads=70, groups=1, dim=4),
    Shape(value_dim=3),
    Shape(window=50, chunked=True),
    Shape(dim=5, value_dim=40, window=20, sinks=True),
]


def draw(shape: Shape, tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Queries, keys and values of all tokens."""
    rng = np.random.default_rng(seed)
    key, value = shape.dims
    sizes = ((shape.heads, key), (shape.groups, key), (shape.groups, value))
    return [2 * rng.standard_normal((tokens, *size)).astype(np.float32) for size in sizes]


def attention(shape: Shape, inputs: list[np.ndarray], lengths: tuple[int, ...] = LENGTHS) -> OneOp:
    def record(b: Builder, q: Value, k: Value, v: Value) -> Value:
        sinks = Names("s") if shape.sinks else None
        how = {"scale": shape.scale, "softcap": shape.softcap, "sinks": sinks}
        return b.attention(q, k, v, window=shape.window, chunked=shape.chunked, **how)

    return OneOp(inputs, record, lengths)


@pytest.mark.parametrize("isa", ISAS)
def test_a_layer_that_reads_the_cache_of_another(isa: str) -> None:
    """Its queries see what those of that layer do, in heads as wide as any model has."""
    for shape in (Shape(window=70), Shape(heads=8, groups=1, dim=512)):
        inputs = draw(shape, sum(LENGTHS))
        alone = attention(shape, inputs).native(isa)

        def record(b: Builder, q: Value, k: Value, v: Value, of: Shape = shape) -> Value:
            b.attention(b.scale(q, 3.0), k, v, window=of.window)
            return b.shared_attention(q, 0, scale=of.dim**-0.5)

        assert same_bits(OneOp(inputs, record, LENGTHS).native(isa), alone), shape


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
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (600, False), (530, True)])
def test_a_context_of_several_segments(isa: str, window: int | None, chunked: bool) -> None:
    shape = Shape(heads=2, groups=1, window=window, sinks=True, chunked=chunked)
    op = attention(shape, draw(shape, 1100), (1100,))
    whole = op.native(isa)
    assert distance(whole, op.reference()) < CLOSE
    assert same_bits(op.native(isa, threads=3), whole)


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
@pytest.mark.parametrize("dim", [5, 16])
def test_nothing_beside_the_context_is_read(window: int | None, dtype: str, dim: int, isa: str) -> None:
    """A sequence in blocks that held infinities and NaN has the bits it has in blocks never used.

    A few rows take blocks of 16 positions of whole vectors as they are stored; others are laid out.
    """
    shape = Shape(window=window, dim=dim)
    inputs = draw(shape, 150)
    for x in inputs:
        x[:80] = np.nan
    results = in_used_blocks(attention(shape, inputs, (150,)), dtype, isa, (50, 18, 1, 1))
    assert np.isfinite(results[0]).all()
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 20, 600])
def test_tokens_of_an_image_see_each_other(window: int | None, dtype: str, isa: str) -> None:
    """In any chunks that divide no image, with any threads."""
    shape, length, images = Shape(window=window, sinks=True, dim=5), 700, ((30, 600), (600, 603), (640, 690))
    op = attention(shape, draw(shape, length), (length,))

    def run(paged: Paged, *chunks: int) -> np.ndarray:
        sequence = paged.sequence(range(length))
        sequence.images = images
        return paged.prefill(sequence, chunks)

    how = {"kv_cache_dtype": dtype, "num_blocks": 100}
    whole = run(on_native(op.program, op.checkpoint(), "f32", isa, **how))
    expected = run(on_reference(op.program, op.checkpoint(), "f32", **how))
    assert distance(whole, expected) < (3e-2 if dtype == "bfloat16" and isa in BF16_ISAS else CLOSE)
    assert not np.allclose(whole, op.native(isa, **how))
    for threads in (1, 3):
        paged = on_native(op.program, op.checkpoint(), "f32", isa, threads=threads, **how)
        assert same_bits(run(paged), whole)
        assert same_bits(run(paged, 7, 23, 570, 3, 1, 36, 50, 2), whole)


@pytest.mark.parametrize("isa", ISAS)
def test_a_cache_read_by_some_rows(isa: str) -> None:
    """Rows that need logits, apart and adjacent, of several sequences: with the bits of all rows."""
    shape = Shape(window=70)
    inputs = draw(shape, sum(LENGTHS))

    def record(b: Builder, q: Value, k: Value, v: Value) -> Value:
        b.attention(q, k, v, window=shape.window)
        return b.shared_attention(b.rotary(b.sampled_rows(q), Rope(8, 100.0)), 0, scale=0.3)

    op = OneOp(inputs, record, LENGTHS)
    some = np.array([0, 80, 81, 149, 150, 151, 214, 299])
    for threads in (1, 2):
        paged = on_native(op.program, op.checkpoint(), "f32", isa, threads=threads)
        ends = np.cumsum(LENGTHS)
        tokens = zip(ends - LENGTHS, ends, strict=True)
        rows = [(paged.sequence(range(first, last)), last - first) for first, last in tokens]
        whole, part = (
            np.array(paged.backend.execute(batch_of(rows, paged.block_size, logits, paged.ids)))
            for logits in (None, some)
        )
        assert same_bits(part, whole[some])
        assert distance(whole.reshape(len(whole), -1), op.reference()) < CLOSE
