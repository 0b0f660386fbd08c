"""Kills of the engine's process at random moments, amid streams and requests that wait.

All answers are compared, to the bit, with those of a server whose engine was not killed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from serving.processes import ServerProcess

from endurance.answers import Case
from endurance.asking import Exchange
from endurance.clock import Clock
from endurance.essence import essence
from endurance.mixture import TOKENIZE, Mixture
from endurance.soaking import digest, golden_bodies, read_load
from endurance.verdict import Promise
from quire.bench.http_client import Client
from quire.bench.openai_api import Unusable

NUM_SEQS = 8  # fewer than the streams, so that requests wait
NUM_FIRST = 16  # requests before a kill
NUM_LATE = 3  # requests that come while there is no engine
LONGEST_S = 2.0  # from the first requests to the kill
LATEST_S = 0.2  # from the kill to those that come late
NUM_CASES = 64  # different requests
FEW_KILLS = 4  # of one server, since its pauses grow; only the first is killed until it gives up
ANSWER_END_S = 30.0  # from an engine that is ready again, or given up, to the end of all
RECOVERY_S = 30.0
PATIENCE_S = 60.0  # for any request: it goes on in the next engine
MOST_PROBLEMS = 8
WHOLE, FAILED, GONE, WRONG = (
    "answered in full, with the same bits",
    "came while there was no engine, or when it was given up",
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
    num_continued: int = 0  # requests that had begun when the engine was killed, and were answered in full
    answer_ends: list[float] = field(default_factory=list)  # of the last request, from the end of the outage
    recoveries: list[float] = field(default_factory=list)
    goldens: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # blocks of the KV cache, when all had ended
    statuses: list[int | None] = field(default_factory=list)  # of servers that gave up

    def judged(self) -> list[Promise]:
        """The promises, kept or broken."""
        counts = ", ".join(f"{count:,} {came}" for came, count in self.outcomes.most_common())
        last = max(self.answer_ends, default=0.0)
        ready = sorted(self.recoveries) or [0.0]
        after = f"{len(self.recoveries)} times; median {median(ready):.2f} s, at most {ready[-1]:.2f}"
        golden, held = len(set(self.goldens)), max(self.held, default=0)
        gave_up = f"{len(self.statuses)} of {self.num_servers} servers, with status"
        return [
            Promise("kills: answers", not self.outcomes[WRONG], counts),
            Promise("kills: hung", not self.num_hung, f"{self.num_hung} requests without an end"),
            Promise("kills: continued", self.num_continued > 0, f"{self.num_continued:,} that had begun"),
            Promise("kills: ends", last <= ANSWER_END_S, f"all within {last:.2f} s of the recovery"),
            Promise("kills: ready", ready[-1] <= RECOVERY_S, after),
            Promise("kills: golden", golden == 1, f"{len(self.goldens)} times, {golden} different"),
            Promise("kills: blocks", not held, f"held after {len(self.held)} recoveries: {held}"),
            Promise(
                "kills: given up", set(self.statuses) <= {1}, f"{gave_up} {set(self.statuses) or 'none'}"
            ),
        ]


class Killer:
    """Kills the engines of one server after the other.

    A server starts its engine again after growing pauses, and ends at the tenth death within five minutes:
    the first one does; the others are replaced before.
    """

    def __init__(
        self, num_kills: int, seed: int, log: Path, clock: Clock, show: Callable[[str], None]
    ) -> None:
        self.found = Kills()
        self._wanted, self._log, self._clock, self._show = num_kills, log, clock, show
        self._dice = random.Random(seed)
        self._cases = cases(seed)
        self._expected: dict[Case, Any] = {}
        self._goldens = golden_bodies("demo")

    async def run(self) -> Kills:
        """All kills. Raises Unusable for a server that is neither ready again nor gone."""
        found = self.found
        async with ServerProcess(["demo"], self._log) as undisturbed:
            self._expected = await undisturbed_answers(self._cases, Client(undisturbed.url), self._show)
        while found.num_kills < self._wanted:
            found.num_servers += 1
            most = self._wanted if found.num_servers == 1 else found.num_kills + FEW_KILLS
            server = ServerProcess(["demo", "--max-num-seqs", str(NUM_SEQS)], self._log)
            async with server:
                found.goldens.append(await digest(Client(server.url), self._goldens))
                while server.status is None and found.num_kills < min(most, self._wanted):
                    self._show(f"kill {found.num_kills + 1} of {self._wanted}, server {found.num_servers}")
                    before, begin_s = copy.deepcopy(found), time.perf_counter()
                    await self._kill(server)
                    if self._clock.stood_still(begin_s, time.perf_counter()):
                        found = self.found = replace(before, num_servers=found.num_servers)
        return found

    async def _kill(self, server: ServerProcess) -> None:
        found, client = self.found, Client(server.url)
        first = [Exchange(self._dice.choice(self._cases)) for _ in range(NUM_FIRST)]
        tasks = [asyncio.create_task(one.run(client, PATIENCE_S)) for one in first]
        await asyncio.sleep(self._dice.random() * LONGEST_S)
        begun = [one for one in first if one.num_events and not one.end_s]
        old, killed_s = server.engine_pid, time.perf_counter()
        server.kill_engine()
        found.num_kills += 1
        await asyncio.sleep(self._dice.random() * LATEST_S)
        late = [Exchange(self._dice.choice(self._cases)) for _ in range(NUM_LATE)]
        tasks += [asyncio.create_task(one.run(client, PATIENCE_S)) for one in late]
        over_s = await self._recover(server, old)
        await asyncio.gather(*tasks)
        found.answer_ends.append(max(one.end_s for one in first + late) - over_s)
        self._judge(first, late, server.status is None)
        found.num_continued += sum(not one.problem for one in begun)
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
            if not one.problem and essence(one.answer) != self._expected[one.case]:
                one.problem = f"not what it was undisturbed: {_difference(self._expected[one.case], one)}"
            came = WRONG
            if not one.problem:
                came = WHOLE
            elif one.answer.status == 503 or (one.ended_with_engine and not is_up):
                came = FAILED
            elif one in late and not is_up and not one.hung and not one.first_s:
                came = GONE  # it came when the server had given up and was ending
            found.outcomes[came] += 1
            found.num_hung += one.hung
            if came == WRONG and len(found.problems) < MOST_PROBLEMS:
                found.problems.append(f"kill {found.num_kills}, {one.case.kind}: {one.problem[:300]}")


def _difference(expected: Any, one: Exchange) -> str:
    """Return both essences from where they differ."""
    texts = [json.dumps(value, sort_keys=True) for value in (expected, essence(one.answer))]
    at = next((i for i, pair in enumerate(zip(*texts, strict=False)) if len(set(pair)) > 1), 0)
    return " / ".join(text[max(0, at - 40) : at + 60] for text in texts)


async def undisturbed_answers(
    asked: list[Case], client: Client, show: Callable[[str], None]
) -> dict[Case, Any]:
    """Return the answers to cases, asked one after the other. Raises Unusable for one that is wrong."""
    found: dict[Case, Any] = {}
    for number, case in enumerate(asked, 1):
        show(f"answer {number} of {len(asked)}, undisturbed")
        one = Exchange(case)
        await one.run(client, PATIENCE_S)
        if one.problem:
            raise Unusable(f"undisturbed, {case.kind}: {one.problem}")
        found[case] = essence(one.answer)
    return found


def cases(seed: int) -> list[Case]:
    """Return requests of every kind, each with its seed or greedy, most of them streams."""
    mixture, dice = Mixture("demo", seed, 120, 160), random.Random(seed)
    found = [mixture.stream() for _ in range(NUM_CASES // 4)]
    while len(found) < NUM_CASES:
        case = mixture.plain() if dice.random() < 0.6 else mixture.ruled()
        body = json.loads(case.body)
        if case.path == TOKENIZE:
            continue
        if "seed" not in body:
            body["temperature"] = 0
        found.append(replace(case, body=json.dumps(body).encode()))
    return found
