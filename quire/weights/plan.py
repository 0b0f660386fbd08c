"""The plan of a model's weights, made before any is read: sources, storage kinds, memory layout.

Names and shapes are checked once, here. Describing a model, planning its memory, loading and packing all use
the same plan.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

from quire.errors import ConfigError, quoted, shortened
from quire.program.program import WeightSpec
from quire.quantize.kinds import FloatStorage, Storage
from quire.quantize.round_to_nearest import kind_of
from quire.weights.tensors import Tensors

_LISTED = 10  # maximum number of names in one error
_BARE = "transformer."
HEAD = "lm_head.weight"
_PREFIXES = ("model.", "language_model.", "transformer.", "model.language_model.")

# (weight, storage in the checkpoint, requested quantization) -> storage of the loaded weight
Choose = Callable[[WeightSpec, Storage, str | None], Storage]


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """The place of one weight in the memory of a device, and its format there."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def of(self, memory: Any) -> Any:
        """Return the slice of an array of all bytes."""
        return memory[self.offset : self.offset + self.nbytes]


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of weights, in order, in one buffer of `nbytes` bytes."""

    parts: tuple[WeightPlace, ...] = ()
    nbytes: int = 0

    @classmethod
    def of(cls, parts: Iterable[tuple[str, str, tuple[int, ...], int]], alignment: int = 1) -> Layout:
        """Place (name, format, shape, bytes) in sequence, each at a multiple of `alignment`."""
        placed, end = [], 0
        for name, format, shape, nbytes in parts:
            placed.append(WeightPlace(name, format, shape, end, nbytes))
            end += -(-nbytes // alignment) * alignment
        return cls(tuple(placed), end)

    def digest(self) -> str:
        """Return a digest of this layout."""
        return hashlib.blake2b(repr(self.parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The weights of a program: the sources of each, its storage kind, and its place on the device.

    `stored` is the storage kind in the checkpoint, `storage` that after loading: if they differ, the weight
    is quantized while loading, to the requested `quantization`. `tensors` is None if only the small files of
    a model are present.
    """

    specs: Mapping[str, WeightSpec]
    stored: Mapping[str, Storage]
    storage: Mapping[str, Storage]
    tensors: Tensors | None = None
    quantization: str | None = None
    layout: Layout = field(default_factory=Layout)

    def stored_bytes(self, spec: WeightSpec) -> int:
        """Return the bytes of a weight in its storage kind, independent of the layout on the device."""
        return self.storage[spec.name].nbytes(spec.shape)

    @property
    def floats(self) -> str:
        """The number format of the model (bf16, f16 or f32): that of most unquantized weights."""
        kept = Counter(how.kind for how in self.storage.values() if how.is_float)
        return kept.most_common(1)[0][0] if kept else "bf16"

    def need_tensors(self) -> Tensors:
        """Return the tensors. Raises ConfigError if the plan was made without any."""
        if self.tensors is None:
            raise ConfigError("this model was described without its weights, so none can be loaded")
        return self.tensors


def plan(
    specs: Mapping[str, WeightSpec],
    tensors: Tensors,
    quantization: str | None = None,
    ignored: Iterable[str] = ("*",),
    choose: Choose = kind_of,
) -> WeightPlan:
    """Plan how every weight is stored, before any of its data is read.

    `ignored` are patterns (fnmatch) of tensors that may be unused. Raises one ConfigError that lists tensors
    that are missing, unused, of a wrong shape or in an unsupported number format.
    """
    tensors = whole(specs, tensors)
    check(specs, tensors, ignored)
    stored = {name: _stored(spec, tensors) for name, spec in specs.items()}
    return _chosen(specs, stored, tensors, quantization, choose)


def plan_without(
    specs: Mapping[str, WeightSpec], stated: str, quantization: str | None = None, choose: Choose = kind_of
) -> WeightPlan:
    """Plan weights without their files, as if all had the `stated` number format."""
    return _chosen(specs, dict.fromkeys(specs, FloatStorage(stated)), None, quantization, choose)


def _chosen(
    specs: Mapping[str, WeightSpec],
    stored: Mapping[str, Storage],
    tensors: Tensors | None,
    quantization: str | None,
    choose: Choose,
) -> WeightPlan:
    storage = {name: choose(spec, stored[name], quantization) for name, spec in specs.items()}
    return WeightPlan(specs, stored, storage, tensors, quantization)


