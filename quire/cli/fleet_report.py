"""The report of simulated replicas: a table of routers, what became of the replicas, and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.metrics import percentile, summarize
from quire.bench.report import shown_ms, spark
from quire.goals import Goal
from quire.plots import Axis, Chart, Rule, Series
from quire.simulation.fleet import ReplicaCounts
from quire.simulation.fleet_run import SimulatedFleet

_COLUMNS = 64  # of the line of replicas over time
_PIECES = 60  # of the run, in plots
_SHARES = (*range(1, 100), 99.5, 99.9)


def comparison(found: Mapping[str, SimulatedFleet], goal: Goal) -> str:
    """Return a table with a line for each router."""
    heads = ("TTFT p50", "p90", "p99 ms", "TPOT p50", "p99 ms", "cached", "broke goal")
    width = max(12, *map(len, found))
    lines = [f"{'router':{width}}" + "".join(f"{head:>11}" for head in heads)]
    for name, done in found.items():
        summary = summarize(done.timelines, done.end_s, goal)
        times = [getattr(summary.ttft, share, None) for share in ("p50", "p90", "p99")]
        times += [getattr(summary.tpot, share, None) for share in ("p50", "p99")]
        cells = ["-" if value is None else shown_ms(value) for value in times]
        cells += [f"{done.cached_share:.1%}", f"{done.violated_share(goal):.2%}" if goal else "-"]
        lines.append(f"{name:{width}}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def history(done: SimulatedFleet) -> str:
    """Return what became of the replicas."""
    ready = _over_time(done.counts, done.end_s, _COLUMNS)
    busy_share = done.busy_s / (done.replica_s or 1.0)
    lines = [
        f"{done.replica_s / 3600:.3g} replica-hours, the device busy {busy_share:.0%} of them; "
        f"{done.cached_share:.1%} of prompt tokens cached"
    ]
    if max(ready) > min(ready):
        lines.append(f"replicas ready {spark(ready)} from {min(ready):g} to {max(ready):g}")
    if done.num_deaths:
        lines.append(f"{done.num_deaths} replicas died; {done.num_resumed} requests went on elsewhere")
    if done.num_without_affinity:
        reasons = ", ".join(f"{count:,} {name}" for name, count in done.num_without_affinity.most_common())
        lines.append(f"choices without regard for cached blocks: {reasons}")
    return "\n".join(lines)


def as_json(done: SimulatedFleet, goal: Goal) -> dict[str, Any]:
    """Return the figures of the replicas."""
    return {
        "replica_s": done.replica_s,
        "device_busy_s": done.busy_s,
        "cached_share": done.cached_share,
        "violated_share": done.violated_share(goal) if goal else None,
        "steps": done.num_steps,
        "preemptions": done.num_preemptions,
        "deaths": done.num_deaths,
        "resumed": done.num_resumed,
        "without_affinity": dict(done.num_without_affinity),
        "replicas": [one._asdict() for one in done.counts],
    }


def charts(found: Mapping[str, SimulatedFleet], goal: Goal) -> list[Chart]:
    """Return the plots: TTFT by percentile, replicas over time and, with a goal, what broke it."""
    rules = [Rule(one.limit_ms, str(one)) for one in goal.limits if one.measure == "ttft"]
    by_share = [Series(name, _percentiles(done), markers=False) for name, done in found.items()]
    x, y = Axis("percentile", "%", low=0, high=100), Axis("time to first token", "ms", log=True)
    shown = [Chart("Time to first token", x, y, by_share, rules)]
    replicas = [
        Series(f"{name}: {kind}", _steps(done, place), markers=False)
        for name, done in found.items()
        for kind, place in (("ready", 1), ("starting", 2), ("draining", 3))
        if any(counts[place] for counts in done.counts)
    ]
    time = Axis("time", "s", low=0)
    shown.append(Chart("Replicas over time", time, Axis("replicas", low=0), replicas))
    if goal:
        broken = [Series(name, _broken(done, goal), markers=False) for name, done in found.items()]
        y = Axis("requests that broke the goal", "%", low=0)
        shown.append(Chart(f"Requests that broke {goal}, by their arrival", time, y, broken))
    return shown


def _percentiles(done: SimulatedFleet) -> list[tuple[float, float]]:
    ranked = sorted(1e3 * one.ttft_s for one in done.timelines if one.ttft_s is not None)
    return [(share, percentile(ranked, share)) for share in _SHARES] if ranked else []


def _steps(done: SimulatedFleet, place: int) -> list[tuple[float, float]]:
    """Return a line with a corner at each change."""
    points: list[tuple[float, float]] = []
    for counts in done.counts:
        if points:
            points.append((counts.at_s, points[-1][1]))
        points.append((counts.at_s, float(counts[place])))
    return [*points, (done.end_s, points[-1][1])]


def _broken(done: SimulatedFleet, goal: Goal) -> list[tuple[float, float]]:
    width_s = max(one.sent_s for one in done.timelines) / _PIECES or 1.0
    sent, broke = [0] * _PIECES, [0] * _PIECES
    for one in done.timelines:
        piece = min(int(one.sent_s / width_s), _PIECES - 1)
        sent[piece] += 1
        broke[piece] += not one.keeps(goal)
    return [((i + 0.5) * width_s, 100 * broke[i] / sent[i]) for i in range(_PIECES) if sent[i]]


def _over_time(counts: Sequence[ReplicaCounts], end_s: float, num_pieces: int) -> list[float]:
    found, place = [], 0
    for index in range(num_pieces):
        while place + 1 < len(counts) and counts[place + 1].at_s <= (index + 1) * end_s / num_pieces:
            place += 1
        found.append(float(counts[place].num_ready))
    return found
