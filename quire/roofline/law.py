"""The law of a step's time at the measured ceilings: what no implementation could beat on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, cast

from quire.backends.kv_cache import KV_ITEM_BYTES, KV_SCALE_BYTES
from quire.engine.step_law import Place, Stage, StepLaw
from quire.roofline.folded import FoldedCost, Part, fold
from quire.roofline.probe import Ceilings, level_bytes

if TYPE_CHECKING:
    from quire.description import Description
    from quire.program.program import Program
    from quire.weights.plan import WeightPlan


def fold_costs(description: Description) -> FoldedCost:
    """Fold the costs of a model on its device."""
    return _fold(description, description.program, description.weights)


def fold_draft_costs(description: Description) -> FoldedCost | None:
    """Fold the costs of the model that drafts for it, if there is one."""
    draft = description.draft
    return None if draft is None else _fold(description, draft.program, draft.weights or description.weights)


def _fold(description: Description, program: Program, weights: WeightPlan) -> FoldedCost:
    device, kv_dtype = description.device, description.kv_dtype
    return fold(
        program,
        weights.stored_bytes,
        kv_itemsize=KV_ITEM_BYTES[kv_dtype],
        kv_scale_bytes=KV_SCALE_BYTES.get(kv_dtype, 0),
        arithmetic=lambda op: device.arithmetic_of(op, weights.storage, kv_dtype),
        tile_rows=device.tile_rows,
    )


def law_at_the_roof(
    folded: FoldedCost, ceilings: Ceilings, levels: Mapping[str, int] | None = None
) -> StepLaw:
    """Return the law of steps at the ceilings, without overhead; there is a stage for each group of ops.

    Weights and cached positions are read once, from memory, or from the cache that holds all weights. Values
    cost nothing: they can stay in a cache or in registers. `levels` are the bytes that each thread read at
    each level, by default those that were measured.
    """
    weight_bytes = folded.total.cost(_largest(folded)).weight_bytes
    sizes = level_bytes() if levels is None else levels
    read = ceilings.read_bytes[ceilings.threads]
    fitting = [level for level in read if sizes.get(level, 0) * ceilings.threads >= weight_bytes]
    level = fitting[0] if fitting else "memory"
    place: Place = "memory" if level == "memory" else "cache"
    names = dict.fromkeys(part.name for part in folded.parts)
    stages = tuple(
        _stage([part for part in folded.parts if part.name == name], ceilings, read[level], place)
        for name in names
    )
    return StepLaw(folded.features, stages, (0.0,) * len(folded.features), stages)


def _stage(parts: list[Part], ceilings: Ceilings, bandwidth: float, place: Place) -> Stage:
    """Return the stage of parts with one name, which may differ in their arithmetic."""
    memory = _sum(
        [byte / bandwidth for byte in row]
        for part in parts
        for row in (part.weight_bytes, part.kv_read_bytes, part.kv_write_bytes)
    )
    arithmetic = _sum(
        [flop / (ceilings.operations[part.arithmetic] or ceilings.operations["f32"]) for flop in part.flops]
        for part in parts
    )
    kind = max(parts, key=lambda part: sum(part.flops)).arithmetic
    return Stage(memory, arithmetic, parts[0].name, place, cast(Literal["int8", "bf16", "f32"], kind))


def _largest(folded: FoldedCost) -> tuple[float, ...]:
    """Return features of a step that reads every weight once, as far as it is not read by token."""
    return tuple([float(feature.kind in ("one", "experts", "logit_experts")) for feature in folded.features])


def _sum(rows: Iterable[Iterable[float]]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))
