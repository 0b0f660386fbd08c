"""The plan of a model's weights, made before any is read: sources, storage kinds, memory layout.

Names and shapes are checked once, here. Describing a model, planning its memory, loading and packing all use
the same plan.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import translate
from typing import Any

from quire.errors import ConfigError, shortened
from quire.program.program import LeftOut, WeightSpec
from quire.quantize.kinds import FloatStorage, Storage, StoredWeight
from quire.quantize.mixed import MixedStorage
from quire.quantize.round_to_nearest import kind_of
from quire.weights.left_out import left_out_in_words
from quire.weights.renamed import under_own_names
from quire.weights.tensors import Tensor, Tensors

_LISTED = 10  # maximum number of names in one error
HEAD = "lm_head.weight"
_PREFIXES = ("model.", "language_model.", "transformer.", "model.language_model.")

# (weight, storage in the checkpoint, requested quantization) -> storage of the loaded weight
Choose = Callable[[WeightSpec, Storage, str | None], Storage]
Expect = Callable[[WeightSpec], Storage]  # weight -> storage in a checkpoint whose weights are not here


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """The place of one weight in the memory of a device, and its format there."""

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    expert: int | None = None

    def of(self, memory: Any) -> Any:
        """Return the slice of an array of all bytes."""
        return memory[self.offset : self.offset + self.nbytes]


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of weights, in order, in one buffer of `nbytes` bytes."""

    parts: tuple[WeightPlace, ...] = ()
    nbytes: int = 0

    @classmethod
    def of(cls, parts: Iterable[WeightPlace], alignment: int = 1) -> Layout:
        """Place parts in sequence, each at a multiple of `alignment`, whatever offsets they have."""
        placed, end = [], 0
        for part in parts:
            placed.append(replace(part, offset=end))
            end += -(-part.nbytes // alignment) * alignment
        return cls(tuple(placed), end)

    @property
    def in_place(self) -> frozenset[str]:
        """The weights that stay in the checkpoint, and so have no bytes."""
        return frozenset(part.name for part in self.parts if part.nbytes == 0)

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
    left_out: str = ""  # a sentence about parts of the checkpoint that are not computed

    def stored_bytes(self, spec: WeightSpec) -> int:
        """Return the bytes of a weight in its storage kind, independent of the layout on the device."""
        return self.storage[spec.name].nbytes(spec.shape)

    @property
    def floats(self) -> str:
        """The number format of the model (bf16, f16 or f32): that of most unquantized weights.

        It is bf16 for a checkpoint whose matrices are all codes: the vectors beside them are often f32.
        """
        matrices = [self.stored[name] for name, spec in self.specs.items() if spec.quantizable]
        if matrices and not any(how.is_float for how in matrices):
            return "bf16"
        kept = Counter(how.kind for how in self.storage.values() if how.is_float)
        return kept.most_common(1)[0][0] if kept else "bf16"

    @property
    def summary(self) -> str:
        """The format of quantized weights in a line, "" if the checkpoint has floats (see Tensors)."""
        return "" if self.tensors is None else self.tensors.summary

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the files define and Quire does not use."""
        notes = () if self.tensors is None else self.tensors.notes
        return (self.left_out, *notes) if self.left_out else notes

    def need_tensors(self) -> Tensors:
        """Return the tensors. Raises ConfigError if the plan was made without any."""
        if self.tensors is None:
            raise ConfigError("this model was described without its weights, so none can be loaded")
        return self.tensors


def integer_sources(specs: Mapping[str, WeightSpec]) -> frozenset[str]:
    """Return the names of the tensors that have integers."""
    return frozenset(source for spec in specs.values() if spec.below for source in spec.sources)


def plan(
    specs: Mapping[str, WeightSpec],
    tensors: Tensors,
    quantization: str | None = None,
    ignored: Iterable[str] = ("*",),
    choose: Choose = kind_of,
    left_out: Iterable[LeftOut] = (),
) -> WeightPlan:
    """Plan how every weight is stored, before any of its data is read.

    `ignored` are patterns (fnmatch) of tensors that may be unused, `left_out` parts that are not computed.
    Raises one ConfigError that lists tensors that are missing, unused, of a wrong shape or in an unsupported
    number format.
    """
    left_out = tuple(left_out)
    tensors = under_own_names(specs, tensors)
    specs = {name: _as_held(spec, tensors) for name, spec in specs.items()}
    check(specs, tensors, [*ignored, *(pattern for part in left_out for pattern in part.patterns)])
    stored = {name: _stored(spec, tensors) for name, spec in specs.items()}
    sentence = left_out_in_words(left_out, tensors, {s for spec in specs.values() for s in spec.sources})
    return replace(_chosen(specs, stored, tensors, quantization, choose), left_out=sentence)


def _as_held(spec: WeightSpec, tensors: Tensors) -> WeightSpec:
    """Return the spec of a weight that the files have as the program needs it, not as part of another."""
    if spec.name not in tensors or any(source in tensors for source in spec.sources):
        return spec
    return replace(spec, sources=(spec.name,), transposed=False, rows=None, by_head=None)


def all_in(format: str) -> Expect:
    """Return the expectation of a checkpoint of floats: one number format for all weights."""
    return lambda spec: FloatStorage(format)


def plan_without(
    specs: Mapping[str, WeightSpec],
    expected: Expect,
    quantization: str | None = None,
    choose: Choose = kind_of,
    left_out: Iterable[LeftOut] = (),
) -> WeightPlan:
    """Plan weights without their files, as if each had the storage kind that is expected."""
    stored = {name: expected(spec) for name, spec in specs.items()}
    sentence = left_out_in_words(left_out, None)
    return replace(_chosen(specs, stored, None, quantization, choose), left_out=sentence)


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
    """Return the storage kind of the sources: f32, which represents all floats, for different floats."""
    if spec.below:
        return FloatStorage("f32")
    kinds = [tensors[source].storage for source in spec.sources]
    first = kinds[0]
    if all(kind == first for kind in kinds):
        return first
    floats = all(kind.is_float for kind in kinds)
    return FloatStorage("f32") if floats else MixedStorage(tuple(kinds))


def as_stored(spec: WeightSpec, source: Tensor | StoredWeight) -> WeightSpec:
    """Return the spec that a source fulfils, either as it is or transposed; quantized ones never are."""
    plain = replace(spec, transposed=False)
    if spec.transposed == "either" and source.storage.is_float:
        turned = replace(spec, transposed=True)
        return plain if outputs_axis(turned, source.shape) is None else turned
    return spec if not spec.transposed or source.storage.is_float else plain


def check(specs: Mapping[str, WeightSpec], tensors: Tensors, ignored: Iterable[str] = ()) -> None:
    """Raise one ConfigError unless the checkpoint has exactly the tensors of `specs`, besides `ignored`."""
    wanted = {source: spec for spec in specs.values() for source in spec.sources}
    missing = [name for name in wanted if name not in tensors]
    allowed = re.compile("|".join(map(translate, ignored)) or "(?!)")
    others = (name for name in tensors if name not in wanted and not allowed.match(name))
    unexpected = [name for name in others if not _adds_nothing(name, tensors)]
    misshaped = []
    for spec in specs.values():
        for source in spec.sources:
            entry = tensors.get(source)
            if entry is not None and outputs_axis(as_stored(spec, entry), entry.shape) is None:
                expected = " or ".join(str(list(s)) for s in _source_shapes(as_stored(spec, entry)))
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
    for name, spec in wanted.items():
        if not spec.below:
            _ = tensors[name].storage  # raises for unsupported number formats


def _adds_nothing(name: str, tensors: Tensors) -> bool:
    """Return True for a bias of zeros beside a quantized matrix: AutoGPTQ wrote one for every matrix."""
    matrix = tensors.get(name.removesuffix(".bias") + ".weight")
    if not name.endswith(".bias") or matrix is None or matrix.storage.is_float:
        return False
    return not tensors.pull(name).dense().any()


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
    if spec.stored:
        return [spec.stored, spec.shape] if len(spec.shape) == 1 else [spec.stored]
    shape = spec.shape[1:] if len(spec.sources) > 1 else spec.shape
    if spec.by_head is not None:
        heads, rows, width = shape if spec.by_head == "outputs" else _exchanged(shape)
        shape = (heads * rows, width)
    if spec.rows is None:
        return [_exchanged(shape) if spec.transposed else shape]
    shapes = []
    for axis in (-2, -1):  # the outputs of a matrix, or of the biases of several experts
        if len(shape) + axis >= 0:
            wide = list(shape)
            wide[axis] = wide[axis] // spec.rows.taken * spec.rows.period
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
