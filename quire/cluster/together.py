"""The status of several replicas as one: sums, and the facts of the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.engine.status import EngineStatus, Facts, State, StepReport


@dataclass(slots=True)
class Together(EngineStatus):
    """The status of all replicas that run. Counters, `totals` and `records` go on when one is replaced.

    The facts and the law are those of the first; `facts.chosen` says which replicas there are.
    """

    num_all_blocks: int = 0
    places: str = ""  # the replicas that run, and their cores, in words
    num_past_restarts: int = 0  # of replicas that were replaced
    source: Facts | None = None  # the facts of the first, as they are

    @property
    def num_blocks(self) -> int:
        return self.num_all_blocks

    def take_report(self, report: StepReport) -> None:
        """Count a step of any replica."""
        self.steps += 1
        if report.record is not None:
            self.totals.add(report.record)
            self.records.append(report.record)

    def take_statuses(self, statuses: Mapping[str, EngineStatus], closed: bool) -> None:
        """Sum up the statuses of the replicas, by their places in words; those given up come last."""
        several = list(statuses.values())
        running = {place: one for place, one in statuses.items() if one.state != "stopped"}
        self.state = _state(several, closed)
        for name in ("num_running", "num_waiting", "num_bad_frames"):
            setattr(self, name, sum(getattr(one, name) for one in several))
        self.num_free_blocks = sum(one.num_free_blocks for one in running.values())
        self.num_all_blocks = sum(one.num_blocks for one in running.values())
        self.num_restarts = self.num_past_restarts + sum(one.num_restarts for one in several)
        self.has_work = any(one.has_work for one in several)
        self.last_progress_s = max((one.last_progress_s for one in several), default=self.last_progress_s)
        self.law = next((one.law for one in several if one.law is not None), self.law)
        words = ", ".join(running)
        if running and (several[0].facts is not self.source or words != self.places):
            self.source, self.places = several[0].facts, words
            chosen = {**self.source.chosen, "replicas": f"{len(running)} ({words})"}
            self.facts = self.source._replace(chosen=chosen)


def _state(several: list[EngineStatus], closed: bool) -> State:
    states = {one.state for one in several}
    if closed or states == {"stopped"}:
        return "stopped"
    if "ready" in states:
        return "ready"
    return "restarting" if states else "starting"
