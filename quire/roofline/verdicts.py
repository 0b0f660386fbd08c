"""Verdicts in words: what bound the steps of an engine, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from quire.step_record import Record
from quire.types import Bound


@dataclass(slots=True)
class BoundSteps:
    """The steps with one bound, and sums over them in seconds: `seconds` from the end of the step before."""

    bound: Bound
    num_steps: int = 0
    seconds: float = 0.0
    device_s: float = 0.0
    predicted_s: float = 0.0
    roof_s: float = 0.0

    @property
    def roof_share(self) -> float:
        """Return the time at the roof over the time on the device."""
        return self.roof_s / self.device_s if self.device_s else 0.0

    def add(self, record: Record) -> None:
        self.num_steps += 1
        self.seconds += record.wall_s
        self.device_s += record.device_s
        self.predicted_s += record.predicted_s
        self.roof_s += record.roof_share * record.device_s


def by_bound(records: Iterable[Record]) -> list[BoundSteps]:
    """Group steps by what bound them, in the order of the time they took."""
    found = {bound: BoundSteps(bound) for bound in get_args(Bound)}
    for record in records:
        found[record.bound].add(record)
    return sorted((one for one in found.values() if one.num_steps), key=lambda one: -one.seconds)


def is_stale(roof_share: float) -> bool:
    """Return True for a step that was faster than the ceilings allow.

    They were measured while the machine was busier, or on another one under the same name.
    """
    return roof_share > 1


def share_in_words(roof_share: float) -> str:
    """Return a share of the roof in words: "83%", "104%, ceiling stale", or "-" if it is unknown."""
    if not roof_share:
        return "-"
    stale = ", ceiling stale" if is_stale(roof_share) else ""
    return f"{roof_share:.0%}{stale}"


def table(records: Iterable[Record]) -> str:
    """Return a table of the time by bound, with the shares of the roof and the predicted time."""
    groups = by_bound(records)
    total_s = sum(one.seconds for one in groups) or 1.0
    lines = [f"{'bound':<10}{'steps':>7}{'time':>7}{'ms/step':>10}{'predicted':>11}  of the roof"]
    for one in groups:
        predicted = f"{one.predicted_s / one.device_s - 1:+.0%}" if one.predicted_s and one.device_s else "-"
        lines.append(
            f"{one.bound or 'unknown':<10}{one.num_steps:>7,}{one.seconds / total_s:>7.0%}"
            f"{1e3 * one.seconds / one.num_steps:>10.2f}{predicted:>11}  {share_in_words(one.roof_share)}"
        )
    return "\n".join(lines)
