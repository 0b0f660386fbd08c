"""Goals of latency: limits that figures of a run, or one request, must keep.

A goal is written `ttft_p90<500ms,itl_p99<60ms`: measures, each with a statistic and a limit. The measures are
those that `quire/bench/metrics.py` defines. Figures have the names of a report's JSON, which are vLLM's:
`p90_ttft_ms`, `median_itl_ms`, `mean_e2el_ms`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire.errors import ConfigError, quoted

MEASURES = ("ttft", "itl", "tpot", "e2e")
STATISTICS = ("p50", "p90", "p95", "p99", "mean")
DEFAULT_STATISTIC = "p99"
EXAMPLE = "ttft_p90<500ms,itl_p99<60ms"

_UNITS_MS = {"ms": 1.0, "s": 1e3, "m": 60e3, "h": 3600e3}
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h)\s*")
_LIMIT = re.compile(r"\s*([a-z0-9]+)(?:_([a-z0-9]+))?\s*<=?\s*(.*)")
# As a report's JSON names them: by vLLM, where it differs from the goal's word.
_JSON_MEASURE = {"e2e": "e2el"}
_JSON_STATISTIC = {"p50": "median"}


def duration_ms(text: str) -> float:
    """Return the milliseconds of a duration such as "60ms" or "1.5s". Raises ConfigError."""
    found = _DURATION.fullmatch(text)
    value_ms = float(found[1]) * _UNITS_MS[found[2]] if found else 0.0
    if not value_ms:
        raise ConfigError(f"{quoted(text)} is not a duration", "write a number and its unit: 60ms, 1.5s")
    return value_ms


def figure_name(measure: str, statistic: str) -> str:
    """Return the name of a figure in a report's JSON."""
    kind = _JSON_STATISTIC.get(statistic, statistic)
    return f"{kind}_{_JSON_MEASURE.get(measure, measure)}_ms"


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper bound of one statistic of one measure."""

    measure: str  # of MEASURES
    statistic: str  # of STATISTICS
    limit_ms: float

    @property
    def name(self) -> str:
        return f"{self.measure}_{self.statistic}"

    @property
    def figure(self) -> str:
        return figure_name(self.measure, self.statistic)

    def __str__(self) -> str:
        seconds = self.limit_ms >= 1e3 and self.limit_ms % 100 == 0
        return f"{self.name}<" + (f"{self.limit_ms / 1e3:g}s" if seconds else f"{self.limit_ms:g}ms")

    def is_kept(self, value_ms: float | None) -> bool:
        """Return True if the value keeps the limit.

        None is a figure without a value. Outputs of one token have no ITL or TPOT, and keep any limit of
        these; without a TTFT or E2E there was no answer.
        """
        if value_ms is None:
            return self.measure in ("itl", "tpot")
        return value_ms <= self.limit_ms


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits that are all to be kept. A goal without limits is False, and always met."""

    limits: tuple[Limit, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Return the goal of a text such as EXAMPLE. The default statistic is p99. Raises ConfigError."""
        return cls(tuple(_limit(part) for part in text.split(",")))

    @classmethod
    def parse_pairs(cls, pairs: Iterable[str]) -> Goal:
        """Return the goal of vLLM's `--goodput ttft:500 tpot:50`: measures and milliseconds."""
        return cls(tuple(_pair(pair) for pair in pairs))

    def __str__(self) -> str:
        return ",".join(map(str, self.limits)) or "none"

    def __bool__(self) -> bool:
        return bool(self.limits)

    def met(self, figures: Mapping[str, float | None]) -> bool:
        """Return True if figures, by their names in a report's JSON, keep every limit.

        Raises KeyError if a figure is absent; one that is None has no value, as Limit.is_kept explains.
        """
        return not self.broken(figures)

    def broken(self, figures: Mapping[str, float | None]) -> tuple[Limit, ...]:
        """Return the limits that the figures do not keep."""
        return tuple(limit for limit in self.limits if not limit.is_kept(figures[limit.figure]))


def _limit(text: str) -> Limit:
    found = _LIMIT.fullmatch(text)
    if not found:
        raise _no_goal(text)
    measure = {"e2el": "e2e"}.get(found[1], found[1])
    statistic = found[2] or DEFAULT_STATISTIC
    if measure not in MEASURES or statistic not in STATISTICS or not _DURATION.fullmatch(found[3]):
        raise _no_goal(text)
    return Limit(measure, statistic, duration_ms(found[3]))


def _pair(text: str) -> Limit:
    name, _, number = text.partition(":")
    measure = {"e2el": "e2e"}.get(name, name)
    if measure not in MEASURES or not re.fullmatch(r"\d+(\.\d*)?|\.\d+", number) or not float(number):
        raise ConfigError(
            f"{quoted(text)} is not a goal of a request",
            f"write a measure ({', '.join(MEASURES)}) and milliseconds: ttft:500",
        )
    return Limit(measure, DEFAULT_STATISTIC, float(number))


def _no_goal(text: str) -> ConfigError:
    return ConfigError(
        f"{quoted(text)} is not a goal",
        f"write {EXAMPLE}: measures {', '.join(MEASURES)}; statistics {', '.join(STATISTICS)} "
        f"(default {DEFAULT_STATISTIC}); limits in ms or s",
    )
