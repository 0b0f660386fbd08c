"""Round-to-nearest against its definition, number by number, and against Q4_0; what it must refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.program.program import WeightSpec
from quire.quantize.integers import Int4, Int8, unpack
from quire.quantize.kinds import FloatStorage
from quire.quantize.round_to_nearest import FACTORS, STEPS, kind_of, quantize

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def spec_of(array: np.ndarray, sources: tuple[str, ...] = ("w",)) -> WeightSpec:
    return WeightSpec("w", tuple(array.shape), sources, quantizable=True)


F = np.float32


def inverse_of(scale: np.float32) -> np.float32:
    return F(0) if scale == 0 else F(1) / scale


def candidates8(group: np.ndarray, channel: np.float32) -> list[np.float32]:
    amax = max(abs(group))
    first = min(F(127), np.ceil((amax / F(127)) / channel))
    return [min(max(first + step, F(1)), F(127)) for step in STEPS]


def candidates4(group: np.ndarray, channel: np.float32) -> list[np.float32]:
    m = max(group, key=abs)
    block_scales = (np.rint((factor * (m / F(-8))) / channel) for factor in FACTORS)
    return [min(max(block_scale, F(-127)), F(127)) or F(1) for block_scale in block_scales]


def by_hand(row: np.ndarray, scheme: str) -> tuple[list[int], list[int], np.float32]:
    """(q, block_scales, channel) of one row, one number after the other, as the definition has it."""
    candidates_of, most, low, high = (
        (candidates8, 127, -127, 127) if scheme == "int8" else (candidates4, 7, -8, 7)
    )
    channel = F(F(max(abs(row))) / F(most)) / F(127)
    channel = channel if channel >= F(2.0**-126) else F(0)
    values, block_scales = [], []
    for group in (row[i : i + 32] for i in range(0, len(row), 32)):
        tried = []
        for block_scale in candidates_of(group, channel) if channel and group.any() else [F(0)]:
            scale, error = channel * block_scale, F(0)
            inverse = inverse_of(scale)
            q = [min(max(np.rint(w * inverse), F(low)), F(high)) for w in group]
            for w, integer in zip(group, q, strict=True):
                rest = w - scale * integer
                error = error + rest * rest
            tried.append((error, int(block_scale), q))
        _, block_scale, q = min(tried, key=lambda entry: entry[0])  # the first of equals
        values += [int(integer) for integer in q]
        block_scales.append(block_scale)
    return values, block_scales, channel


def q4_0(x: np.ndarray) -> np.ndarray:
    """ggml's quantize_row_q4_0_ref and back: groups [n, 32] float32."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[:, None], -1)
    d = largest / np.float32(-8)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    q = np.minimum(15, np.trunc(x * inverse + np.float32(8.5)))
    return (q - 8) * d.astype(np.float16).astype(np.float32)


def weights(seed: int, shape: tuple[int, ...], spread: float, dtype: type) -> np.ndarray:
    rng = np.random.default_rng(seed)
    heavy = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) * spread)
    return heavy.astype(dtype)


CASES = given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 40), st.integers(1, 8).map(lambda g: 32 * g)),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from(DTYPES),
)


def mirrored(seed: int, rows: int) -> np.ndarray:
    """Every number with both signs: a scale and its negative lose the same, but for the order of the sum."""
    half = weights(seed, (rows, 16), 0.0, np.float32)
    return np.random.default_rng(seed).permuted(np.concatenate([half, -half], axis=1), axis=1)


ROWS = {
    "mirrored": mirrored(0, 60),
    "a group of the smallest": np.repeat(np.array([[1, 1e-44]], np.float32), 32, axis=1),
    "normal": weights(1, (8, 100), 0.0, np.float32),
    "heavy": weights(2, (8, 320), 2.0, np.float32),
    "bf16, full of ties": weights(3, (8, 64), 0.0, ml_dtypes.bfloat16).astype(np.float32),
    "integers": np.random.default_rng(4).integers(-8, 9, (8, 64)).astype(np.float32),
    "groups apart": np.float32(10.0) ** -np.arange(9).repeat(32)[None]
    * weights(5, (4, 288), 0.0, np.float32),
    "zeros within": np.pad(weights(6, (4, 64), 0.0, np.float32), ((0, 0), (32, 0))),
    "tiny": weights(7, (8, 96), 1.0, np.float32) * np.float32(1e-34),
    "smaller than any": weights(7, (8, 96), 1.0, np.float32) * np.float32(1e-40),
    "huge": np.float32(1e38) * np.clip(weights(8, (8, 40), 0.0, np.float32), -3, 3),
    "one input": weights(9, (8, 1), 0.0, np.float32),
}


