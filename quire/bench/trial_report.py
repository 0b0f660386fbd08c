"""The report of several trials: a line for each, the result of a search, and all figures as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.bench.definitions import MEASURES
from quire.bench.metrics import Summary
from quire.bench.report import as_json, shown_ms
from quire.bench.search import Trial
from quire.bench.trials import Outcome
from quire.goals import Goal, Limit

# Shown where there is no goal
TRIAL_LIMITS = tuple(Limit(measure, kind, 0.0) for measure in ("ttft", "itl") for kind in ("p50", "p99"))


def alone_line(summary: Summary) -> str:
    """Return the latencies of requests that are alone in the server."""
    found = {name: getattr(summary, name) for name in MEASURES}
    means = ", ".join(f"{MEASURES[name].name} {shown_ms(one.mean)} ms" for name, one in found.items() if one)
    return f"alone: {means} (means of {summary.completed} requests, one after the other)"


def trial_heading(goal: Goal) -> str:
    """Return the heading of the lines that `trial_line` returns."""
    names = "".join(f"{limit.name:>11}" for limit in goal.limits or TRIAL_LIMITS)
    return (
        f"{'rate':>8}{'answers':>9}{'tokens':>9}{'open':>6}{names}\n{'1/s':>8}{'1/s':>9}{'1/s':>9}{'':6}"
        + (f"{'ms':>11}" * len(goal.limits or TRIAL_LIMITS))
    )


def trial_line(trial: Trial) -> str:
    """Return a trial as a line: its rate, throughput, the latencies of the goal, and the verdict."""
    summary, figures = trial.summary, trial.summary.figures()
    tokens = summary.per_s(summary.num_output_tokens)
    values = (figures[limit.figure] for limit in trial.goal.limits or TRIAL_LIMITS)
    latencies = "".join(f"{'' if value is None else shown_ms(value):>11}" for value in values)
    verdict = trial.problem or ("keeps the goal" if trial.goal else "")
    counts = f"{trial.rate:8.2f}{trial.answers_per_s:9.2f}{tokens:9,.0f}{summary.max_concurrency:6}"
    return f"{counts}{latencies}  {verdict}".rstrip()


def outcome_text(outcome: Outcome, goal: Goal) -> str:
    """Return the result of a search: the rate, the interval of each search, and their spread."""
    lines = [f"highest rate that keeps {goal}: {outcome.rate:.2f} requests/s"]
    for number, one in enumerate(outcome.searches, 1):
        end = f"not at {one.high:.2f}" if math.isfinite(one.high) else "no rate was too high"
        lines.append(f"  search {number}: {one.low:.2f} requests/s, {end} ({len(one.trials)} trials)")
    if len(outcome.searches) > 1:
        lines.append(
            f"  spread: {outcome.spread:.1%}, from {outcome.rates[0]:.2f} to {outcome.rates[-1]:.2f}"
        )
    return "\n".join(lines)


def trials_json(
    trials: Sequence[Trial], goal: Goal, settings: dict[str, Any], outcome: Outcome | None, is_detailed: bool
) -> dict[str, Any]:
    """Return the figures of all trials, each as `as_json` has them, and the result of a search."""
    found = [
        {
            "request_rate": trial.rate,
            "answers_per_s": trial.answers_per_s,
            "ttft_growth": trial.wait_growth,
            "problem": trial.problem,
            **as_json(trial.run, goal, {}, is_detailed),
        }
        for trial in trials
    ]
    result: dict[str, Any] = {"options": settings, "goal": str(goal), "trials": found}
    if outcome is not None:
        result["highest_request_rate"] = outcome.rate
        result["spread"] = outcome.spread
        result["searches"] = [{"keeps": one.low, "breaks": one.high} for one in outcome.searches]
    return result
