"""Figures of a recording: what is in it, and the times of its steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.recording.entries import (
    Aborted,
    Added,
    Began,
    Committed,
    CommittedOutline,
    Composition,
    Outlined,
    Planned,
)
from quire.recording.incident import Recording


class StepTimes(NamedTuple):
    """The times of a recorded step, in seconds; `idle_s` is the device's pause before it."""

    number: int
    began_s: float
    num_rows: int
    num_tokens: int
    device_s: float
    idle_s: float
    mask_s: float
    sampling_s: float
    core_wait_s: float


@dataclass(slots=True)
class Figures:
    """Counts of a recording, the time from its first call to its last, and the times of committed steps."""

    num_epochs: int = 0
    num_requests: int = 0
    num_aborts: int = 0
    num_planned: int = 0
    num_prompt_tokens: int = 0
    span_s: float = 0.0
    steps: list[StepTimes] = field(default_factory=list)


def figures_of(recording: Recording) -> Figures:
    """Read all entries. Raises ConfigError for invalid ones."""
    figures, planned = Figures(), deque[Composition]()
    first_s: float | None = None
    for entry in recording.entries():
        if isinstance(entry, Began | Planned | Committed | CommittedOutline | Aborted):
            first_s = entry.now_s if first_s is None else first_s
            figures.span_s = entry.now_s - first_s
        match entry:
            case Began():
                figures.num_epochs += 1
                if figures.num_epochs == 1:
                    figures.num_requests += len(entry.epoch.requests) + len(entry.outlines)
            case Added(request):
                figures.num_requests += 1
                figures.num_prompt_tokens += len(request.prompt_token_ids)
            case Outlined(outline):
                figures.num_requests += 1
                figures.num_prompt_tokens += outline.num_tokens
            case Aborted():
                figures.num_aborts += 1
            case Planned(_, composition) if composition is not None:
                figures.num_planned += 1
                planned.append(composition)
            case Committed() | CommittedOutline() if planned:
                figures.steps.append(_times(planned.popleft(), entry, figures.steps))
    return figures


def _times(
    composition: Composition, entry: Committed | CommittedOutline, before: list[StepTimes]
) -> StepTimes:
    times = entry.times
    ended_s = before[-1].began_s + before[-1].device_s if before else times.began_s
    return StepTimes(
        number=composition.number,
        began_s=times.began_s,
        num_rows=len(composition.rows),
        num_tokens=composition.num_tokens,
        device_s=times.ended_s - times.began_s,
        idle_s=max(0.0, times.began_s - ended_s),
        mask_s=times.mask_s,
        sampling_s=times.sampling_s,
        core_wait_s=times.core_wait_s,
    )