def _stored(spec: WeightSpec, tensors: Tensors) -> Storage:
    """Return the storage kind of the sources; f32, which represents all of them, if they differ.

    Raises ConfigError for quantized sources in another orientation than the program needs.
    """
    kinds = [tensors[source].storage for source in spec.sources]
    first = kinds[0]
    if not first.is_float and (spec.transposed or (spec.interleaved and len(spec.shape) < 2)):
        what = f"tensor {quoted(spec.sources[0])} is stored as {first}"
        raise ConfigError(f"{what}, which this model needs transposed", "use the unquantized checkpoint")
    return first if all(kind == first for kind in kinds) else FloatStorage("f32")


def whole(specs: Mapping[str, WeightSpec], tensors: Tensors) -> Tensors:
    """Rename the tensors of a bare decoder, as GPT-2 was published; return others unchanged."""
    wanted = {source for spec in specs.values() for source in spec.sources}
    bare = wanted and all(name.startswith(_BARE) and name not in tensors for name in wanted)
    if bare and all(name.removeprefix(_BARE) in tensors for name in wanted):
        return tensors.under(_BARE)
    return tensors


def check(specs: Mapping[str, WeightSpec], tensors: Tensors, ignored: Iterable[str] = ()) -> None:
    """Raise one ConfigError unless the checkpoint has exactly the tensors of `specs`, besides `ignored`."""
    wanted = {source: spec for spec in specs.values() for source in spec.sources}
    missing = [name for name in wanted if name not in tensors]
    allowed = re.compile("|".join(map(translate, ignored)) or "(?!)")
    unexpected = [name for name in tensors if name not in wanted and not allowed.match(name)]
    misshaped = []
    for spec in specs.values():
        for source in spec.sources:
            if source in tensors and outputs_axis(spec, tensors[source].shape) is None:
                entry = tensors[source]
                expected = " or ".join(str(list(s)) for s in _source_shapes(spec))
                name = shortened(source)
                misshaped.append(f"{name} {list(entry.shape)} in {entry.place}, expected {expected}")
    faults = (
        _listing("missing", missing),
        _listing("not part of this model", unexpected),
        _listing("of another shape than config.json says", list(dict.fromkeys(misshaped))),
    )
    if any(faults):
        listed = "; ".join(filter(None, faults))
        hint = _hint(missing, set(tensors) - set(wanted), bool(misshaped or unexpected))
        raise ConfigError(f"{tensors.where}: the checkpoint does not fit the model: {listed}", hint)
    for name in wanted:
        _ = tensors[name].storage  # raises for unsupported number formats


def _listing(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    tensors = "tensor" if len(names) == 1 else "tensors"
    listed = ", ".join(shortened(name, 200) for name in names[:_LISTED])
    return f"{len(names)} {tensors} {what} ({listed}{more})"


def _hint(missing: list[str], left: set[str], different: bool) -> str:
    """Return a hint at the cause: `left` are all tensors not used by the model, ignored or not."""
    for prefix in _PREFIXES:
        if any(prefix + name in left for name in missing):
            return f"the checkpoint stores its names with the prefix {prefix!r}: part of a larger model?"
        if any(name.startswith(prefix) and name.removeprefix(prefix) in left for name in missing):
            return f"the checkpoint stores its names without the prefix {prefix!r}: is it a bare decoder?"
    if missing == [HEAD]:
        return "if the model shares its embedding with its head, set tie_word_embeddings in config.json"
    if different:
        return "config.json and the weights belong to different models, or the model has an unknown part"
    return "the checkpoint is incomplete: fetch it again"


def _source_shapes(spec: WeightSpec) -> list[tuple[int, ...]]:
    """Return the possible shapes of one source: one, or two if outputs may be the last axis."""
    shape = spec.shape[1:] if len(spec.sources) > 1 else spec.shape
    if spec.interleaved is None:
        return [_exchanged(shape) if spec.transposed else shape]
    shapes = []
    for axis in (-2, -1):  # the outputs of a matrix, or of the biases of several experts
        if len(shape) + axis >= 0:
            wide = list(shape)
            wide[axis] *= spec.interleaved[1]
            shapes.append(_exchanged(tuple(wide)) if spec.transposed else tuple(wide))
    return shapes[:1] if spec.transposed else shapes


def outputs_axis(spec: WeightSpec, found: tuple[int, ...]) -> int | None:
    """Return the axis of the outputs, -2 or -1, of a source of shape `found`; None if it does not match."""
    shapes = _source_shapes(spec)
    if found not in shapes:
        return None
    return -1 if len(found) == 1 else (-2, -1)[shapes.index(found)]


def _exchanged(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
