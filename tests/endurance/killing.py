"""Kills of the engine's process at random moments, amid streams and requests that wait."""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from serving.processes import ServerProcess

from endurance.asking import Exchange
from endurance.clock import Clock
from endurance.mixture import Mixture
from endurance.soaking import digest, golden_bodies, read_load
from endurance.verdict import Promise
from quire.bench.http_client import Client
from quire.bench.openai_api import Unusable

NUM_SEQS = 8  # fewer than the streams, so that requests wait
NUM_STREAMS, NUM_PLAIN = 12, 4
NUM_LATE = 3  # requests that come while there is no engine
LONGEST_S = 0.6  # from the first requests to the kill
LATEST_S = 0.2  # from the kill to those that come late
STREAM_END_S = 1.0  # from the kill to the end of all streams that had begun
ANSWER_END_S = 5.0  # from an engine that is ready again, or given up, to the end of all
RECOVERY_S = 30.0
PATIENCE_S = 40.0  # for any request: one that waits has its answer from the next engine
MOST_PROBLEMS = 8
WHOLE, FAILED, GONE, WRONG = (
    "answered in full",
    "got an error: engine died",
    "found no server",
    "wrong",
)


@dataclass(slots=True)
class Kills:
    """The outcomes of all kills; times in seconds, one for each kill that they apply to."""

    num_kills: int = 0
    num_servers: int = 0
    num_hung: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # of requests
    problems: list[str] = field(default_factory=list)
    stream_ends: list[float] = field(default_factory=list)  # of the last stream that had begun, from the kill
    answer_ends: list[float] = field(default_factory=list)  # of the last request, from the end of the outage
    recoveries: list[float] = field(default_factory=list)
    goldens: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # blocks of the KV cache, when all had ended
    statuses: list[int | None] = field(default_factory=list)  # of servers that gave up

    def judged(self) -> list[Promise]:
        """The promises, kept or broken."""
        counts = ", ".join(f"{count:,} {came}" for came, count in self.outcomes.most_common())
        slowest, last = max(self.stream_ends, default=0.0), max(self.answer_ends, default=0.0)
        ready = sorted(self.recoveries) or [0.0]
        after = f"{len(self.recoveries)} times; median {median(ready):.2f} s, at most {ready[-1]:.2f}"
        golden, held = len(set(self.goldens)), max(self.held, default=0)
        gave_up = f"{len(self.statuses)} of {self.num_servers} servers, with status"
        return [
            Promise("kills: answers", not self.outcomes[WRONG], counts),
            Promise("kills: hung", not self.num_hung, f"{self.num_hung} requests without an end"),
            Promise("kills: streams", slowest <= STREAM_END_S, f"open ones ended within {slowest:.2f} s"),
            Promise("kills: others", last <= ANSWER_END_S, f"ended within {last:.2f} s of the recovery"),
            Promise("kills: ready", ready[-1] <= RECOVERY_S, after),
            Promise("kills: golden", golden == 1, f"{len(self.goldens)} times, {golden} different"),
            Promise("kills: blocks", not held, f"held after {len(self.held)} recoveries: {held}"),
            Promise(
                "kills: given up", set(self.statuses) <= {1}, f"{gave_up} {set(self.statuses) or 'none'}"
            ),
        ]


class Killer:
    """Kills the engines of one server after the other.

    A server starts its engine again after growing pauses, and ends at the tenth death within five minutes.
    Whoever watches it starts another then, and so does this.
    """

    def __init__(
        self, num_kills: int, seed: int, log: Path, clock: Clock, show: Callable[[str], None]
    ) -> None:
        self.found = Kills()
        self._wanted, self._log, self._clock, self._show = num_kills, log, clock, show
        self._dice = random.Random(seed)
        self._mixture = Mixture("demo", seed, 120, 160)
        self._goldens = golden_bodies("demo")

    async def run(self) -> Kills:
        """All kills. Raises Unusable for a server that is neither ready again nor gone."""
        found = self.found
        while found.num_kills < self._wanted:
            found.num_servers += 1
            server = ServerProcess(["demo", "--max-num-seqs", str(NUM_SEQS)], self._log)
            async with server:
                found.goldens.append(await digest(Client(server.url), self._goldens))
                while server.status is None and found.num_kills < self._wanted:
                    self._show(f"kill {found.num_kills + 1} of {self._wanted}, server {found.num_servers}")
                    before, begin_s = copy.deepcopy(found), time.perf_counter()
                    await self._kill(server)
                    if self._clock.stood_still(begin_s, time.perf_counter()):
                        found = self.found = replace(before, num_servers=found.num_servers)
        return found

    async def _kill(self, server: ServerProcess) -> None:
        found, client = self.found, Client(server.url)
        first = [Exchange(self._mixture.stream()) for _ in range(NUM_STREAMS)]
        first += [Exchange(self._mixture.plain()) for _ in range(NUM_PLAIN)]
        tasks = [asyncio.create_task(one.run(client, PATIENCE_S)) for one in first]
        await asyncio.sleep(self._dice.random() * LONGEST_S)
        begun = [one for one in first if one.first_s and not one.end_s]
        old, killed_s = server.engine_pid, time.perf_counter()
        server.kill_engine()
        found.num_kills += 1
        await asyncio.sleep(self._dice.random() * LATEST_S)
        late = [Exchange(self._mixture.plain()) for _ in range(NUM_LATE)]
        tasks += [asyncio.create_task(one.run(client, PATIENCE_S)) for one in late]
        over_s = await self._recover(server, old)
        await asyncio.gather(*tasks)
        if begun:
            found.stream_ends.append(max(one.end_s for one in begun) - killed_s)
        found.answer_ends.append(max(one.end_s for one in first + late) - over_s)
        self._judge(first, late, server.status is None)
        client.close()
        if server.status is not None:
            found.statuses.append(server.status)
            return
        found.recoveries.append(over_s - killed_s)
        found.goldens.append(await digest(client, self._goldens))
        found.held.append((await read_load(client)).held)
        client.close()

    async def _recover(self, server: ServerProcess, old: int | None) -> float:
        """When it was ready again, or had ended."""
        begin_s = self._clock.now_s()
        while server.status is None:
            if server.engine_pid not in (None, old) and await server.is_ready():
                break
            if self._clock.now_s() > begin_s + RECOVERY_S:
                raise Unusable(f"not ready {RECOVERY_S:g} s after a kill:\n{server.last_of_log()}")
            await asyncio.sleep(0.02)
        return time.perf_counter()

    def _judge(self, first: list[Exchange], late: list[Exchange], is_up: bool) -> None:
        found = self.found
        for one in first + late:
            came = WRONG
            if not one.problem:
                came = WHOLE
            elif one.ended_with_engine:
                came = FAILED
            elif one in late and not is_up and not one.hung and not one.first_s:
                came = GONE  # it came when the server had given up and was ending
            found.outcomes[came] += 1
            found.num_hung += one.hung
            if came == WRONG and len(found.problems) < MOST_PROBLEMS:
                found.problems.append(f"kill {found.num_kills}, {one.case.kind}: {one.problem[:300]}")
