"""Which setting reaches a goal: each knob alone, then two together, each computed with its throughput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from quire.config import QUANTIZATIONS
from quire.errors import ConfigError
from quire.goals import Goal
from quire.roofline.machines import catalogue
from quire.roofline.plan import MachinePlan
from quire.roofline.planning import make_plan, with_options
from quire.roofline.serving import Serving, Workload, serving

CHUNKS = tuple(1 << power for power in range(4, 15))  # tried for max_num_batched_tokens
CARDS = (2, 4, 8)  # tried in place of one


@dataclass(frozen=True, slots=True)
class Knob:
    """Settings that keep a goal at the typical share. `surely`: at the slow end of the range too."""

    settings: dict[str, Any]  # names of EngineConfig, "num_devices" or "machine"
    serving: Serving
    surely: bool

    def __str__(self) -> str:
        return " and ".join(_told(name, value) for name, value in self.settings.items())


def _told(name: str, value: Any) -> str:
    most = "at most " if name in ("max_num_seqs",) else ""
    return f"{name} {most}{value:,}" if isinstance(value, int) else f"{name} {value}"


def knobs(plan: MachinePlan, workload: Workload, goal: Goal) -> tuple[Knob, ...]:
    """Return what keeps the goal: settings first, then more cards, each with most tokens per second first.

    Pairs of settings are tried only if no single one keeps it, other machines only if nothing else does.
    """
    settings = _sorted(_one(plan, workload, goal)) or _sorted(_two(plan, workload, goal))
    found = [*settings, *_sorted(_cards(plan, workload, goal))]
    return tuple(found or _sorted(_machines(plan, workload, goal)))


def _sorted(found: Iterator[Knob]) -> list[Knob]:
    return sorted(found, key=lambda knob: -knob.serving.tokens_per_s.typical)


def _one(plan: MachinePlan, workload: Workload, goal: Goal) -> Iterator[Knob]:
    now = serving(plan, workload)
    if now is not None:
        yield from _fewer(plan, workload, goal, now.batch, {})
    yield from _chunks(plan, workload, goal, {})
    for other, settings in _smaller(plan):
        yield from _kept(other, workload, goal, settings)


def _two(plan: MachinePlan, workload: Workload, goal: Goal) -> Iterator[Knob]:
    """Yield quantization with another, and fewer sequences with smaller chunks."""
    for other, settings in ((plan, {}), *_smaller(plan)):
        now = serving(other, workload)
        if now is None:
            continue
        if settings:
            yield from _fewer(other, workload, goal, now.batch, settings)
            yield from _chunks(other, workload, goal, settings)
        for tokens in CHUNKS if not settings else ():
            chunked = _chunked(other, tokens)
            both = {"max_num_batched_tokens": tokens}
            yield from _fewer(chunked, workload, goal, now.batch, both)


def _cards(plan: MachinePlan, workload: Workload, goal: Goal) -> Iterator[Knob]:
    for cards in CARDS if plan.machine.kind == "gpu" else ():
        if cards > plan.cards:
            more = make_plan(plan.config, plan.machine, cards, plan.description)
            yield from _kept(more, workload, goal, {"num_devices": cards})


def _machines(plan: MachinePlan, workload: Workload, goal: Goal) -> Iterator[Knob]:
    for machine in catalogue():
        if machine.name != plan.machine.name:
            other = make_plan(plan.config, machine, plan.cards, plan.description)
            yield from _kept(other, workload, goal, {"machine": machine.name})


def _smaller(plan: MachinePlan) -> Iterator[tuple[MachinePlan, dict[str, Any]]]:
    """Yield the plan with each quantization of fewer bits than its own."""
    asked = plan.config.quantization
    for quantization in QUANTIZATIONS[QUANTIZATIONS.index(asked) + 1 if asked else 0 :]:
        try:
            yield with_options(plan, quantization=quantization), {"quantization": quantization}
        except ConfigError:  # this checkpoint cannot be quantized further
            continue


def _chunked(plan: MachinePlan, tokens: int) -> MachinePlan:
    config = replace(plan.config, max_num_batched_tokens=tokens)
    return replace(plan, description=replace(plan.description, config=config))


def _limited(plan: MachinePlan, sequences: int) -> MachinePlan:
    config = replace(plan.config, max_num_seqs=sequences)
    return replace(plan, description=replace(plan.description, config=config))


def _fewer(
    plan: MachinePlan, workload: Workload, goal: Goal, batch: int, settings: dict[str, Any]
) -> Iterator[Knob]:
    """Yield the largest number of sequences below `batch` that keeps the goal: fewer are never slower."""
    low, high = 0, batch - 1
    while low < high:
        middle = (low + high + 1) // 2
        found = serving(_limited(plan, middle), workload)
        low, high = (middle, high) if found and found.keeps(goal) else (low, middle - 1)
    if low:
        yield from _kept(_limited(plan, low), workload, goal, {**settings, "max_num_seqs": low})


def _chunks(plan: MachinePlan, workload: Workload, goal: Goal, settings: dict[str, Any]) -> Iterator[Knob]:
    """Yield the one size of chunks that keeps the goal with most tokens per second."""
    kept = [
        knob
        for tokens in CHUNKS
        if tokens != plan.config.max_num_batched_tokens
        for knob in _kept(
            _chunked(plan, tokens), workload, goal, {**settings, "max_num_batched_tokens": tokens}
        )
    ]
    if kept:
        yield max(kept, key=lambda knob: knob.serving.tokens_per_s.typical)


def _kept(plan: MachinePlan, workload: Workload, goal: Goal, settings: dict[str, Any]) -> Iterator[Knob]:
    found = serving(plan, workload)
    if found is not None and found.keeps(goal):
        yield Knob(settings, found, found.keeps(goal, "high"))
