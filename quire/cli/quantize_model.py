"""An unquantized model as `quire quantize` reads it: its matrices, their parts, their grids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.errors import ConfigError
from quire.models import Model, read_model
from quire.program.ops.experts import Experts
from quire.program.ops.linear import Linear, LinearByHead
from quire.program.program import Op, Program, WeightSpec
from quire.quantize.grid import Grid
from quire.quantize.kinds import DTYPES, Array, Floats
from quire.quantize.walk import TextRun, quantizable, tables, text_batch
from quire.weights.load import canonical, has_own_head, pull_source
from quire.weights.plan import plan
from quire.weights.renamed import under_own_names
from quire.weights.source import ModelSource
from quire.weights.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Original:
    """An unquantized model: its program as recorded, before any fusion, and its tensors."""

    source: ModelSource
    model: Model
    tensors: Tensors

    @property
    def program(self) -> Program:
        return self.model.program

    @classmethod
    def opened(cls, source: ModelSource) -> Original:
        """Open a model. Raises ConfigError if it does not fit its weights or is quantized already."""
        raw = source.config()
        model = read_model(raw)
        tensors = under_own_names(model.program.weights(), source.tensors())
        if model.tied_tensor is not None and has_own_head(tensors, model.tied_tensor):
            model = read_model({**raw, "tie_word_embeddings": False})
        specs = model.program.weights()
        program = model.program
        stored = plan(specs, tensors, ignored=program.ignored, left_out=program.left_out).stored
        for name, storage in stored.items():
            if not storage.is_float:
                what = f"{source.where} is quantized already: {name} is stored as {storage}"
                raise ConfigError(what, "quantize the original checkpoint: rounding twice costs more")
        return cls(source, model, tensors)

    def weight(self, spec: WeightSpec) -> Floats:
        """Return a weight in canonical shape, as float32."""
        return pulled(spec, self.tensors)

    def weights(self, op: Op) -> dict[str, Floats]:
        """Return the weights of an op."""
        return {spec.name: self.weight(spec) for spec in op.weights()}

    def stream(self, ids: Array) -> TextRun:
        """Return a computation of texts of one length, [texts, T]."""
        return TextRun(self.program, text_batch(self.program, ids, self.model.context_variant(ids.shape[1])))


def pulled(spec: WeightSpec, tensors: Tensors) -> Floats:
    """Return a weight in canonical shape, as float32, and release the memory of the file."""
    parts = [canonical(spec, pull_source(spec, source, tensors)).dense() for source in spec.sources]
    found = parts[0] if len(parts) == 1 else np.stack(parts)
    found = np.array(found, np.float32)  # a copy: what is released may be read again from the file
    for source in spec.sources:
        tensors.release(source)
    return found


def matrices(original: Original, embedding: bool) -> dict[str, WeightSpec]:
    """Return the matrices that can be written quantized, by name: those whose sources are [out, in].

    `embedding` includes one that is also the embedding table. Raises ConfigError if there are none.
    """
    kept = frozenset() if embedding else tables(original.program)
    found = dict[str, WeightSpec]()
    takers: dict[str, list[tuple[int, WeightSpec]]] = {}  # by source: those of some rows, with an input
    routers = {op.scores.index for op in original.program if isinstance(op, Experts)}
    for op in original.program:
        if isinstance(op, Linear) and op.out.index in routers:
            continue  # a few weights, which other engines read as they are
        for spec in quantizable(op):
            if spec.transposed or spec.name in kept or not all(s.endswith(".weight") for s in spec.sources):
                continue
            if spec.rows is not None and isinstance(op, Linear | LinearByHead):
                key = op.x.index if isinstance(op, Linear) else -1
                takers.setdefault(spec.sources[0], []).append((key, spec))
            elif spec.rows is None and (len(spec.shape) == 2 or len(spec.sources) == spec.shape[0]):
                found[spec.name] = spec
    for source, taking in takers.items():
        if _is_whole(original.tensors[source].shape, taking):
            found |= {spec.name: spec for _, spec in taking}
    if not found:
        raise ConfigError(
            f"{original.source.where}: none of its matrices can be written as compressed-tensors stores them",
            "they are stored transposed, or several experts together: use --quantization when loading it",
        )
    return found


def _is_whole(shape: tuple[int, ...], taking: list[tuple[int, WeightSpec]]) -> bool:
    """Return True if products of one input take each row of a stored matrix once."""
    rows: list[int] = []
    for _, spec in taking:
        which = spec.rows.of(shape[0]) if spec.rows is not None else []
        rows += range(shape[0])[which] if isinstance(which, slice) else which
    return len({key for key, _ in taking}) == 1 and len(shape) == 2 and sorted(rows) == [*range(shape[0])]


def width_of(spec: WeightSpec) -> int:
    """Return the inputs of a matrix as it is stored."""
    return spec.shape[-2 if spec.by_head == "inputs" else -1]


def grid_of(original: Original, spec: WeightSpec, bits: int, group: int) -> Grid:
    """Return the grid of a matrix: groups of the divisor of its width nearest to `group`, else whole rows.

    Scales are bfloat16 where the matrix is, else float16.
    """
    width = width_of(spec)
    fitting = [g for g in range(max(2, group // 2), 2 * group + 1) if width % g == 0]
    own = min(fitting, key=lambda g: (abs(g - group), g), default=width)
    stored = original.tensors[spec.sources[0]].storage.kind
    return Grid(bits, own, DTYPES["bf16" if stored == "bf16" else "f16"])


def parts_of(program: Program, specs: Mapping[str, WeightSpec]) -> list[list[WeightSpec]]:
    """Return the matrices in parts that get the same bits: those of one input, and those of one op.

    Other engines join the matrices of one input (q, k and v; gate and up) and need one format for them.
    """
    parts: dict[tuple[str, int | str], list[WeightSpec]] = {}
    for number, op in enumerate(program):
        for spec in quantizable(op):
            if spec.name in specs:
                key: tuple[str, int | str] = ("op", number)
                if isinstance(op, Linear | LinearByHead):
                    key = ("input", op.x.index) if isinstance(op, Linear) else ("source", spec.sources[0])
                parts.setdefault(key, []).append(spec)
    return list(parts.values())


def rows_of(spec: WeightSpec, weight: Floats) -> Floats:
    """Return the rows of a matrix, or of one for each expert or head, as they are stored: [rows, in]."""
    stored = weight.swapaxes(-1, -2) if spec.by_head == "inputs" else weight
    return stored.reshape(-1, stored.shape[-1])


def from_rows(spec: WeightSpec, rows: Floats) -> Floats:
    """Return a weight in canonical shape, from its rows as they are stored (see `rows_of`)."""
    if spec.by_head != "inputs":
        return rows.reshape(spec.shape)
    heads, inputs, outputs = spec.shape
    return rows.reshape(heads, outputs, inputs).swapaxes(-1, -2)
