"""Storage kinds: exact definitions, parts, and bytes that planning can rely on."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.program.numerics import GROUP
from quire.program.program import WeightSpec
from quire.quantize.integers import Int4, Int8, pack, unpack
from quire.quantize.kinds import DTYPES, Dense, FloatStorage, to_float32
from quire.quantize.round_to_nearest import kind_of

SEEDS = st.integers(0, 2**32 - 1)
LEADING = st.sampled_from([(1,), (5,), (3, 4)])


def scales_of(rng: np.random.Generator, leading: tuple[int, ...], width: int) -> tuple[Any, Any]:
    """Block scales and channel scales by chance."""
    block = rng.integers(-127, 128, (*leading, -(-width // GROUP))).astype(np.int8)
    return block, rng.random(leading, np.float32)


def make_int8(seed: int, leading: tuple[int, ...], width: int) -> Int8:
    rng = np.random.default_rng(seed)
    values = rng.integers(-128, 128, (*leading, width)).astype(np.int8)
    return Int8(values, *scales_of(rng, leading, width))


def make_int4(seed: int, leading: tuple[int, ...], width: int) -> Int4:
    rng = np.random.default_rng(seed)
    return Int4(pack(rng.integers(0, 16, (*leading, width))), *scales_of(rng, leading, width), width)


def grouped() -> st.SearchStrategy[Int8 | Int4]:
    widths = st.integers(1, 200)
    return st.one_of(
        st.builds(make_int8, SEEDS, LEADING, widths), st.builds(make_int4, SEEDS, LEADING, widths)
    )


def weights() -> st.SearchStrategy[Dense | Int8 | Int4]:
    def dense(seed: int, leading: tuple[int, ...], width: int, name: str) -> Dense:
        return Dense(np.random.default_rng(seed).standard_normal((*leading, width)).astype(DTYPES[name]))

    names = st.sampled_from(["bf16", "f16", "f32"])
    return st.one_of(grouped(), st.builds(dense, SEEDS, LEADING, st.integers(1, 99), names))


@given(SEEDS, LEADING, st.integers(1, 70))
def test_pack_then_unpack_is_the_identity(seed: int, leading: tuple[int, ...], width: int) -> None:
    q = np.random.default_rng(seed).integers(0, 16, (*leading, width)).astype(np.uint8)
    assert pack(q).shape == (*leading, (width + 1) // 2)
    np.testing.assert_array_equal(unpack(pack(q), width), q)


def test_packing_puts_the_even_input_in_the_low_half() -> None:
    assert pack(np.array([[1, 2, 15]])).tolist() == [[0x21, 0x0F]]


@given(weights())
def test_planned_bytes_are_the_real_bytes(weight: Dense | Int8 | Int4) -> None:
    assert weight.storage.nbytes(weight.shape) == weight.nbytes


@given(weights(), st.integers(0, 2), st.integers(1, 3))
def test_every_nth_output_of_dense_is_dense_of_it(weight: Dense | Int8 | Int4, first: int, step: int) -> None:
    dense = weight.dense()
    assert dense.dtype == np.float32
    assert dense.shape == weight.shape
    part = weight.outputs(slice(first, None, step))
    np.testing.assert_array_equal(part.dense(), dense[..., first::step, :])
    assert part.storage.nbytes(part.shape) == part.nbytes


@given(weights(), st.integers(1, 3))
def test_a_stack_is_of_equal_parts(weight: Dense | Int8 | Int4, count: int) -> None:
    stacked = type(weight).stack([weight] * count)
    expected = weight.dense() if count == 1 else np.stack([weight.dense()] * count)
    np.testing.assert_array_equal(stacked.dense(), expected)


@given(weights(), st.data())
def test_rows_of_dense_are_dense_rows(weight: Dense | Int8 | Int4, data: st.DataObject) -> None:
    if len(weight.shape) != 2:
        return
    ids = np.array(data.draw(st.lists(st.integers(0, weight.shape[0] - 1), max_size=4)), dtype=np.int64)
    np.testing.assert_array_equal(weight.rows(ids), weight.dense()[ids])


@given(grouped())
@settings(max_examples=50)
def test_dense_is_the_written_formula(weight: Int8 | Int4) -> None:
    """Against a loop over single numbers, in the order that the class documents."""
    flat = weight.dense().reshape(-1, weight.shape[-1])
    q = weight.values if isinstance(weight, Int8) else unpack(weight.packed, weight.width)
    zero = np.float32(0 if isinstance(weight, Int8) else 8)
    q = q.reshape(flat.shape).astype(np.float32)
    scales = weight.scales.reshape(len(flat), -1).astype(np.float32)
    channels = weight.channel_scales.reshape(-1)
    for row in {0, len(flat) - 1}:
        for i in range(flat.shape[1]):
            assert flat[row, i] == (channels[row] * scales[row, i // 32]) * (q[row, i] - zero)


def test_bf16_becomes_float32_exactly_for_every_bit_pattern() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    ours = to_float32(patterns)
    with np.errstate(invalid="ignore"):
        theirs = patterns.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    number = ~np.isnan(theirs)
    np.testing.assert_array_equal(ours[number].view(np.uint32), theirs[number].view(np.uint32))


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    values, packed = np.zeros((2, 64), np.int8), np.zeros((2, 32), np.uint8)
    scales, channels = np.zeros((2, 2), np.int8), np.zeros(2, np.float32)
    for wrong in (
        lambda: Dense(np.zeros(3, np.float64)),
        lambda: Dense(np.zeros(3, np.uint8)),
        lambda: Int8(values.astype(np.int16), scales, channels),
        lambda: Int8(values, scales[:, :1], channels),
        lambda: Int8(values, scales.astype(np.float16), channels),
        lambda: Int8(values, scales, channels[:1]),
        lambda: Int8(values, scales, channels.astype(np.float64)),
        lambda: Int4(packed.astype(np.int8), scales, channels, 64),
        lambda: Int4(packed, scales, channels, 62),
    ):
        with pytest.raises(ValueError, match=r".+"):
            wrong()
    for weight in (make_int8(0, (4,), 80), make_int4(0, (4,), 80)):
        with pytest.raises(ValueError, match="along the inputs"):
            weight.transposed()
        with pytest.raises(ValueError, match="axis -1"):
            weight.outputs(slice(0, None, 2), -1)


def test_storage_for_planning() -> None:
    spec = WeightSpec("w", (6, 4096), ("w",), quantizable=True)
    schemes = (None, 16, 0), ("int8", 8.25, 32), ("int4", 4.25, 32)
    for scheme, bits_per_weight, bits_per_output in schemes:
        bits = bits_per_weight * spec.size + bits_per_output * 6
        assert kind_of(spec, FloatStorage("bf16"), scheme).nbytes(spec.shape) * 8 == bits
    assert str(kind_of(spec, FloatStorage("bf16"), "int4")) == "int4 (groups of 32, 8-bit scales)"
    norm = WeightSpec("n", (4096,), ("n",))
    assert str(kind_of(norm, FloatStorage("f32"), "int4")) == "f32"
    with pytest.raises(ValueError, match="int5"):
        kind_of(spec, FloatStorage("bf16"), "int5")
