"""Clients that leave by the thousand: while they wait, while their prompt is computed, amid an answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from serving.processes import ServerProcess

from endurance.answers import Case
from endurance.asking import Exchange
from endurance.clock import Clock
from endurance.mixture import Mixture
from endurance.soaking import digest, golden_bodies, read_load
from endurance.verdict import Promise
from quire.bench.http_client import Client, Lost
from quire.bench.http_reply import BadReply

NUM_SEQS, NUM_CLIENTS = 8, 24  # two of three wait
PROMPT_WORDS = 400  # of the longest: several steps of --max-num-batched-tokens
BATCHED_TOKENS = 64
LAST_EVENT, LONGEST_S = 16, 0.12  # at which they leave at the latest
LOOK_EVERY = 1000
SETTLE_S = 1.0  # after which nothing may be held
MOST_PROBLEMS = 8


@dataclass(slots=True)
class Aborts:
    """The outcomes of all aborts."""

    num_aborts: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # blocks of the KV cache, when all clients had gone
    open: list[int] = field(default_factory=list)  # requests, then
    goldens: list[str] = field(default_factory=list)
    most: Counter[str] = field(default_factory=Counter)  # requests seen at once in /load, by state

    def judged(self) -> list[Promise]:
        """The promises, kept or broken."""
        left = ", ".join(f"{count:,} {came}" for came, count in self.outcomes.most_common())
        times, golden = len(self.held), len(set(self.goldens))
        seen = ", ".join(f"{count} {state}" for state, count in sorted(self.most.items()))
        return [
            Promise("aborts: clients", not self.outcomes["failed"], f"{left}; at once at most {seen}"),
            Promise("aborts: blocks", not any(self.held), f"held at {times} idle moments: {max(self.held)}"),
            Promise(
                "aborts: requests", not any(self.open), f"left at {times} idle moments: {max(self.open)}"
            ),
            Promise("aborts: golden", golden == 1, f"{len(self.goldens)} times, {golden} different"),
        ]


class Aborter:
    """Clients of one server, each of which leaves, and asks again."""

    def __init__(
        self, num_aborts: int, seed: int, log: Path, clock: Clock, show: Callable[[str], None]
    ) -> None:
        self.found = Aborts()
        self._wanted, self._log, self._clock, self._show = num_aborts, log, clock, show
        self._dice = random.Random(seed)
        self._mixture = Mixture("demo", seed, PROMPT_WORDS, 160)
        self._goldens = golden_bodies("demo")

    async def run(self) -> Aborts:
        """All of them, with a look at what is held after every thousand."""
        found = self.found
        flags = ["--max-num-seqs", str(NUM_SEQS), "--max-num-batched-tokens", str(BATCHED_TOKENS)]
        async with ServerProcess(["demo", *flags], self._log) as server:
            client = Client(server.url)
            found.goldens.append(await digest(client, self._goldens))
            while found.num_aborts < self._wanted:
                until = min(found.num_aborts + LOOK_EVERY, self._wanted)
                watcher = asyncio.create_task(self._watch(client))
                await asyncio.gather(*(self._leave(server.url, until) for _ in range(NUM_CLIENTS)))
                watcher.cancel()
                await asyncio.sleep(SETTLE_S)
                load = await read_load(client)
                found.held.append(load.held)
                found.open.append(load.running + load.waiting)
                found.goldens.append(await digest(client, self._goldens))
            client.close()
        return found

    async def _leave(self, url: str, until: int) -> None:
        """One client after the other, each on its own connection, which it closes."""
        found, client = self.found, Client(url)
        while found.num_aborts < until:
            found.num_aborts += 1
            if self._dice.random() < 0.5:
                await self._after_events(client)
            else:
                await self._after_time(client)
        client.close()

    async def _after_events(self, client: Client) -> None:
        one = Exchange(replace(self._case(), hang_up_at=self._dice.randint(1, LAST_EVENT)))
        await one.run(client)
        if one.answer.hung_up:
            self.found.outcomes["left while answered"] += 1
        elif not one.problem:
            self.found.outcomes["were answered before they left"] += 1
        else:
            self._failed(one.problem)

    async def _after_time(self, client: Client) -> None:
        case, seen = self._case(), 0

        def take(_: bytes, __: float) -> None:
            nonlocal seen
            seen += 1

        asking = client.post(case.path, case.body, take)
        try:
            await asyncio.wait_for(asking, self._dice.random() * LONGEST_S)
            self.found.outcomes["were answered before they left"] += 1
        except TimeoutError:
            self.found.outcomes["left while answered" if seen else "left before anything came"] += 1
        except (OSError, Lost, BadReply) as error:
            self._failed(f"{type(error).__name__}: {error}")

    def _case(self) -> Case:
        return self._mixture.stream() if self._dice.random() < 0.7 else self._mixture.plain()

    def _failed(self, problem: str) -> None:
        now_s = time.perf_counter()
        if self._clock.stood_still(now_s - SETTLE_S, now_s):
            return
        self.found.outcomes["failed"] += 1
        if len(self.found.problems) < MOST_PROBLEMS:
            self.found.problems.append(f"abort {self.found.num_aborts}: {problem[:300]}")

    async def _watch(self, client: Client) -> None:
        """Record the states of open requests."""
        while True:
            load = await read_load(client)
            for state, count in (("running", load.running), ("waiting", load.waiting)):
                self.found.most[state] = max(self.found.most[state], count)
            self._show(f"abort {self.found.num_aborts:,} of {self._wanted:,}")
            await asyncio.sleep(0.2)
