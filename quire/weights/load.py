"""Loading: the weights a program names, pulled from a checkpoint, all of them or none.

Everything is checked on names and shapes before the first byte of data is touched. Unquantized weights
stay views of the mapped file wherever they are stored as the program wants them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import translate

import numpy as np

from quire.errors import ConfigError, shortened
from quire.program.program import WeightSpec
from quire.quantize.kinds import DTYPES, Array, Dense, Int4, Int8, Storage, to_float32
from quire.quantize.round_to_nearest import Mapper, kind_of, quantize
from quire.weights.safetensors import Checkpoint

Progress = Callable[[int, int], None]  # (bytes of the checkpoint done, in all)

_LISTED = 10  # names in one error
_BARE = "transformer."
_HEAD = "lm_head.weight"
_ROWS = 1024  # compared at a time
_PREFIXES = ("model.", "language_model.", "transformer.", "model.language_model.")


def load(
    specs: Mapping[str, WeightSpec],
    checkpoint: Checkpoint,
    ignored: Iterable[str] = (),
    quantization: str | None = None,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> dict[str, Dense | Int8 | Int4]:
    """Every weight of `specs`, in canonical shape; quantizable ones rounded to `quantization`.

    `ignored` are patterns (fnmatch) of tensors that may be left over. Raises one ConfigError that lists
    what is missing, left over, of another shape or in a number format that is not read.
    The result does not depend on `num_threads` (default: one per processor, at most 16).
    """
    checkpoint = whole(specs, checkpoint)
    check(specs, checkpoint, ignored)
    threads = num_threads or min(os.cpu_count() or 1, 16)
    total = sum(checkpoint[source].nbytes for spec in specs.values() for source in spec.sources)
    done, weights = 0, {}
    with ThreadPoolExecutor(threads, thread_name_prefix="quire-load") as pool:
        for name, spec in specs.items():
            weights[name] = _pull(spec, checkpoint, quantization, pool.map)
            done += sum(checkpoint[source].nbytes for source in spec.sources)
            if progress is not None:
                progress(done, total)
    return weights


def plan(
    specs: Mapping[str, WeightSpec],
    checkpoint: Checkpoint,
    quantization: str | None = None,
    ignored: Iterable[str] = ("*",),
) -> dict[str, Storage]:
    """How `load` will store every weight, from the headers alone; `.nbytes(spec.shape)` are its bytes.

    Raises ConfigError as `load` does, though tensors left over are no error unless `ignored` is given.
    """
    checkpoint = whole(specs, checkpoint)
    check(specs, checkpoint, ignored)
    return {name: kind_of(spec, stored_kind(spec, checkpoint), quantization) for name, spec in specs.items()}


def whole(specs: Mapping[str, WeightSpec], checkpoint: Checkpoint) -> Checkpoint:
    """A bare decoder, as GPT-2 was published, under the names of the whole model; others as they are."""
    wanted = {source for spec in specs.values() for source in spec.sources}
    bare = wanted and all(name.startswith(_BARE) and name not in checkpoint for name in wanted)
    if bare and all(name.removeprefix(_BARE) in checkpoint for name in wanted):
        return checkpoint.under(_BARE)
    return checkpoint


def has_own_head(checkpoint: Checkpoint, tied: str) -> bool:
    """Return True if lm_head.weight is there and differs from `tied`, which config.json puts in its place.

    Both are read as far as they are equal.
    """
    if _HEAD not in checkpoint or tied not in checkpoint:
        return False
    head, table = checkpoint.read(_HEAD), checkpoint.read(tied)
    if head.shape != table.shape:
        return True
    parts = range(0, len(head), _ROWS)
    return any(
        not np.array_equal(to_float32(head[i : i + _ROWS]), to_float32(table[i : i + _ROWS])) for i in parts
    )


def check(specs: Mapping[str, WeightSpec], checkpoint: Checkpoint, ignored: Iterable[str] = ()) -> None:
    """Raise one ConfigError unless the checkpoint holds what `specs` want and nothing but `ignored` else."""
    wanted = {source: spec for spec in specs.values() for source in spec.sources}
    missing = [name for name in wanted if name not in checkpoint]
    allowed = re.compile("|".join(map(translate, ignored)) or "(?!)")
    unexpected = [name for name in checkpoint if name not in wanted and not allowed.match(name)]
    misshaped = []
    for spec in specs.values():
        for source in spec.sources:
            if source in checkpoint and _axis(spec, checkpoint[source].shape) is None:
                entry = checkpoint[source]
                expected = " or ".join(str(list(s)) for s in _source_shapes(spec))
                name = shortened(source)
                misshaped.append(f"{name} {list(entry.shape)} in {entry.file.name}, expected {expected}")
    faults = (
        _listing("missing", missing),
        _listing("not part of this model", unexpected),
        _listing("of another shape than config.json says", list(dict.fromkeys(misshaped))),
    )
    if any(faults):
        listed = "; ".join(filter(None, faults))
        hint = _hint(missing, set(checkpoint) - set(wanted), bool(misshaped or unexpected))
        raise ConfigError(f"{checkpoint.path}: the checkpoint does not fit the model: {listed}", hint)
    for name in wanted:
        _ = checkpoint[name].kind  # raises for number formats that are not read


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
    if missing == [_HEAD]:
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


def _axis(spec: WeightSpec, found: tuple[int, ...]) -> int | None:
    """The axis of the outputs, -2 or -1, if a source of shape `found` gives this weight; else None."""
    shapes = _source_shapes(spec)
    if found not in shapes:
        return None
    return -1 if len(found) == 1 else (-2, -1)[shapes.index(found)]


def _exchanged(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def canonical(spec: WeightSpec, array: Array) -> Array:
    """A view of one source with axes and outputs as the program wants them."""
    axis = _axis(spec, array.shape)
    if spec.transposed:
        array = array.swapaxes(-1, -2)
    if spec.interleaved is None:
        return array
    outputs = slice(spec.interleaved[0], None, spec.interleaved[1])
    return array[..., outputs] if axis == -1 else array[..., outputs, :]


def stored_kind(spec: WeightSpec, checkpoint: Checkpoint) -> str:
    """What the sources are stored in; f32, which holds all of them, when they differ."""
    kinds = {checkpoint[source].kind for source in spec.sources}
    return kinds.pop() if len(kinds) == 1 else "f32"


def _pull(
    spec: WeightSpec, checkpoint: Checkpoint, quantization: str | None, mapper: Mapper
) -> Dense | Int8 | Int4:
    arrays = [canonical(spec, checkpoint.read(source)) for source in spec.sources]
    kind = stored_kind(spec, checkpoint)
    if kind_of(spec, kind, quantization).kind not in DTYPES:
        return quantize(spec, arrays[0] if len(arrays) == 1 else arrays, str(quantization), mapper)
    if len(arrays) == 1:
        return Dense(np.ascontiguousarray(arrays[0]))
    stack = np.empty(spec.shape, DTYPES[kind])
    for i, array in enumerate(arrays):
        stack[i] = array if array.dtype == stack.dtype else to_float32(array)
    return Dense(stack)
