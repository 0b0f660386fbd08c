"""Round-to-nearest: quantize weights to int8 or int4 while loading, from the weights alone.

Each group of 32 inputs of an output has an int8 block scale `b`, each output a float32 `channel`, and a
weight is channel * b * q: 8.25 and 4.25 bits a weight, and 32 for each output. The definition is exact: every
operation is float32, rounded individually in the order written, so that any implementation gives equal bits.
`rint` rounds ties to even; a channel below 2^-126 is 0; amax is the largest |w| of a group.

int8    channel = (largest amax of the row / 127) / 127, integers from -127 to 127
        candidates for b: clamp(first + step, 1, 127) for each of STEPS in order, with
                          first = min(127, ceil((amax / 127) / channel)), which maps amax to 127 at most;
                          0 if amax or channel is 0

int4    channel = (largest amax of the row / 7) / 127, integers from -8 to 7, stored as q + 8
        candidates for b: clamp(rint((f * (m / -8)) / channel), -127, 127) for each f of FACTORS, with
                          m the weight of the largest magnitude, the first of equals;
                          1 in place of 0 if amax > 0; 0 if channel is 0

both    For each candidate in order:
            inverse = 1 / (channel * b), 0 if channel * b is 0
            q = clamp(rint(w * inverse), lowest integer, highest integer)
            error = the sum of rest * rest for k = 0 ... 31 in order, from 0, with
                    rest = w - (channel * b) * q
        The first candidate with the least error is used. A short group is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.errors import ConfigError, quoted
from quire.program.numerics import GROUP
from quire.program.program import WeightSpec
from quire.quantize.groups import GroupStorage
from quire.quantize.integers import Int4, Int8, pack
from quire.quantize.kinds import Array, Floats, FloatStorage, Storage, StoredWeight, to_float32

# Offsets from the smallest block scale that clips nothing, for int8. On normally distributed weights the
# first alone has 4% more squared error than Q8_0, the best of the five 10% less; nine give no better quality.
STEPS = tuple(np.float32(s) for s in (0, -1, 1, 2, 3))

# Multiples of the scale that maps the largest magnitude to -8. The first alone is Q4_0; on normally
# distributed weights the next three reduce the squared error by 9%, and more of them by nothing. The
# last matters if both signs have the largest magnitude: Q4_0 uses whichever comes first.
FACTORS = tuple(np.float32(f) for f in (1.0, 0.95, 8 / 7, 0.9, -1.0))

_SMALLEST = np.float32(2.0**-126)  # a channel below it is 0, so that 1 / (channel * b) is finite

_BLOCK = 1 << 16  # numbers processed together: their temporaries fit in the L2 cache

# Like the built-in map; a thread pool's map processes several blocks at once.
Mapper = Callable[[Callable[[Any], None], Iterable[Any]], Iterator[None]]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantization scheme: its storage kind, and how weights are quantized.

    `candidates` are those of STEPS or FACTORS, tried for each group in order. `round` maps groups [32, g] of
    so many rows to (integers [32, g], block scales [g], channels [rows]); `weight` builds the weight from
    integers [..., out, bytes of a row], block scales, channels and the number of inputs; `lay` converts rows
    of integers [n, in] to their stored form.
    """

    storage: GroupStorage
    dtype: type[Any]
    candidates: tuple[np.float32, ...]
    round: Callable[[Floats, int], tuple[Array, Array, Floats]]
    lay: Callable[[Array], Array]
    weight: Callable[[Array, Array, Array, int], StoredWeight]


def kind_of(spec: WeightSpec, stored: Storage, scheme: str | None) -> Storage:
    """Return the storage kind a weight will have, from what is known before loading.

    `stored` is how the checkpoint has it; `scheme` None or one of SCHEMES. Weights that may not be quantized
    are unchanged; one that is quantized already is rounded a second time, from the values that it has.
    Matrices of heads whose outputs become inputs are bf16: their groups of inputs share no scale.
    """
    if scheme is None or not spec.quantizable:
        exchanged = spec.by_head == "inputs" and not stored.is_float
        return FloatStorage("bf16") if exchanged else stored
    if scheme not in SCHEMES:
        raise ConfigError(
            f"quantization = {scheme!r} is not supported", f"choose one of {', '.join(map(repr, SCHEMES))}"
        )
    return SCHEMES[scheme].storage


