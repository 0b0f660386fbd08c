"""The work of `quire quantize`: round a model operation by operation, and measure what was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from quire.cli.quantize_model import Original, from_rows, pulled, rows_of
from quire.errors import ConfigError, quoted
from quire.program.ops.latent import LatentAttention
from quire.program.ops.linear import Linear, LinearByHead
from quire.program.program import Op, Value, WeightSpec
from quire.progress import Advance
from quire.quantize.compensate import DAMPING, Mapper, Moments, compensated
from quire.quantize.grid import Grid, Rounded, nearest
from quire.quantize.kinds import Array, Dense, Floats
from quire.quantize.quality import Quality, compare
from quire.quantize.walk import TextRun, quantizable, tables
from quire.weights.load import canonical
from quire.weights.tensors import Tensors

TABLE_DAMPING = (
    1.0  # of a matrix that is also the embedding, where its own error matters besides the outputs'
)

Write = Callable[[str, Rounded], None]  # (name of a source, its matrix on a grid)


@dataclass(slots=True)
class Rounding:
    """The quantization of a model: two computations of the calibration text, before and after rounding.

    `grids` are those of the matrices to quantize, by name; each is given to `write` once it is rounded.
    """

    original: Original
    grids: Mapping[str, Grid]
    write: Write
    mapper: Mapper = map
    _moments: tuple[int, Moments] | None = field(default=None, init=False)
    _wholes: dict[str, Floats] = field(default_factory=dict, init=False)
    _takers: Counter[str] = field(default_factory=Counter, init=False)

    def run(self, ids: Array, advance: Advance) -> None:
        """Round every matrix, for texts [texts, T]."""
        program, tied = self.original.program, tables(self.original.program)
        self._takers.update(s.sources[0] for op in program for s in self._chosen(op))
        before, after = self.original.stream(ids), self.original.stream(ids)
        last = max(n for n, op in enumerate(program) if any(self._chosen(op)))
        for number, op in enumerate(program.ops[: last + 1]):
            advance("rounding", number, last + 1)
            weights = self.original.weights(op)
            _check_finite(op, weights)
            rounded = dict(weights)
            if isinstance(op, Linear | LinearByHead) and self._is_chosen(op.weight.name):
                damping = TABLE_DAMPING if op.weight.name in tied else DAMPING
                found = self._stored(number, op, before, after, damping)
                rounded[op.weight.name] = canonical(op.weight, Dense(found)).dense()
            elif any(self._chosen(op)):
                rounded = self._round_experts(op, weights, after)
            else:  # the table of an embedding is rounded when its product is reached
                rounded |= {n: nearest(weights[n], self.grids[n]).dense() for n in weights if n in self.grids}
            if number < last:
                before.compute(number, weights)
                after.compute(number, rounded)

    def _is_chosen(self, name: str) -> bool:
        return name in self.grids

    def _chosen(self, op: Op) -> Iterator[WeightSpec]:
        return (spec for spec in quantizable(op) if self._is_chosen(spec.name))

    def _stored(
        self, number: int, op: Linear | LinearByHead, before: TextRun, after: TextRun, damping: float
    ) -> Floats:
        """Return a rounded matrix as it is stored: all rows, when the first op that takes some is reached."""
        spec, source = op.weight, op.weight.sources[0]
        if (known := self._wholes.pop(source, None)) is not None:
            return self._kept(source, known)
        moments = self._of_input(self._input(number, op), before, after)
        weight = pulled(replace(spec, rows=None, by_head=None), self.original.tensors)
        target = moments.corrected(weight, damping)
        found = compensated(target, moments.damped(damping), self.grids[spec.name], self.mapper)
        self.write(source, found)
        return self._kept(source, found.dense())

    def _kept(self, source: str, whole: Floats) -> Floats:
        """Keep a rounded matrix until the last op that takes rows of it."""
        self._takers[source] -= 1
        if self._takers[source] > 0:
            self._wholes[source] = whole
        return whole

    def _input(self, number: int, op: Linear | LinearByHead) -> Value:
        """Return the input of a matrix as it is stored: of those of heads, the latents of their attention."""
        if isinstance(op, Linear):
            return op.x
        return next(
            later.c for later in self.original.program.ops[number:] if isinstance(later, LatentAttention)
        )

    def _of_input(self, x: Value, before: TextRun, after: TextRun) -> Moments:
        """Return the moments of an input of products; several that share it are computed once."""
        if self._moments is None or self._moments[0] != x.index:
            moments = Moments.empty(x.width)
            moments.add(before.inputs(x), after.inputs(x))
            self._moments = (x.index, moments)
        return self._moments[1]

    def _round_experts(self, op: Op, weights: dict[str, Floats], after: TextRun) -> dict[str, Floats]:
        """Round the experts of an op one matrix after the other, with the inputs each gets from the last.

        The two models choose different experts for a few tokens, so their inputs are not compared.
        """
        rounded = dict(weights)
        for spec in self._chosen(op):
            width = spec.shape[-1]
            seen = [Moments.empty(width) for _ in range(spec.shape[0])]

            def watch(
                name: str, expert: int, x: Floats, spec: WeightSpec = spec, seen: list[Moments] = seen
            ) -> None:
                if name == spec.name:
                    seen[expert].add(x, x)

            after.results(op, rounded, watch)
            found = np.empty_like(weights[spec.name])
            for expert, moments in enumerate(seen):
                weight = weights[spec.name][expert]
                done = compensated(weight, moments.damped(DAMPING), self.grids[spec.name], self.mapper)
                self.write(spec.sources[expert], done)
                found[expert] = done.dense()
            rounded[spec.name] = found
        return rounded


def _check_finite(op: Op, weights: Mapping[str, Floats]) -> None:
    for spec in op.weights():
        if not np.isfinite(weights[spec.name]).all():
            raise ConfigError(
                f"tensor {quoted(spec.sources[0])} cannot be quantized: it holds numbers that are not finite",
                "fetch the checkpoint again",
            )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The cost of rounding on a text that was not calibrated on: to nearest, and as written."""

    nearest: Quality
    written: Quality


def measure(
    original: Original, grids: Mapping[str, Grid], written: Tensors, ids: Array, advance: Advance
) -> Comparison:
    """Compare both ways to round with the original, in float32, over texts [texts, T].

    `written` are the tensors of the new checkpoint.
    """
    streams = [original.stream(ids) for _ in range(3)]
    for number, op in enumerate(original.program):
        advance("measuring", number, len(original.program.ops))
        weights = original.weights(op)
        to_nearest = {spec.name: _nearest(spec, weights[spec.name], grids) for spec in op.weights()}
        as_written = {spec.name: pulled(spec, written) for spec in op.weights()}
        for stream, own in zip(streams, (weights, to_nearest, as_written), strict=True):
            stream.compute(number, own)
    base, *others = (stream.output() for stream in streams)
    return Comparison(*(compare([(base, other)]) for other in others))


def _nearest(spec: WeightSpec, weight: Floats, grids: Mapping[str, Grid]) -> Floats:
    grid = grids.get(spec.name)
    return weight if grid is None else from_rows(spec, nearest(rows_of(spec, weight), grid).dense())
