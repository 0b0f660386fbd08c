"""Mixed precision: the sensitivity of every part of a model, measured, and the bits it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quire.cli.quantize_model import Original, from_rows, grid_of, parts_of, rows_of
from quire.errors import ConfigError
from quire.program.program import WeightSpec
from quire.progress import Advance
from quire.quantize.allocate import Form, allocate
from quire.quantize.grid import Grid, nearest
from quire.quantize.kinds import Array, Floats
from quire.quantize.quality import divergence
from quire.quantize.walk import TextRun, tables

CANDIDATES = (
    (4, 128),
    (4, 64),
    (4, 32),
    (8, 128),
)  # (bits, group); sensitivities are measured with the first
TABLE_CANDIDATES = (*CANDIDATES, (5, 64), (6, 64))  # of an embedding, which no other engine reads quantized
_SAMPLED = 256  # rows of a matrix whose errors are compared between candidates


@dataclass(frozen=True, slots=True)
class RatedPart:
    """Matrices that get the same bits, and the divergence measured with them alone rounded coarsely."""

    specs: list[WeightSpec]
    candidates: list[tuple[tuple[int, int], Form]]  # ((bits, group), its bytes and expected divergence)


def uniform(original: Original, specs: Mapping[str, WeightSpec], bits: int, group: int) -> dict[str, Grid]:
    """Return the grid of each matrix if all have the same bits."""
    return {name: grid_of(original, spec, bits, group) for name, spec in specs.items()}


def mixed(
    original: Original, specs: Mapping[str, WeightSpec], bits: float, ids: Array, advance: Advance
) -> dict[str, Grid]:
    """Return the grid of each matrix for a mean of `bits` bits a weight, scales included.

    Raises ConfigError if even the coarsest grids have more.
    """
    parts = measured(original, parts_of(original.program, specs), ids, advance)
    weights = sum(spec.size for spec in specs.values())
    offers = [[candidate for _, candidate in part.candidates] for part in parts]
    chosen = allocate(offers, int(bits * weights / 8))
    if not chosen:
        least = 8 * sum(min(c.nbytes for c in own) for own in offers) / weights
        raise ConfigError(
            f"bits = {bits:g}: the smallest form of this model has {least:.3f} bits a weight with its scales",
            f"give at least {np.ceil(least * 100) / 100:g}",
        )
    return {
        spec.name: grid_of(original, spec, *part.candidates[i][0])
        for part, i in zip(parts, chosen, strict=True)
        for spec in part.specs
    }


def measured(
    original: Original, parts: Sequence[list[WeightSpec]], ids: Array, advance: Advance
) -> list[RatedPart]:
    """Measure the divergence of each part alone, on texts [texts, T]; its other forms follow by errors.

    Quantization noise enters the result by its squared size: the divergence of a candidate is that of the
    first, times the ratio of the squared errors of the weights.
    """
    program = original.program
    stream = original.stream(ids)
    base = finished(original, stream.fork(), 0, {})
    first_use = {spec.name: n for n, op in reversed([*enumerate(program)]) for spec in op.weights()}
    found: dict[int, RatedPart] = {}
    for number, op in enumerate(program):
        for index, specs in enumerate(parts):
            if first_use[specs[0].name] == number:
                advance("measuring sensitivities", len(found), len(parts))
                found[index] = _measured(original, specs, stream.fork(), number, base)
        if len(found) == len(parts):
            break
        stream.compute(number, original.weights(op))
    return [found[index] for index in range(len(parts))]


def _measured(
    original: Original, specs: list[WeightSpec], stream: TextRun, number: int, base: Array
) -> RatedPart:
    changed: dict[str, Floats] = {}
    of_table = any(spec.name in tables(original.program) for spec in specs)
    candidates = TABLE_CANDIDATES if of_table else CANDIDATES
    errors, nbytes = np.zeros(len(candidates)), [0] * len(candidates)
    for spec in specs:
        weight = original.weight(spec)
        rows = rows_of(spec, weight)
        sample = rows[:: -(-len(rows) // _SAMPLED)]
        for i, candidate in enumerate(candidates):
            grid = grid_of(original, spec, *candidate)
            nbytes[i] += grid.nbytes(*rows.shape)
            errors[i] += len(rows) / len(sample) * np.square(nearest(sample, grid).dense() - sample).sum()
        grid = grid_of(original, spec, *CANDIDATES[0])
        changed[spec.name] = from_rows(spec, nearest(rows, grid).dense())
    loss = max(0.0, float(divergence(base, finished(original, stream, number, changed)).mean()))
    ratios = errors / errors[0] if errors[0] > 0 else np.zeros_like(errors)
    offers = [Form(n, loss * float(ratio)) for n, ratio in zip(nbytes, ratios, strict=True)]
    return RatedPart(specs, list(zip(candidates, offers, strict=True)))


def finished(original: Original, stream: TextRun, number: int, changed: Mapping[str, Floats]) -> Array:
    """Compute the ops from `number` on with these weights in place of their originals; return logits."""
    for later, op in enumerate(original.program):
        if later >= number:
            weights = {
                s.name: changed[s.name] if s.name in changed else original.weight(s) for s in op.weights()
            }
            stream.compute(later, weights)
    return stream.output()
