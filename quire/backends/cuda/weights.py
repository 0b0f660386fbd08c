"""The weights of a program in the memory of an accelerator: their arrays, their layout, their upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import MappingProxyType

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, DeviceArray
from quire.backends.cuda.coded_form import CodedForm, coded_form
from quire.backends.cuda.coded_packing import pieces
from quire.backends.cuda.kernels.product_variants import INTEGERS
from quire.backends.cuda.packing import packed, packed_shapes
from quire.backends.cuda.quantizing import Quantizer, is_rounded
from quire.backends.cuda.uploads import UploadRing
from quire.program.numerics import SPAN
from quire.program.ops import Experts, ShortConvolution
from quire.program.program import Program
from quire.quantize.coded import Coded
from quire.quantize.integers import Int4, Int8
from quire.quantize.kinds import DTYPES, Array, Dense, Storage, StoredWeight, to_float32
from quire.weights.load import Progress, load
from quire.weights.plan import Layout, WeightPlace, WeightPlan

ALIGNMENT = 256  # bytes; what tensor cores and wide loads ask for
VECTOR = "vector"  # the format of weights that multiply nothing as matrices: float32
SUPPORTED = (*DTYPES, *INTEGERS)  # formats of matrices that kernels multiply, besides those of CodedForm
_UNDIVIDED: Mapping[str, int] = MappingProxyType({})
_Part = tuple[tuple[int, ...], np.dtype[np.generic]]  # shape and type of an array


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A weight on an accelerator: `format` is a name in SUPPORTED, "vector", or that of a CodedForm.

    `arrays` of floats are one, [..., out, in]; of integers those of quire.backends.cuda.packing: values,
    block scales and channel scales; of codes of other formats those of CodedForm.parts.
    """

    format: str
    shape: tuple[int, ...]
    arrays: tuple[DeviceArray, ...]

    @property
    def form(self) -> CodedForm | None:
        """The form of codes of another format, None for other weights."""
        return CodedForm.of_format(self.format)


def plan_layout(program: Program, storage: Mapping[str, Storage]) -> Layout:
    """Lay out the weights of a program, each with its arrays one after the other."""
    vectors, parts = _vectors(program), []
    for name, spec in program.weights().items():
        kind = VECTOR if name in vectors else format_of(storage[name])
        parts.append(WeightPlace(name, kind, spec.shape, 0, sum(map(_aligned, _parts(kind, spec.shape)))))
    return Layout.of(parts, ALIGNMENT)


def format_of(storage: Storage) -> str:
    """Return the format of matrices in a storage kind."""
    form = coded_form(storage)
    return storage.kind if form is None else form.format


def _vectors(program: Program) -> set[str]:
    """Return the names of what is added and multiplied number by number: float32 on the accelerator."""
    found = {name for name, spec in program.weights().items() if len(spec.shape) < 2}
    for op in program:
        if isinstance(op, ShortConvolution):
            found.add(op.weight.name)
        if isinstance(op, Experts):
            found |= {spec.name for spec in op.weights()} - {spec.name for spec in op.experts.matrices()}
    return found


