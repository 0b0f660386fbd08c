"""Servers that are sent SIGTERM amid requests, as a rolling restart does it: none of them may fail."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from serving.processes import ServerProcess

from endurance.answers import Case
from endurance.asking import Exchange
from endurance.clock import Clock
from endurance.mixture import Mixture
from endurance.verdict import Promise
from quire.bench.http_client import Client

NUM_STREAMS, NUM_PLAIN = 6, 6  # clients that ask without end
LONGEST_S = 1.0  # from the first requests to the signal
MOST_PROBLEMS = 8
PATIENCE_S = 60.0
REFUSED = "ConnectionRefusedError"


@dataclass(slots=True)
class Drains:
    """The outcomes of all drains."""

    outcomes: Counter[str] = field(default_factory=Counter)  # of requests sent before the signal
    after: Counter[str] = field(default_factory=Counter)  # and after it
    problems: list[str] = field(default_factory=list)
    statuses: Counter[int | None] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # from the signal to the end of the process
    num_tracebacks: int = 0

    def judged(self) -> list[Promise]:
        """The promises, kept or broken."""
        before, after = counted(self.outcomes), counted(self.after)
        ended = f"{self.statuses[0]} of {self.statuses.total()} with status 0"
        return [
            Promise("drains: answers", not self.outcomes["failed"], f"sent before SIGTERM: {before}"),
            Promise("drains: late", not self.after["failed"], f"sent after it: {after}"),
            Promise(
                "drains: exit", self.statuses.keys() <= {0}, f"{ended}, within {max(self.seconds):.2f} s"
            ),
            Promise("drains: log", not self.num_tracebacks, f"{self.num_tracebacks} tracebacks"),
        ]


def counted(outcomes: Counter[str]) -> str:
    """Format counts of outcomes."""
    return ", ".join(f"{count:,} {came}" for came, count in outcomes.most_common()) or "none"


class Drainer:
    """Starts one server after the other, and ends each while clients ask."""

    def __init__(
        self, num_drains: int, seed: int, log: Path, clock: Clock, show: Callable[[str], None]
    ) -> None:
        self.found = Drains()
        self._wanted, self._log, self._clock, self._show = num_drains, log, clock, show
        self._dice = random.Random(seed)
        self._mixture = Mixture("demo", seed, 120, 160)
        self._signal_s = 0.0  # when it was sent, to the server that runs

    async def run(self) -> Drains:
        """All of them. Raises Unusable for a server that does not start."""
        while (count := self.found.statuses.total()) < self._wanted:
            self._show(f"drain {count + 1} of {self._wanted}")
            before, begin_s = copy.deepcopy(self.found), time.perf_counter()
            async with ServerProcess(["demo"], self._log) as server:
                await self._drain(server)
            if self._clock.stood_still(begin_s, time.perf_counter()):
                self.found = before
                continue
            self.found.num_tracebacks += self._log.read_text("utf-8", "replace").count("Traceback (most")
        return self.found

    async def _drain(self, server: ServerProcess) -> None:
        self._signal_s = float("inf")
        makers = [self._mixture.stream] * NUM_STREAMS + [self._mixture.plain] * NUM_PLAIN
        client = Client(server.url)
        clients = [asyncio.create_task(self._ask(client, make)) for make in makers]
        await asyncio.sleep(self._dice.random() * LONGEST_S)
        self._signal_s = time.perf_counter()
        self.found.statuses[await server.stop()] += 1
        self.found.seconds.append(time.perf_counter() - self._signal_s)
        await asyncio.gather(*clients)
        client.close()

    async def _ask(self, client: Client, make: Callable[[], Case]) -> None:
        """One request after the other, until the first that was sent after the signal has its answer."""
        while True:
            one = Exchange(make())
            await one.run(client, PATIENCE_S)
            self._judge(one)
            if one.begin_s >= self._signal_s:
                return

    def _judge(self, one: Exchange) -> None:
        found, is_late = self.found, one.begin_s >= self._signal_s
        came = "failed" if one.problem else "answered in full"
        if is_late and one.answer.status == 503:
            came = "refused with 503 and Retry-After"
        elif is_late and one.problem.startswith(REFUSED):
            came = "found the port closed"
        (found.after if is_late else found.outcomes)[came] += 1
        if came == "failed" and len(found.problems) < MOST_PROBLEMS:
            when = f"{one.begin_s - self._signal_s:+.3f} s from SIGTERM"
            found.problems.append(f"drain, {one.case.kind}, {when}: {one.problem[:300]}")
