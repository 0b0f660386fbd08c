"""Charts of load tests: latency over rate for several trials, latency by percentile for one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.bench.definitions import MEASURES
from quire.bench.driver import LoadRun
from quire.bench.metrics import percentile
from quire.bench.search import Trial
from quire.goals import Goal, Limit
from quire.plots import Axis, Chart, Rule, Series

DEFAULT_LIMITS = tuple(Limit(measure, "p99", 0.0) for measure in ("ttft", "itl"))  # shown without a goal
_SHARES = (*range(1, 100), 99.5, 99.9)


def rate_chart(trials: Sequence[Trial], goal: Goal, highest: float | None = None) -> Chart:
    """Return the chart of latencies over rate. Trials of a saturated server have no latency that would last.

    Where a rate has several trials, the line is their mean and the band their range.
    """
    steady = [trial for trial in trials if not trial.is_saturated]
    series = []
    for limit in goal.limits or DEFAULT_LIMITS:
        values: dict[float, list[float]] = {}
        for trial in steady:
            value = trial.summary.figures()[limit.figure]
            if value is not None:
                values.setdefault(trial.rate, []).append(value)
        found = sorted(values.items())
        band = [(min(few), max(few)) for _, few in found] if len(steady) > len(found) else []
        points = [(rate, sum(few) / len(few)) for rate, few in found]
        series.append(Series(_title(limit), points, band))
    rules = [Rule(limit.limit_ms, str(limit)) for limit in goal.limits]
    if highest is not None:
        rules.append(Rule(highest, f"highest rate {highest:.3g}", vertical=True))
    beyond = min((trial.rate for trial in trials if trial.is_saturated), default=None)
    if beyond is not None:
        rules.append(Rule(beyond, f"saturated at {beyond:.3g}", vertical=True))
    x, y = Axis("request rate", "requests/s"), Axis("latency", "ms", log=True)
    return Chart("Latency over request rate", x, y, series, rules)


def percentile_chart(run: LoadRun, goal: Goal) -> Chart:
    """Return the chart of the latencies of one run by percentile."""
    done = [one for one in run.timelines if not one.error]
    seconds: dict[str, list[float | None]] = {
        "ttft": [one.ttft_s for one in done],
        "tpot": [one.tpot_s for one in done],
        "itl": [end - begin for one in done for begin, end in one.gaps()],
        "e2el": [one.e2el_s for one in done],
    }
    series = [Series(MEASURES[name].name, _by_share(found), markers=False) for name, found in seconds.items()]
    rules = [Rule(limit.limit_ms, str(limit)) for limit in goal.limits]
    x, y = Axis("percentile", "%", low=0, high=100), Axis("latency", "ms", log=True)
    return Chart("Latency by percentile", x, y, series, rules)


def _by_share(seconds: Iterable[float | None]) -> list[tuple[float, float]]:
    ranked = sorted(1e3 * value for value in seconds if value is not None)
    return [(share, percentile(ranked, share)) for share in _SHARES] if ranked else []


def _title(limit: Limit) -> str:
    return f"{limit.measure.upper()} {limit.statistic}"
