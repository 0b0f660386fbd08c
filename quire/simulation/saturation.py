"""Saturation of a simulated engine, and how sensitive latencies are to the time of steps near it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.bench.metrics import Timeline
from quire.bench.workload import Request
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import StepLaw
from quire.simulation.clients import Bounds
from quire.simulation.shares import slower
from quire.simulation.simulate import Simulated, simulate

HIGH = 0.9  # of saturation: above it, the error of a step's time grows many times over in waiting times
MARGIN = 0.02  # of the time of steps, by which sensitivity is found
FULL_BATCHES = 4  # requests for each place, to find the rate of a full engine


def saturation_rate(scheduler: Scheduler, law: StepLaw, requests: Sequence[Request]) -> float:
    """Return the requests per second that an engine completes when as many wait as it likes.

    By the tokens of the middle half of the time: filling up and running empty do not count. There should be
    FULL_BATCHES times as many requests as the scheduler runs at once; of more, the first are taken.
    """
    several = requests[: FULL_BATCHES * scheduler.max_num_seqs]
    bounds = Bounds(max_concurrency=scheduler.max_num_seqs)
    done = simulate(scheduler, law, several, bounds=bounds, is_open=False)
    finished = [one for one in done.timelines if not one.error]
    num_tokens = sum(one.num_output_tokens for one in finished)
    if not num_tokens or not done.end_s:
        return 0.0
    first_s, last_s = done.end_s / 4, 3 * done.end_s / 4
    num_middle = sum(first_s <= at_s < last_s for one in finished for at_s in one.chunk_s)
    return num_middle / (last_s - first_s) * len(finished) / num_tokens


def offered_rate(requests: Sequence[Request]) -> float:
    """Return the requests per second of an open loop, 0 for a single request."""
    if len(requests) < 2:
        return 0.0
    span_s = requests[-1].at_s - requests[0].at_s
    return (len(requests) - 1) / span_s if span_s else float("inf")


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Mean latencies, relative to those of the law, if all steps take `factor` times as long.

    None: no request has that latency, such as a time per output token if each gives one token.
    """

    factor: float
    ttft: float | None
    tpot: float | None


def sensitivities(run: Callable[[StepLaw], Simulated], law: StepLaw, base: Simulated) -> list[Sensitivity]:
    """Return the sensitivity to steps that are a little faster, and a little slower."""
    found = []
    for factor in (1 - MARGIN, 1 + MARGIN):
        changed = run(slower(law, factor)).timelines
        ratios = (_ratio(changed, base.timelines, kind) for kind in ("ttft_s", "tpot_s"))
        found.append(Sensitivity(factor, *ratios))
    return found


def _ratio(changed: Sequence[Timeline], base: Sequence[Timeline], kind: str) -> float | None:
    mean_s = _mean(base, kind)
    return _mean(changed, kind) / mean_s if mean_s else None


def _mean(timelines: Sequence[Timeline], kind: str) -> float:
    values = [value for one in timelines if (value := getattr(one, kind)) is not None]
    return sum(values) / len(values) if values else 0.0
