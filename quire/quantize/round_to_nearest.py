"""Round-to-nearest: weights to int8 or int4 while loading, from the weights alone.

Groups of 32 inputs with f16 scales: 8.5 and 4.5 bits a weight, as in GGUF's Q8_0 and Q4_0, and never
with a larger error than theirs. int8 takes the largest magnitude of a group to 127. int4 tries
a few scales around the one that takes the largest magnitude to -8, and keeps the one with the least
squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.program.program import WeightSpec
from quire.quantize.kinds import Array, Floats, Int4, Int8, Storage, pack, to_float32

GROUP_SIZE = 32

# Multiples of the scale that takes the largest magnitude to -8. The first alone is Q4_0; on normally
# distributed weights the next three take 9% off the squared error, and more of them nothing. The
# last matters where both signs have the largest magnitude: Q4_0 takes whichever comes first.
_FACTORS = (1.0, 0.95, 8 / 7, 0.9, -1.0)

_BLOCK = 1 << 16  # numbers worked on together: their temporaries stay in the second level cache

# Like the built-in map; a thread pool's map works on several blocks at once.
Mapper = Callable[[Callable[[Any], None], Iterable[Any]], Iterator[None]]


def kind_of(spec: WeightSpec, checkpoint_dtype: str, scheme: str | None) -> Storage:
    """How a weight will be stored, from what is known before loading.

    `checkpoint_dtype` is "bf16", "f16" or "f32"; `scheme` None, "int8" or "int4". Weights that may not
    be quantized keep the number format of the checkpoint.
    """
    if scheme is None or not spec.quantizable:
        return Storage(checkpoint_dtype)  # type: ignore[arg-type]
    if scheme not in ("int8", "int4"):
        raise ConfigError(f"quantization = {scheme!r} is not possible", "choose one of 'int8', 'int4'")
    return Storage(scheme, GROUP_SIZE, "f16")  # type: ignore[arg-type]


def quantize(
    spec: WeightSpec, array: Array | Sequence[Array], scheme: str, mapper: Mapper = map
) -> Int8 | Int4:
    """A weight [out, in] or [experts, out, in] in fewer bits.

    `array` has the canonical shape of `spec`, or is a sequence of the experts' matrices [out, in]; any
    strides, bf16, f16 or f32. Blocks of rows are independent: the result does not depend on `mapper`.
    Raises ConfigError when the weight holds NaN, or numbers too large for an f16 scale.
    """
    matrices = [array] if isinstance(array, np.ndarray) and array.ndim == 2 else list(array)
    rows, width = spec.shape[-2:]
    groups = -(-width // GROUP_SIZE)
    stored = width if scheme == "int8" else -(-width // 2)
    dtype: type[Any] = np.int8 if scheme == "int8" else np.uint8
    values = np.empty((len(matrices), rows, stored), dtype)
    scales = np.empty((len(matrices), rows, groups), np.float16)

    def work(block: tuple[int, slice]) -> None:
        x = _grouped(to_float32(matrices[block[0]][block[1]]))
        q, scale = _int8(x) if scheme == "int8" else _int4(x)
        if not np.isfinite(scale).all():
            source = spec.sources[block[0]] if len(spec.sources) > 1 else spec.sources[0]
            raise ConfigError(
                f"tensor {source!r} cannot be quantized: it holds numbers that are not finite, or too large",
                "load it without quantization, or fetch the checkpoint again",
            )
        part = scales[block]
        part[...] = scale.reshape(part.shape)
        flat = q.T.reshape(len(part), -1)[:, :width]
        values[block] = flat if scheme == "int8" else pack(flat)

    height = max(1, _BLOCK // max(width, 1))
    cuts = [slice(start, start + height) for start in range(0, rows, height)]
    for _ in mapper(work, [(m, cut) for m in range(len(matrices)) for cut in cuts]):
        pass
    values, scales = values.reshape(*spec.shape[:-1], stored), scales.reshape(*spec.shape[:-1], groups)
    return Int8(values, scales, GROUP_SIZE) if scheme == "int8" else Int4(values, scales, GROUP_SIZE, width)


def _grouped(rows: Floats) -> Floats:
    """[n, in] -> [GROUP_SIZE, n * groups]; a short last group is filled up with zeros.

    With the groups along the last axis every loop of NumPy is long; along the first they are 32 short.
    """
    if missing := -rows.shape[1] % GROUP_SIZE:
        rows = np.pad(rows, ((0, 0), (0, missing)))
    return np.ascontiguousarray(rows.reshape(-1, GROUP_SIZE).T)


def _int8(x: Floats) -> tuple[Array, Array]:
    """Groups [32, g] -> (-127..127 as int8 [32, g], f16 scales [g])."""
    with np.errstate(all="ignore"):
        scale = (np.abs(x).max(0) / np.float32(127)).astype(np.float16)
        q = np.clip(np.rint(x / _divisor(scale)), -127, 127)
        return q.astype(np.int8), scale


def _int4(x: Floats) -> tuple[Array, Array]:
    """Groups [32, g] -> (0..15 as uint8 [32, g], f16 scales [g]) with the least error of all _FACTORS."""
    with np.errstate(all="ignore"):
        high, low = x.max(0), x.min(0)
        base = np.where(high > -low, high, low) / np.float32(-8)
        scale, least = base.astype(np.float16), np.full(base.shape, np.inf, np.float32)
        scratch = np.empty_like(x)
        for factor in _FACTORS:
            candidate = (base * np.float32(factor)).astype(np.float16)
            error = _squared_error(x, candidate, scratch)
            scale, least = np.where(error < least, candidate, scale), np.minimum(error, least)
        q = np.divide(x, _divisor(scale), out=scratch)
        np.clip(np.rint(q, out=q), -8, 7, out=q)
        return np.add(q, np.float32(8), out=q).astype(np.uint8), scale


def _squared_error(x: Floats, scale: Array, scratch: Floats) -> Floats:
    """What groups [32, g] lose when stored as -8..7 times `scale` [g]."""
    divisor = _divisor(scale)
    q = np.divide(x, divisor, out=scratch)
    np.clip(np.rint(q, out=q), -8, 7, out=q)
    rest = np.subtract(x, np.multiply(q, divisor, out=q), out=q)
    return np.asarray(np.multiply(rest, rest, out=rest).sum(0))


def _divisor(scale: Array) -> Floats:
    """The scale, or 1 for a group whose scale is zero, where everything rounds to zero."""
    return np.where(scale == 0, np.float16(1), scale).astype(np.float32)