def upload(
    plan: WeightPlan,
    accelerator: Accelerator,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> dict[str, DeviceWeight]:
    """Load the weights of a plan one by one while those before are copied to an accelerator.

    Each rank gets what the plan's layout says, and rounds floats that are to be integers itself. `progress`
    is called with bytes of the checkpoint done, and in all. Raises ConfigError for numbers that are not
    finite and are to be rounded.
    """
    axes = axes_of(plan)
    memory, tensors = accelerator.allocate(max(plan.layout.nbytes, 1)), plan.need_tensors()
    sizes = {n: sum(tensors[source].nbytes for source in s.sources) for n, s in plan.specs.items()}
    found, done = dict[str, DeviceWeight](), 0
    with ExitStack() as stack:
        rings = [stack.enter_context(UploadRing(rank, num_threads)) for rank in accelerator.ranks]
        quantizers = [Quantizer(rank, ring) for rank, ring in zip(accelerator.ranks, rings, strict=True)]
        for place in plan.layout.parts:
            name = place.name
            one = replace(plan, specs={name: plan.specs[name]})
            if rounded := is_rounded(plan, name):
                one = replace(one, storage={name: plan.stored[name]})  # as the floats that it has
            weight = load(one, None, num_threads)[name]
            for rank, (ring, quantizer) in enumerate(zip(rings, quantizers, strict=True)):
                part = part_of(weight, axes.get(name), rank, len(rings))
                own = accelerator.on(rank, memory)
                if rounded:
                    quantizer.put(plan.specs[name], part.floats(), place.format, weight_at(place, own).arrays)
                else:
                    _put(part, place, own, ring.put, ring.fill)
            found[name] = weight_at(place, memory)
            done += sizes[name]
            if progress is not None:
                progress(done, sum(sizes.values()))
        for quantizer in quantizers:
            quantizer.finish()
    return found


def place_weights(
    program: Program,
    weights: Mapping[str, StoredWeight],
    accelerator: Accelerator,
    axes: Mapping[str, int] = _UNDIVIDED,
) -> dict[str, DeviceWeight]:
    """Copy loaded weights, few of them, to an accelerator: of those with `axes` each rank gets its part."""
    layout = plan_layout(program, {name: weight.storage for name, weight in weights.items()})
    memory = accelerator.allocate(max(layout.nbytes, 1))
    for number, rank in enumerate(accelerator.ranks):
        own = accelerator.on(number, memory)
        for place in layout.parts:
            part = part_of(weights[place.name], axes.get(place.name), number, accelerator.num_ranks)
            _put(part, place, own, rank.write, partial(_write_made, rank))
    return {place.name: weight_at(place, memory) for place in layout.parts}


def _write_made(accelerator: Accelerator, array: DeviceArray, make: Callable[[], np.ndarray]) -> None:
    accelerator.write(array, make().view(array.dtype))


def axes_of(plan: WeightPlan) -> dict[str, int]:
    """Return the axes on which weights are divided: those of which a place has less than the checkpoint."""
    shapes = {place.name: (place.shape, plan.specs[place.name].shape) for place in plan.layout.parts}
    return {name: int(own[0] == whole[0]) for name, (own, whole) in shapes.items() if own != whole}


def part_of(weight: StoredWeight, axis: int | None, rank: int, ranks: int) -> StoredWeight:
    """Return the part of a weight that a rank has, on the first axis, or on the second one, of experts."""
    if axis is None:
        return weight
    size = weight.shape[axis] // ranks
    which = slice(rank * size, (rank + 1) * size)
    if axis > 0:
        return weight.outputs(which, axis - len(weight.shape))
    if isinstance(weight, Dense):
        return Dense(weight.array[which])
    if isinstance(weight, Coded | Int4 | Int8):
        return weight[which]
    raise TypeError(f"a {type(weight).__name__} has no parts")


def weight_at(place: WeightPlace, memory: DeviceArray) -> DeviceWeight:
    """Return the weight of a place, with whatever the memory of all weights has there."""
    first, arrays = place.offset, list[DeviceArray]()
    for part in _parts(place.format, place.shape):
        arrays.append(memory.part(first, *part))
        first += _aligned(part)
    return DeviceWeight(place.format, place.shape, tuple(arrays))


def _put(
    weight: StoredWeight,
    place: WeightPlace,
    memory: DeviceArray,
    write: Callable[[DeviceArray, np.ndarray], None],
    fill: Callable[[DeviceArray, Callable[[], np.ndarray]], None],
) -> None:
    """Write a weight to its place: `write` takes arrays, `fill` functions that return them, for pieces."""
    found = weight_at(place, memory)
    if (form := found.form) is not None:
        if not isinstance(weight, Coded):
            raise TypeError(f"{place.name} was planned as codes")
        arrays = dict(zip(form.parts(place.shape), found.arrays, strict=True))
        for piece in pieces(weight, form):
            fill(arrays[piece.array].part(piece.first, (piece.num_bytes,), np.dtype(np.uint8)), piece.make)
        return
    for array, values in zip(found.arrays, _values(weight, place.format), strict=True):
        write(array, values)


def _values(weight: StoredWeight, format: str) -> tuple[Array, ...]:
    """Return the arrays of a weight."""
    if isinstance(weight, Int8 | Int4):
        parts = packed(weight)
        return parts.values, parts.scales, parts.channels
    floats = weight.floats()
    return (to_float32(floats) if format == VECTOR else floats,)


def _parts(format: str, shape: tuple[int, ...]) -> list[_Part]:
    """Return the shape and type of each array of a weight."""
    if format == VECTOR:
        return [(shape, np.dtype(np.float32))]
    if format in DTYPES:
        return [(shape, DTYPES[format])]
    if (form := CodedForm.of_format(format)) is not None:
        return list(form.parts(shape).values())
    return list(packed_shapes(format, shape))


def spans_of(inputs: int) -> int:
    """Return the spans of a row of quantized activations, the last one padded."""
    return -(-inputs // SPAN)


def _aligned(part: _Part) -> int:
    """Return the bytes that an array takes."""
    shape, dtype = part
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