@pytest.mark.parametrize("array", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_every_number_is_the_one_defined(scheme: str, array: np.ndarray) -> None:
    weight = quantize(spec_of(array), array, scheme)
    assert weight.channel_scales is not None
    q = weight.values if isinstance(weight, Int8) else unpack(weight.packed, weight.width).astype(int) - 8
    for row, numbers in enumerate(array):
        with np.errstate(over="ignore"):
            values, block_scales, channel = by_hand(numbers, scheme)
        assert weight.channel_scales[row].tobytes() == channel.tobytes()
        assert weight.scales[row].tolist() == block_scales
        assert q[row].tolist() == values


@CASES
@settings(max_examples=60, deadline=None)
def test_int8_rounds_to_the_nearest_step(
    seed: int, shape: tuple[int, int], spread: float, dtype: type
) -> None:
    """By groups never worse than the least step that takes the largest magnitude to 127 or less.

    That is at most one unit of the row's scale longer than the magnitude needs.
    """
    array = weights(seed, shape, spread, dtype)
    x = array.astype(np.float32)
    weight = quantize(spec_of(array), array, "int8")
    assert isinstance(weight, Int8)
    assert weight.channel_scales is not None
    groups = x.reshape(len(x), -1, 32).astype(np.float64)
    channel = weight.channel_scales[:, None].astype(np.float64)
    amax = np.abs(groups).max(-1)
    step = np.divide(amax, 127 * channel, out=np.zeros_like(amax), where=channel > 0)
    step = (np.ceil(step * (1 - 2.0**-20)) * channel)[..., None]
    plain = np.rint(np.divide(groups, step, out=np.zeros_like(groups), where=step > 0)) * step
    ours = np.linalg.norm(weight.dense().reshape(groups.shape) - groups, axis=-1)
    assert (ours <= np.linalg.norm(plain - groups, axis=-1) * (1 + 2.0**-10) + amax * 2.0**-18).all()
    assert (channel * weight.scales <= (amax / 127 + 4 * channel) * (1 + 2.0**-20)).all()


@CASES
@settings(max_examples=60, deadline=None)
def test_int4_is_hardly_anywhere_worse_than_q4_0(
    seed: int, shape: tuple[int, int], spread: float, dtype: type
) -> None:
    """By groups: what the 8-bit scale of a small group can lose is bounded by the row's own step."""
    array = weights(seed, shape, spread, dtype)
    x = array.astype(np.float32).reshape(-1, 32)
    weight = quantize(spec_of(array), array, "int4")
    assert weight.channel_scales is not None
    ours = np.sqrt(((weight.dense().reshape(-1, 32).astype(np.float64) - x) ** 2).sum(-1))
    theirs = np.sqrt(((q4_0(x).astype(np.float64) - x) ** 2).sum(-1))
    lost = weight.channel_scales.repeat(shape[1] // 32) * 0.5 * 8  # half a unit, eight steps from zero
    assert (ours <= theirs * (1 + 1e-5) + lost * np.sqrt(32)).all()


def test_int8_is_better_than_q8_0_where_it_matters() -> None:
    x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    ours = ((quantize(spec_of(x), x, "int8").dense() - x) ** 2).mean()
    groups = x.reshape(-1, 32)
    d = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    theirs = np.rint(groups / d) * d.astype(np.float16).astype(np.float32)
    assert ours < 0.92 * ((theirs - groups) ** 2).mean()


def test_int4_is_better_than_q4_0_where_it_matters() -> None:
    x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    ours = ((quantize(spec_of(x), x, "int4").dense() - x) ** 2).mean()
    theirs = ((q4_0(x.reshape(-1, 32)).reshape(x.shape) - x) ** 2).mean()
    assert ours < 0.93 * theirs


def test_both_signs_of_the_largest_magnitude() -> None:
    """Q4_0 takes the one that comes first; the other choice can be worse, and must not be taken then."""
    eighths = np.arange(-7, 8, dtype=np.float32) / 8
    x = np.concatenate([np.ones(16), [-1], eighths]).astype(np.float32)[None]
    x = np.concatenate([x, -x])  # exact but for one number, if the sign is that of the many
    ours = ((quantize(spec_of(x), x, "int4").dense() - x) ** 2).sum(-1)
    rounding = 1.02  # of the scale, to a multiple of one 111th
    assert (ours <= ((q4_0(x) - x) ** 2).sum(-1) * rounding).all()


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 172, 4096])
def test_any_row_length(scheme: str, width: int) -> None:
    array = weights(1, (7, width), 0.0, np.float32)
    spec = spec_of(array)
    weight = quantize(spec, array, scheme)
    assert weight.shape == (7, width)
    storage = kind_of(spec, FloatStorage("f32"), scheme)
    assert weight.storage == storage
    assert weight.nbytes == storage.nbytes(spec.shape)
    padded = np.pad(array, ((0, 0), (0, -width % 32)))
    whole = quantize(spec_of(padded), padded, scheme)
    np.testing.assert_array_equal(weight.dense(), whole.dense()[:, :width])


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_blocks_strides_experts_and_threads_change_nothing(scheme: str) -> None:
    array = weights(2, (3, 300, 512), 0.5, np.float32)  # several blocks of rows an expert
    spec = spec_of(array)
    whole = quantize(spec, array, scheme).dense()
    turned = np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)
    names = spec_of(array, ("a", "b", "c"))
    with ThreadPoolExecutor(3) as pool:
        np.testing.assert_array_equal(quantize(spec, array, scheme, pool.map).dense(), whole)
        np.testing.assert_array_equal(quantize(names, list(turned), scheme, pool.map).dense(), whole)
    for expert in range(3):
        one = quantize(spec_of(array[expert]), array[expert], scheme)
        np.testing.assert_array_equal(one.dense(), whole[expert])
    row = quantize(spec_of(array[0, 7:8]), array[0, 7:8], scheme)
    np.testing.assert_array_equal(row.dense(), whole[0, 7:8])


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_have_no_scale_are_refused(scheme: str, bad: float) -> None:
    array = np.ones((2, 4, 64), np.float32)
    array[1, 3, 5] = bad
    spec = spec_of(array, ("experts.0.w", "experts.1.w"))
    with pytest.raises(ConfigError, match=r"experts\.1\.w.* cannot be quantized"):
        quantize(spec, list(array), scheme)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_zeros_and_rows_too_small_for_a_scale_become_zero(scheme: str) -> None:
    array = np.zeros((3, 64), np.float32)
    array[1] = 1e-37
    array[2, 0] = 1e-12
    weight = quantize(spec_of(array), array, scheme)
    assert not weight.dense()[:2].any()
    assert weight.dense()[2, 0] == pytest.approx(1e-12, rel=0.01)
    assert not weight.dense()[2, 1:].any()


def test_integers_that_fit_are_kept() -> None:
    rng = np.random.default_rng(3)
    eight = rng.integers(-127, 128, (4, 96)).astype(np.float32)
    eight[:, ::32] = 127
    weight = quantize(spec_of(eight), eight, "int8")
    assert isinstance(weight, Int8)
    np.testing.assert_array_equal(weight.values, eight)
    np.testing.assert_allclose(weight.dense(), eight, rtol=1e-6)
    four = rng.integers(-8, 8, (4, 96)).astype(np.float32)
    four[:, ::32] = -8
    weight = quantize(spec_of(four), four, "int4")
    assert isinstance(weight, Int4)
    np.testing.assert_array_equal(unpack(weight.packed, 96), four + 8)
    np.testing.assert_allclose(weight.dense(), four, rtol=0.5 / 111)
