"""Round-to-nearest against plain Q8_0 and Q4_0, and what it must refuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.program.program import WeightSpec
from quire.quantize.kinds import Int4, Int8, unpack
from quire.quantize.round_to_nearest import kind_of, quantize

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def spec_of(array: np.ndarray, sources: tuple[str, ...] = ("w",)) -> WeightSpec:
    return WeightSpec("w", tuple(array.shape), sources, quantizable=True)


def q8_0(x: np.ndarray) -> np.ndarray:
    """ggml's quantize_row_q8_0_ref and back: groups [n, 32] float32."""
    d = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    scaled = x * inverse
    q = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    return q * d.astype(np.float16).astype(np.float32)


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


@CASES
@settings(max_examples=60, deadline=None)
def test_int8_is_nowhere_worse_than_q8_0(
    seed: int, shape: tuple[int, int], spread: float, dtype: type
) -> None:
    array = weights(seed, shape, spread, dtype)
    x = array.astype(np.float32)
    weight = quantize(spec_of(array), array, "int8")
    assert isinstance(weight, Int8)
    ours, theirs = np.abs(weight.dense() - x), np.abs(q8_0(x.reshape(-1, 32)).reshape(shape) - x)
    # The last term is the rounding of float32 itself, which can go either way.
    assert (ours <= theirs + np.abs(x) * 2.0**-22).all()
    step = np.abs(x.reshape(-1, 32)).max(-1).repeat(32).reshape(shape) / 127
    assert (ours <= step * 0.57 + 2.0**-24 * 127).all()
    assert np.abs(weight.values.astype(int)).max() <= 127


@CASES
@settings(max_examples=60, deadline=None)
def test_no_int4_group_is_worse_than_q4_0(
    seed: int, shape: tuple[int, int], spread: float, dtype: type
) -> None:
    array = weights(seed, shape, spread, dtype)
    x = array.astype(np.float32).reshape(-1, 32)
    weight = quantize(spec_of(array), array, "int4")
    assert isinstance(weight, Int4)
    ours = ((weight.dense().reshape(-1, 32).astype(np.float64) - x) ** 2).sum(-1)
    theirs = ((q4_0(x).astype(np.float64) - x) ** 2).sum(-1)
    assert (ours <= theirs * (1 + 1e-5)).all()


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
    assert (ours <= ((q4_0(x) - x) ** 2).sum(-1)).all()


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 172, 4096])
def test_any_row_length(scheme: str, width: int) -> None:
    array = weights(1, (7, width), 0.0, np.float32)
    spec = spec_of(array)
    weight = quantize(spec, array, scheme)
    assert weight.shape == (7, width)
    storage = kind_of(spec, "f32", scheme)
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
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
def test_numbers_that_have_no_scale_are_refused(scheme: str, bad: float) -> None:
    array = np.ones((2, 4, 64), np.float32)
    array[1, 3, 5] = bad
    spec = spec_of(array, ("experts.0.w", "experts.1.w"))
    with pytest.raises(ConfigError, match=r"experts\.1\.w.* cannot be quantized"):
        quantize(spec, list(array), scheme)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_zeros_and_numbers_too_small_for_a_scale_become_zero(scheme: str) -> None:
    array = np.zeros((2, 64), np.float32)
    array[1] = 1e-12
    assert not quantize(spec_of(array), array, scheme).dense().any()


def test_a_scale_that_f16_holds_badly_does_not_overflow_the_values() -> None:
    """Near the smallest f16 a scale is rounded by a third: 127 of it do not reach the largest number."""
    array = np.full((1, 32), -127 * 1.4 * 2.0**-24, np.float32)
    weight = quantize(spec_of(array), array, "int8")
    assert isinstance(weight, Int8)
    assert (weight.values == -127).all()


def test_integers_that_fit_are_kept_exactly() -> None:
    rng = np.random.default_rng(3)
    eight = rng.integers(-127, 128, (4, 96)).astype(np.float32)
    eight[:, ::32] = 127
    np.testing.assert_array_equal(quantize(spec_of(eight), eight, "int8").dense(), eight)
    four = rng.integers(-8, 8, (4, 96)).astype(np.float32)
    four[:, ::32] = -8
    weight = quantize(spec_of(four), four, "int4")
    assert isinstance(weight, Int4)
    np.testing.assert_array_equal(weight.dense(), four)
    assert unpack(weight.packed, 96).max() <= 15