def quantize(
    spec: WeightSpec, array: Array | Sequence[Array], scheme: str, mapper: Mapper = map
) -> StoredWeight:
    """Quantize a weight [out, in] or [experts, out, in].

    `array` has the canonical shape of `spec`, or is a sequence of the experts' matrices [out, in]; any
    strides, bf16, f16 or f32. Blocks of rows are independent: the result does not depend on `mapper`.
    Raises ConfigError if the weight has numbers that are not finite.
    """
    matrices = [array] if isinstance(array, np.ndarray) and array.ndim == 2 else list(array)
    rows, width = spec.shape[-2:]
    how = SCHEMES[scheme]
    stored, groups = how.storage.value_bytes(width), -(-width // GROUP)
    values = np.empty((len(matrices), rows, stored), how.dtype)
    block_scales = np.empty((len(matrices), rows, groups), np.int8)
    channels = np.empty((len(matrices), rows), np.float32)

    def work(block: tuple[int, slice]) -> None:
        x = _grouped(to_float32(matrices[block[0]][block[1]]))
        part = block_scales[block]
        q, scale, channel = how.round(x, len(part))
        if not np.isfinite(channel).all():
            source = spec.sources[block[0]] if len(spec.sources) > 1 else spec.sources[0]
            raise ConfigError(
                f"tensor {quoted(source)} cannot be quantized: it holds numbers that are not finite",
                "load it without quantization, or fetch the checkpoint again",
            )
        part[...], channels[block] = scale.reshape(part.shape), channel
        values[block] = how.lay(q.T.reshape(len(part), -1)[:, :width])

    height = max(1, _BLOCK // max(width, 1))
    cuts = [slice(start, start + height) for start in range(0, rows, height)]
    for _ in mapper(work, [(m, cut) for m in range(len(matrices)) for cut in cuts]):
        pass
    leading = spec.shape[:-1]
    scales = block_scales.reshape(*leading, groups)
    return how.weight(values.reshape(*leading, stored), scales, channels.reshape(leading), width)


def _grouped(rows: Floats) -> Floats:
    """Rearrange [n, in] to [GROUP, n * groups], padding a short last group with zeros.

    With the groups along the last axis, every loop of NumPy is long instead of having 32 elements.
    """
    if missing := -rows.shape[1] % GROUP:
        rows = np.pad(rows, ((0, 0), (0, missing)))
    return np.ascontiguousarray(rows.reshape(-1, GROUP).T)


def _int8(x: Floats, rows: int) -> tuple[Array, Array, Floats]:
    """Map groups [32, g] of `rows` rows to (int8 [32, g], block scales [g], channels [rows])."""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(0)
        channel, unit = _channels(amax, rows, np.float32(127))
        first = np.minimum(np.ceil((amax / np.float32(127)) / unit), np.float32(127))
        none = (amax == 0) | (unit == 0)
        candidates = (np.where(none, np.float32(0), np.clip(first + step, 1, 127)) for step in STEPS)
        q, block_scales = _least_error(x, unit, candidates, -127, 127)
        return q.astype(np.int8), block_scales.astype(np.int8), channel


def _int4(x: Floats, rows: int) -> tuple[Array, Array, Floats]:
    """Map groups [32, g] of `rows` rows to (0..15 as uint8 [32, g], block scales [g], channels [rows])."""
    with np.errstate(all="ignore"):
        largest = np.take_along_axis(x, np.abs(x).argmax(0)[None], 0)[0]
        amax, base = np.abs(largest), largest / np.float32(-8)
        channel, unit = _channels(amax, rows, np.float32(7))

        def candidate(factor: np.float32) -> Floats:
            scale = np.clip(np.rint((factor * base) / unit), -127, 127)
            return np.where(unit == 0, np.float32(0), np.where(scale == 0, np.float32(amax > 0), scale))

        q, block_scales = _least_error(x, unit, map(candidate, FACTORS), -8, 7)
        q += 8
        return q.astype(np.uint8), block_scales.astype(np.int8), channel


def _channels(amax: Floats, rows: int, most: np.floating[Any]) -> tuple[Floats, Floats]:
    """Map largest magnitudes of groups [g] to (channels [rows], the same for each group [g])."""
    channel = (amax.reshape(rows, -1).max(1) / most) / np.float32(127)
    channel[channel < _SMALLEST] = 0
    return channel, np.repeat(channel, len(amax) // rows)


def _least_error(
    x: Floats, unit: Floats, candidates: Iterable[Floats], low: int, high: int
) -> tuple[Floats, Floats]:
    """Return (integers [32, g], block scales [g]) with the first candidate of the least error, by group."""
    best, least, scratch = np.zeros_like(unit), np.full_like(unit, np.inf), np.empty_like(x)
    for number, candidate in enumerate(candidates):
        error = _squared_error(x, unit * candidate, low, high, scratch)
        better = (error < least) | (number == 0)
        best, least = np.where(better, candidate, best), np.where(better, error, least)
    return _nearest(x, unit * best, low, high, scratch), best


def _nearest(x: Floats, scale: Floats, low: int, high: int, out: Floats) -> Floats:
    """Return the integers nearest to groups [32, g] divided by scale [g]."""
    q = np.multiply(x, _inverse(scale), out=out)
    return np.clip(np.rint(q, out=q), low, high, out=q)


def _squared_error(x: Floats, scale: Floats, low: int, high: int, scratch: Floats) -> Floats:
    """Return the squared error of groups [32, g] rounded with scale [g], summed in a defined order."""
    rest = _nearest(x, scale, low, high, scratch)
    rest = np.subtract(x, np.multiply(scale, rest, out=rest), out=rest)
    np.multiply(rest, rest, out=rest)
    error = np.zeros_like(scale)
    for of_input in rest:
        error += of_input
    return error


def _inverse(scale: Floats) -> Floats:
    """Return 1 / scale, and 0 for groups with scale 0, which round to 0."""
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale).astype(np.float32)


SCHEMES: dict[str, Scheme] = {
    "int8": Scheme(
        GroupStorage("int8", 8),
        np.int8,
        STEPS,
        _int8,
        lambda q: q,
        lambda values, scales, channels, width: Int8(values, scales, channels),
    ),
    "int4": Scheme(
        GroupStorage("int4", 4),
        np.uint8,
        FACTORS,
        _int4,
        pack,
        lambda values, scales, channels, width: Int4(values, scales, channels, width),
    ),
}
