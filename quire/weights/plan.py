"""The plan of a model's weights, made before any is read: sources, storage kinds, places in memory.

Everything is checked on names and shapes, once. Describing a model, counting its memory, loading and packing
it go by the same plan.
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

_LISTED = 10  # names in one error
_BARE = "transformer."
HEAD = "lm_head.weight"
_PREFIXES = ("model.", "language_model.", "transformer.", "model.language_model.")

# (weight, how the checkpoint has it, quantization asked for) -> how the weight is kept
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
        """Return this part of an array of all bytes."""
        return memory[self.offset : self.offset + self.nbytes]


@dataclass(frozen=True, slots=True)
class Layout:
    """Parts in order, in one run of `nbytes` bytes."""

    parts: tuple[WeightPlace, ...] = ()
    nbytes: int = 0

    @classmethod
    def of(cls, parts: Iterable[tuple[str, str, tuple[int, ...], int]], alignment: int = 1) -> Layout:
        """Lay (name, format, shape, bytes) one after the other, each at a multiple of `alignment`."""
        placed, end = [], 0
        for name, format, shape, nbytes in parts:
            placed.append(WeightPlace(name, format, shape, end, nbytes))
            end += -(-nbytes // alignment) * alignment
        return cls(tuple(placed), end)

    def digest(self) -> str:
        """Return a name for this layout; another one has another name."""
        return hashlib.blake2b(repr(self.parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The weights of a program: what each is made of, how it is stored, where it lies on the device.

    `stored` is how the checkpoint has each, `storage` how it is kept: where they differ, it is rounded while
    loading, to the `quantization` that was asked for. `tensors` is None where only the small files of a model
    are here.
    """

    specs: Mapping[str, WeightSpec]
    stored: Mapping[str, Storage]
    storage: Mapping[str, Storage]
    tensors: Tensors | None = None
    quantization: str | None = None
    layout: Layout = field(default_factory=Layout)

    def stored_bytes(self, spec: WeightSpec) -> int:
        """Return the bytes of a weight in its own storage kind, however the device lays it out."""
        return self.storage[spec.name].nbytes(spec.shape)

    @property
    def floats(self) -> str:
        """The format of the model's numbers (bf16, f16 or f32): that of most weights that keep it."""
        kept = Counter(how.kind for how in self.storage.values() if how.is_float)
        return kept.most_common(1)[0][0] if kept else "bf16"

    def need_tensors(self) -> Tensors:
        """Return the tensors. Raises ConfigError where the plan was made without any."""
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

    `ignored` are patterns (fnmatch) of tensors that may be left over. Raises one ConfigError that lists what
    is missing, left over, of another shape or in a number format that is not read.
    """
    tensors = whole(specs, tensors)
    check(specs, tensors, ignored)
    stored = {name: _stored(spec, tensors) for name, spec in specs.items()}
    return _chosen(specs, stored, tensors, quantization, choose)


def plan_without(
    specs: Mapping[str, WeightSpec], stated: str, quantization: str | None = None, choose: Choose = kind_of
) -> WeightPlan:
    """Plan weights that are not here, as if all had the `stated` number format."""
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
    """Return the storage kind of the sources; f32, which holds all of them, when they differ.

    Raises ConfigError for quantized sources that lie in another way than the program wants them.
    """
    kinds = [tensors[source].storage for source in spec.sources]
    first = kinds[0]
    if not first.is_float and (spec.transposed or (spec.interleaved and len(spec.shape) < 2)):
        what = f"tensor {quoted(spec.sources[0])} is stored as {first}"
        raise ConfigError(f"{what}, which this model wants turned", "use the unquantized checkpoint")
    return first if all(kind == first for kind in kinds) else FloatStorage("f32")


def whole(specs: Mapping[str, WeightSpec], tensors: Tensors) -> Tensors:
    """A bare decoder, as GPT-2 was published, under the names of the whole model; others as they are."""
    wanted = {source for spec in specs.values() for source in spec.sources}
    bare = wanted and all(name.startswith(_BARE) and name not in tensors for name in wanted)
    if bare and all(name.removeprefix(_BARE) in tensors for name in wanted):
        return tensors.under(_BARE)
    return tensors


def check(specs: Mapping[str, WeightSpec], tensors: Tensors, ignored: Iterable[str] = ()) -> None:
    """Raise one ConfigError unless the checkpoint holds what `specs` want and nothing but `ignored` else."""
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
        _ = tensors[name].storage  # raises for number formats that are not read


def _listing(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    tensors = "tensor" if len(names) == 1 else "tensors"
    listed = ", ".join(shortened(name, 200) for name in names[:_LISTED])
    return f"{len(names)} {tensors} {what} ({listed}{more})"


def _hint(missing: list[str], left: set[str], different: bool) -> str:
    """What may be the cause: `left` are all tensors that the model does not want, ignored or not."""
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
    """The shapes one source of this weight may have: one, or two where outputs may be the last axis."""
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
    """The axis of the outputs, -2 or -1, if a source of shape `found` gives this weight; else None."""
    shapes = _source_shapes(spec)
    if found not in shapes:
        return None
    return -1 if len(found) == 1 else (-2, -1)[shapes.index(found)]


def _exchanged(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
