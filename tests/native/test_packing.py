"""Packing against the reference quantizer: its bits on every instruction set, in the layout of kernels.h."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quire.backends.native import _core
from quire.program import numerics
from quire.program.program import WeightSpec
from quire.quantize.integers import Int8, unpack
from quire.quantize.kinds import DTYPES
from quire.quantize.round_to_nearest import FACTORS, GROUP, STEPS, quantize

TRIES = {"int8": list(map(float, STEPS)), "int4": list(map(float, FACTORS))}
SHAPES = [(1, 1), (16, 32), (17, 100), (40, 96), (33, 31), (64, 512)]
ZERO = {"int8": 128, "int4": 8}


@pytest.fixture(params=_core.isas())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def numbers(seed: int, shape: tuple[int, ...], spread: float, kind: str) -> np.ndarray:
    heavy = rng(seed).standard_normal(shape) * np.exp(rng(seed, 1).standard_normal(shape) * spread)
    return heavy.astype(DTYPES[kind])


def pack(array: np.ndarray, format: str, isa: str, cuts: tuple[int, ...] = ()) -> Any:
    """One matrix [out, in], its panels packed in as many calls as there are cuts, and one."""
    matrix = _core.Matrix(format, 1, *array.shape)
    bits = array if array.dtype == np.float32 else array.view(np.uint16)
    kind = next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
    edges = [0, *cuts, -(-array.shape[0] // 16)]
    for first, last in pairwise(edges):
        assert _core.pack(matrix, 0, bits, kind, TRIES.get(format, []), isa, first, last)
    return matrix


def floats_of(matrix: Any) -> np.ndarray:
    """A matrix that is not quantized, [out, in], as kernels.h says it lies."""
    _, outputs, inputs = matrix.shape
    panels, dtype, data = -(-outputs // 16), DTYPES[matrix.format], np.asarray(matrix.data)
    if matrix.format == "bf16":
        pairs = -(-inputs // 2)
        lain = data[: panels * pairs * 64].view(dtype).reshape(panels, pairs, 16, 2).transpose(0, 2, 1, 3)
    else:
        size = panels * inputs * 16 * dtype.itemsize
        lain = data[:size].view(dtype).reshape(panels, inputs, 16).transpose(0, 2, 1)
    return lain.reshape(panels * 16, -1)[:outputs, :inputs]


def integers_of(matrix: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(integers, block scales, channels) with all padding: [outputs, inputs], [.., groups], [..]."""
    _, outputs, inputs = matrix.shape
    panels, groups, data = -(-outputs // 16), -(-inputs // 32), np.asarray(matrix.data)
    if matrix.format == "int8":
        size = panels * groups * 512
        lain = data[:size].reshape(panels, groups * 8, 16, 4).transpose(0, 2, 1, 3)
    else:
        size = panels * groups * 256
        both = data[:size].reshape(panels, groups * 4, 16, 4)
        lain = np.stack([both & 15, both >> 4], axis=3).transpose(0, 2, 1, 3, 4)
    at = -(-size // 64) * 64
    block_scales = (
        data[at : at + panels * groups * 16].view(np.int8).reshape(panels, groups, 16).transpose(0, 2, 1)
    )
    at += -(-panels * groups * 16 // 64) * 64
    channels = data[at : at + panels * 64].view(np.float32)
    assert at + panels * 64 == matrix.nbytes
    return lain.reshape(panels * 16, -1), block_scales.reshape(panels * 16, -1), channels


def check_rounded(array: np.ndarray, format: str, isa: str, cuts: tuple[int, ...] = ()) -> None:
    outputs, inputs = array.shape
    expected = quantize(WeightSpec("w", array.shape, ("w",), quantizable=True), array, format)
    stored, block_scales, channels = integers_of(pack(array, format, isa, cuts))
    if isinstance(expected, Int8):
        q = expected.values.astype(np.int32) + 128
    else:
        q = unpack(expected.packed, inputs).astype(np.int32)
    np.testing.assert_array_equal(stored[:outputs, :inputs], q)
    np.testing.assert_array_equal(block_scales[:outputs], expected.scales)
    assert channels[:outputs].tobytes() == np.asarray(expected.channel_scales).tobytes()
    assert (stored[outputs:] == ZERO[format]).all()
    assert (stored[:, inputs:] == ZERO[format]).all()
    assert not block_scales[outputs:].any()
    assert not channels[outputs:].any()


def views(seed: int, shape: tuple[int, int], spread: float, kind: str) -> Iterator[np.ndarray]:
    """The same shape in every order that checkpoints have: plain, transposed, every other row, both."""
    wide = numbers(seed, (2 * shape[0], 2 * shape[1]), spread, kind)
    plain = wide[: shape[0], : shape[1]]
    yield np.ascontiguousarray(plain)
    yield plain
    yield np.ascontiguousarray(plain.T).T
    yield wide[1::2, : shape[1]]
    yield np.ascontiguousarray(wide[:, : shape[1]].T).T[::2]
    yield wide[: shape[0], ::2]


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_view_has_the_bits_of_the_reference(isa: str, shape: tuple[int, int], kind: str) -> None:
    for seed, spread in enumerate((0.0, 0.5, 2.0)):
        for array in views(seed, shape, spread, kind):
            for format in ("int8", "int4"):
                check_rounded(array, format, isa)
            for format in (kind, "f32"):
                found = floats_of(pack(array, format, isa))
                assert found.dtype == DTYPES[format]
                assert found.tobytes() == array.astype(DTYPES[format]).tobytes()


ENDS = {
    "nothing": np.zeros((3, 40), np.float32),
    "negative nothing": -np.zeros((2, 64), np.float32),
    "a group of the smallest": np.repeat(np.array([[1, 1e-44]], np.float32), 32, axis=1),
    "integers": rng(4).integers(-8, 9, (8, 64)).astype(np.float32),
    "zeros within": np.pad(numbers(6, (4, 64), 0.0, "f32"), ((0, 0), (32, 0))),
    "tiny": numbers(7, (8, 96), 1.0, "f32") * np.float32(1e-34),
    "smaller than any": numbers(7, (8, 96), 1.0, "f32") * np.float32(1e-40),
    "huge": np.float32(1e38) * np.clip(numbers(8, (8, 40), 0.0, "f32"), -3, 3),
    "both signs": np.tile(np.array([[1, -1, 0.5, -0.5]], np.float32), (20, 16)),
    "groups apart": (10.0 ** -np.arange(9).repeat(32) * numbers(5, (4, 288), 0.0, "f32")).astype(np.float32),
    "heavy": numbers(2, (200, 320), 2.0, "f32"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_the_range(isa: str, name: str) -> None:
    for format in ("int8", "int4"):
        check_rounded(ENDS[name], format, isa)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_every_pattern_of_16_bits(isa: str, kind: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16).view(DTYPES[kind])
    with np.errstate(invalid="ignore"):  # of signaling NaNs, which ARM reports
        finite = patterns[np.isfinite(patterns.astype(np.float32))]
    array = finite[: len(finite) // 64 * 64].reshape(-1, 64)
    assert floats_of(pack(array, kind, isa)).tobytes() == array.tobytes()
    assert floats_of(pack(array, "f32", isa)).tobytes() == array.astype(np.float32).tobytes()
    for format in ("int8", "int4"):
        check_rounded(array, format, isa)


def test_panels_are_independent(isa: str) -> None:
    """However threads share them, the bytes are the same."""
    array = numbers(0, (100, 70), 0.5, "bf16")
    for format in ("int8", "int4", "bf16"):
        whole = np.asarray(pack(array, format, isa).data)
        assert np.asarray(pack(array, format, isa, (1, 2, 6)).data).tobytes() == whole.tobytes()


@pytest.mark.parametrize("what", [np.inf, -np.inf, np.nan, -np.nan])
def test_what_is_not_finite_is_not_rounded(isa: str, what: float) -> None:
    array = np.ones((20, 50), np.float32)
    array[19, 49] = what
    for format in ("int8", "int4"):
        matrix = _core.Matrix(format, 1, 20, 50)
        assert _core.pack(matrix, 0, array, "f32", [1.0], isa, 0, 1)
        assert not _core.pack(matrix, 0, array, "f32", [1.0], isa, 1, 2)
    assert np.array_equal(floats_of(pack(array, "f32", isa)), array, equal_nan=True)


@pytest.mark.parametrize("format", ["f32", "f16", "bf16", "int8", "int4"])
def test_bytes_are_known_beforehand(format: str) -> None:
    for count, outputs, inputs in [(1, 1, 1), (3, 17, 33), (2, 16, 32), (1, 100, 101), (4, 5, 64)]:
        nbytes = _core.Matrix(format, count, outputs, inputs).nbytes
        assert nbytes == _core.packed_bytes(format, count, outputs, inputs)
        assert nbytes % _core.ALIGNMENT == 0


def test_the_reference_counts_in_the_units_of_the_core() -> None:
    assert (_core.GROUP, _core.SPAN) == (numerics.GROUP, numerics.SPAN)
    assert _core.GROUP == GROUP


def test_experts_lie_one_after_the_other(isa: str) -> None:
    arrays = numbers(0, (3, 20, 40), 0.0, "f32")
    together = _core.Matrix("int8", 3, 20, 40)
    for expert in (2, 0, 1):
        assert _core.pack(together, expert, arrays[expert], "f32", TRIES["int8"], isa, 0, 2)
    alone = b"".join(np.asarray(pack(array, "int8", isa).data).tobytes() for array in arrays)
    assert np.asarray(together.data).tobytes() == alone


def test_bytes_can_be_mapped_again() -> None:
    matrix = pack(numbers(0, (20, 40), 0.0, "f32"), "int8", _core.isas()[0])
    room = np.zeros(matrix.nbytes + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :][: matrix.nbytes]
    room[:] = np.asarray(matrix.data)
    again = _core.Matrix.mapped("int8", 1, 20, 40, room)
    assert (again.format, tuple(again.shape), again.nbytes) == ("int8", (1, 20, 40), matrix.nbytes)
    assert np.asarray(again.data).ctypes.data == room.ctypes.data  # not copied
    with pytest.raises(ValueError, match="size"):
        _core.Matrix.mapped("int8", 1, 20, 41 + 32, room)
    with pytest.raises(ValueError, match="aligned"):
        _core.Matrix.mapped("int4", 1, 16, 32, np.concatenate([room, room])[4:][: 256 + 64 + 64])


def test_what_cannot_be_packed_is_refused() -> None:
    array, isa = np.zeros((20, 40), np.float32), _core.isas()[0]
    matrix = _core.Matrix("int4", 1, 20, 40)
    half = array.astype(ml_dtypes.bfloat16).view(np.uint16)
    cases: list[tuple[Any, ...]] = [
        (matrix, 1, array, "f32", [1.0], isa, 0, 2),
        (matrix, 0, array[1:], "f32", [1.0], isa, 0, 1),
        (matrix, 0, array, "bf16", [1.0], isa, 0, 2),
        (matrix, 0, half, "f32", [1.0], isa, 0, 2),
        (matrix, 0, array, "int4", [1.0], isa, 0, 2),
        (matrix, 0, array, "f32", [], isa, 0, 2),
        (matrix, 0, array, "f32", [1.0], "quantum", 0, 2),
        (matrix, 0, array, "f32", [1.0], isa, 0, 3),
        (matrix, 0, array, "f32", [1.0], isa, -1, 2),
        (_core.Matrix("f16", 1, 20, 40), 0, array, "f32", [1.0], isa, 0, 2),
    ]
    for case in cases:
        with pytest.raises((ValueError, TypeError)):
            _core.pack(*case)
    with pytest.raises(ValueError, match="format"):
        _core.Matrix("int3", 1, 1, 1)
    with pytest.raises(ValueError, match="at least one"):
        _core.Matrix("int4", 1, 0, 1)


def test_a_checksum_knows_every_bit_and_the_length() -> None:
    data = rng(0).integers(0, 256, 1000, dtype=np.uint8)
    seen = {_core.checksum(data[:size]) for size in range(1, 200)}
    for bit in range(8 * 200):
        changed = data.copy()
        changed[bit // 8] ^= np.uint8(1 << bit % 8)
        seen.add(_core.checksum(changed))
    assert len(seen) == 199 + 1600
    assert _core.checksum(np.zeros(64, np.uint8)) != _core.checksum(np.zeros(128, np.uint8))
