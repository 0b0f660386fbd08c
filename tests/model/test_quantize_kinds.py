"""Storage kinds: exact definitions, cuts, and bytes that planning can rely on."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.program.program import WeightSpec
from quire.quantize.groups import GroupStorage
from quire.quantize.integers import Int4, Int8, pack, unpack
from quire.quantize.kinds import DTYPES, Dense, FloatStorage, to_float32
from quire.quantize.round_to_nearest import kind_of

SEEDS = st.integers(0, 2**32 - 1)
LEADING = st.sampled_from([(1,), (5,), (3, 4)])


def make_int8(seed: int, leading: tuple[int, ...], width: int, group: int, scale: str = "f16") -> Int8:
    rng = np.random.default_rng(seed)
    values = rng.integers(-128, 128, (*leading, width)).astype(np.int8)
    return Int8(values, *two_levels(rng, leading, -(-width // group), group, scale))


def two_levels(rng: Any, leading: tuple[int, ...], groups: int, group: int, scale: str) -> tuple[Any, ...]:
    """(scales, group size, scales of the outputs), the last of them only with 8-bit scales."""
    if scale == "i8":
        codes = rng.integers(-127, 128, (*leading, groups)).astype(np.int8)
        return codes, group, rng.random(leading, np.float32)
    return rng.standard_normal((*leading, groups)).astype(DTYPES[scale]), group, None


def make_int4(
    seed: int, leading: tuple[int, ...], width: int, group: int, offset: str = "", scale: str = "f16"
) -> Int4:
    rng = np.random.default_rng(seed)
    packed = pack(rng.integers(0, 16, (*leading, width)))
    per_group = (*leading, -(-width // group))
    scales, _, channels = two_levels(rng, leading, per_group[-1], group, scale)
    if scale == "i8":
        return Int4(packed, scales, group, width, channel_scales=channels)
    if offset == "u8":
        return Int4(packed, scales, group, width, zeros=rng.integers(0, 17, per_group).astype(np.uint8))
    minimums = rng.standard_normal(per_group).astype(DTYPES[offset]) if offset else None
    return Int4(packed, scales, group, width, minimums=minimums)


@st.composite
def grouped(draw: st.DrawFn) -> Int8 | Int4:
    seed, leading = draw(SEEDS), draw(LEADING)
    width, group = draw(st.integers(1, 200)), draw(st.sampled_from([32, 64, 128, 256]))
    scale = draw(st.sampled_from(["i8", "f16", "f32"]))
    if draw(st.booleans()):
        return make_int8(seed, leading, width, group, scale)
    return make_int4(seed, leading, width, group, draw(st.sampled_from(["", "u8", "f16", "f32"])), scale)


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


@given(weights(), st.data())
def test_a_cut_of_dense_is_dense_of_the_cut(weight: Dense | Int8 | Int4, data: st.DataObject) -> None:
    dense = weight.dense()
    assert dense.dtype == np.float32
    assert dense.shape == weight.shape
    rows = dense.shape[-2] if dense.ndim > 1 else 1
    start, stop = sorted([data.draw(st.integers(0, rows)), data.draw(st.integers(0, rows))])
    if dense.ndim > 1:
        np.testing.assert_array_equal(weight.slice(-2, start, stop).dense(), dense[..., start:stop, :])
    step = getattr(weight, "group_size", 1)
    start = data.draw(st.sampled_from(range(0, dense.shape[-1], step)))
    stop = data.draw(st.sampled_from([*range(start, dense.shape[-1], step), dense.shape[-1]]))
    part = weight.slice(-1, start, stop)
    np.testing.assert_array_equal(part.dense(), dense[..., start:stop])
    assert part.storage.nbytes(part.shape) == part.nbytes


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
    q = q.reshape(flat.shape).astype(np.float32)
    per_row = (len(flat), -1)
    scales = weight.scales.reshape(per_row).astype(np.float32)
    if weight.channel_scales is not None:
        scales = weight.channel_scales.reshape(per_row) * scales
    minimums = getattr(weight, "minimums", None)
    zeros = getattr(weight, "zeros", None)
    for row in {0, len(flat) - 1}:
        for i in range(flat.shape[1]):
            g = i // weight.group_size
            if isinstance(weight, Int8):
                expected = scales[row, g] * q[row, i]
            elif minimums is not None:
                expected = scales[row, g] * q[row, i] + np.float32(minimums.reshape(per_row)[row, g])
            elif zeros is not None:
                expected = scales[row, g] * (q[row, i] - np.float32(zeros.reshape(per_row)[row, g]))
            else:
                expected = scales[row, g] * (q[row, i] - np.float32(8))
            assert flat[row, i] == expected


def test_bf16_becomes_float32_exactly_for_every_bit_pattern() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    ours = to_float32(patterns)
    with np.errstate(invalid="ignore"):
        theirs = patterns.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    number = ~np.isnan(theirs)
    np.testing.assert_array_equal(ours[number].view(np.uint32), theirs[number].view(np.uint32))


def test_cuts_through_a_group_are_refused() -> None:
    for weight in (make_int8(0, (4,), 80, 32), make_int4(0, (4,), 80, 32)):
        for start, stop in ((1, 32), (0, 33), (0, 79), (16, 80), (-32, 32), (32, 0), (0, 96)):
            with pytest.raises(ValueError, match="cut"):
                weight.slice(-1, start, stop)
        with pytest.raises(ValueError, match="outside"):
            weight.slice(-2, 0, 5)
        assert weight.slice(-1, 64, 80).shape == (4, 16)


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    values, packed = np.zeros((2, 64), np.int8), np.zeros((2, 32), np.uint8)
    scales = np.ones((2, 2), np.float16)
    zeros, minimums = np.zeros((2, 2), np.uint8), np.zeros((2, 2), np.float32)
    codes, channels = np.zeros((2, 2), np.int8), np.zeros(2, np.float32)
    for wrong in (
        lambda: Dense(np.zeros(3, np.float64)),
        lambda: Dense(np.zeros(3, np.uint8)),
        lambda: Int8(values.astype(np.int16), scales, 32),
        lambda: Int8(values, scales[:, :1], 32),
        lambda: Int8(values, scales.astype(np.float64), 32),
        lambda: Int8(values, scales, 0),
        lambda: Int8(values, codes, 32),
        lambda: Int8(values, scales, 32, channels),
        lambda: Int8(values, codes, 32, channels[:1]),
        lambda: Int8(values, codes, 32, channels.astype(np.float64)),
        lambda: Int4(packed, codes, 32, 64),
        lambda: Int4(packed, codes, 32, 64, zeros=zeros, channel_scales=channels),
        lambda: Int4(packed, scales, 32, 62),
        lambda: Int4(packed, scales, 31, 64),
        lambda: Int4(packed, scales, 32, 64, minimums, zeros),
        lambda: Int4(packed, scales, 32, 64, minimums=minimums[:1]),
        lambda: Int4(packed, scales, 32, 64, zeros=minimums),
    ):
        with pytest.raises(ValueError, match=r".+"):
            wrong()


def test_storage_for_planning() -> None:
    spec = WeightSpec("w", (6, 4096), ("w",), quantizable=True)
    schemes = (None, 16, 0), ("int8", 8.25, 32), ("int4", 4.25, 32)
    for scheme, bits_per_weight, bits_per_output in schemes:
        bits = bits_per_weight * spec.size + bits_per_output * 6
        assert kind_of(spec, FloatStorage("bf16"), scheme).nbytes(spec.shape) * 8 == bits
    assert str(kind_of(spec, FloatStorage("bf16"), "int4")) == "int4 (groups of 32, 8-bit scales)"
    assert str(GroupStorage("int8", 8, 32, "f16")) == "int8 (groups of 32, f16 scales)"
    norm = WeightSpec("n", (4096,), ("n",))
    assert str(kind_of(norm, FloatStorage("f32"), "int4")) == "f32"
    with pytest.raises(ValueError, match="int5"):
        kind_of(spec, FloatStorage("bf16"), "int5")


def test_other_formats_fit_without_loss() -> None:
    """GPTQ's scale * (q - zero) with zero points up to 16, and Q4_K's six-bit scales of scales."""
    rng = np.random.default_rng(5)
    gptq = make_int4(1, (8,), 256, 128, "u8")
    q = unpack(gptq.packed, 256).astype(np.float64).reshape(8, 2, 128)
    assert gptq.zeros is not None
    wide = gptq.scales.astype(np.float64)[..., None] * (q - gptq.zeros.astype(np.float64)[..., None])
    np.testing.assert_array_equal(gptq.dense(), wide.reshape(8, 256))

    d, dmin = rng.random((2, 8, 1)).astype(np.float16).astype(np.float32)
    scales, minimums = d * rng.integers(0, 64, (8, 8)), -dmin * rng.integers(0, 64, (8, 8))
    packed = pack(rng.integers(0, 16, (8, 256)))
    q4_k = Int4(packed, scales.astype(np.float32), 32, 256, minimums=minimums.astype(np.float32))
    q = unpack(packed, 256).astype(np.float32).reshape(8, 8, 32)
    # y = d1 * q - m1, as ggml's dequantize_row_q4_K computes it
    expected = scales.astype(np.float32)[..., None] * q - (-minimums.astype(np.float32))[..., None]
    np.testing.assert_array_equal(q4_k.dense(), expected.reshape(8, 256))
