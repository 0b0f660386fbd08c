"""The weights of a program in the memory of an accelerator: their arrays, their layout, their upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, DeviceArray
from quire.backends.cuda.coded_form import CodedForm, coded_form
from quire.backends.cuda.coded_packing import pieces
from quire.backends.cuda.kernels.variants import INTEGERS
from quire.backends.cuda.packing import packed, packed_shapes
from quire.backends.cuda.uploads import UploadRing
from quire.program.numerics import SPAN
from quire.program.ops import Experts, ShortConvolution
from quire.program.program import Program
from quire.quantize.coded import Coded
from quire.quantize.integers import Int4, Int8
from quire.quantize.kinds import DTYPES, Array, Storage, StoredWeight, to_float32
from quire.weights.load import Progress, load
from quire.weights.plan import Layout, WeightPlace, WeightPlan

ALIGNMENT = 256  # bytes; what tensor cores and wide loads ask for
VECTOR = "vector"  # the format of weights that multiply nothing as matrices: float32
SUPPORTED = (*DTYPES, *INTEGERS)  # formats of matrices that kernels multiply, besides those of CodedForm
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

    `progress` is called with bytes of the checkpoint done, and in all.
    """
    memory, tensors = accelerator.allocate(max(plan.layout.nbytes, 1)), plan.need_tensors()
    sizes = {n: sum(tensors[source].nbytes for source in s.sources) for n, s in plan.specs.items()}
    found, done = dict[str, DeviceWeight](), 0
    with UploadRing(accelerator, num_threads) as ring:
        for place in plan.layout.parts:
            name = place.name
            one = replace(plan, specs={name: plan.specs[name]})
            found[name] = _put(load(one, None, num_threads)[name], place, memory, ring.put, ring.fill)
            done += sizes[name]
            if progress is not None:
                progress(done, sum(sizes.values()))
    return found


def place_weights(
    program: Program, weights: Mapping[str, StoredWeight], accelerator: Accelerator
) -> dict[str, DeviceWeight]:
    """Copy loaded weights, few of them, to an accelerator."""
    layout = plan_layout(program, {name: weight.storage for name, weight in weights.items()})
    memory = accelerator.allocate(max(layout.nbytes, 1))

    def fill(array: DeviceArray, make: Callable[[], np.ndarray]) -> None:
        accelerator.write(array, make().view(array.dtype))

    return {p.name: _put(weights[p.name], p, memory, accelerator.write, fill) for p in layout.parts}


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
) -> DeviceWeight:
    """Write a weight to its place: `write` takes arrays, `fill` functions that return them, for pieces."""
    found = weight_at(place, memory)
    if (form := found.form) is not None:
        if not isinstance(weight, Coded):
            raise TypeError(f"{place.name} was planned as codes")
        arrays = dict(zip(form.parts(place.shape), found.arrays, strict=True))
        for piece in pieces(weight, form):
            fill(arrays[piece.array].part(piece.first, (piece.num_bytes,), np.dtype(np.uint8)), piece.make)
        return found
    for array, values in zip(found.arrays, _values(weight, place.format), strict=True):
        write(array, values)
    return found


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
