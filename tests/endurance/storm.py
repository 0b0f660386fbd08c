"""Storms of kills: engines that start again at once, killed over and over soon after they are ready."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.processes import ENGINE, ServerProcess, children

from endurance.answers import Case
from endurance.asking import Exchange
from endurance.clock import Clock
from endurance.essence import essence
from endurance.killing import PATIENCE_S, RECOVERY_S, cases, undisturbed_answers
from endurance.soaking import digest, golden_bodies, read_load, read_metrics
from endurance.verdict import Promise
from quire.bench.http_client import Client, Lost
from quire.bench.http_reply import BadReply
from quire.bench.openai_api import Unusable

NUM_WORKERS = 6  # clients that ask without end
LONGEST_S = 1.5  # from the moment that all engines are ready to the kill
MOST_PROBLEMS = 8
OTHER_BITS = "not what it was undisturbed"
REFUSED_PAUSE_S = 0.2
WHOLE_REPLICAS = 0.3  # of kills on Ray: the replica of Serve is killed, and its engine ends with it
# The server, but it starts engines again at once, however often they die.
PROGRAM = (
    "import quire.server.remote as remote; Policy = remote.RestartPolicy\n"
    "remote.RestartPolicy = lambda: Policy(first_delay_s=0.01, longest_delay_s=0.01, max_deaths=10**9)\n"
    "from quire.cli.main import main; main()"
)
RAY_RECOVERY_S = 240.0  # on a machine that others use
FRONT = b"ray::ServeReplica:quire:front"
WHOLE, REFUSED, DEAD, CUT, WRONG = (
    "answered in full, with the same bits",
    "refused with 503 while there was no engine",
    "ended with the engine",
    "cut or refused with the front",
    "wrong",
)


class StormServer(ServerProcess):
    """A server whose engines start again at once."""

    def __init__(self, num_replicas: int, log: Path) -> None:
        several = ["--replicas", str(num_replicas)] if num_replicas > 1 else []
        super().__init__(["demo", *several], log)
        self.command = [sys.executable, "-c", PROGRAM, *self.command[self.command.index("serve") :]]


class DeployedServer(ServerProcess):
    """A deployment on a Ray cluster of this machine, whose replicas Serve replaces when they are killed."""

    def __init__(self, num_replicas: int, log: Path) -> None:
        super().__init__([], log)
        several = ["--replicas", str(num_replicas), "--num-threads", "1"]
        program = self.command[: self.command.index("serve")]
        self.command = [*program, "deploy", "ray", "demo", "--port", str(self.port), *several]


@dataclass(slots=True)
class Storms:
    """The outcomes of all kills."""

    num_replicas: int = 1
    of_fronts: bool = False
    num_kills: int = 0
    num_continued: int = 0  # choices that another engine went on with
    num_hung: int = 0
    num_held: int = 0  # blocks of KV caches at the end
    outcomes: Counter[str] = field(default_factory=Counter)  # of requests
    kinds: set[str] = field(default_factory=set)
    goldens: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def judged(self) -> list[Promise]:
        """The promises, kept or broken."""
        counts = ", ".join(f"{count:,} {came}" for came, count in self.outcomes.most_common())
        if self.of_fronts:
            return [
                Promise("fronts: answers", not self.outcomes[WRONG], f"{self.num_kills} kills: {counts}"),
                Promise("fronts: hung", not self.num_hung, f"{self.num_hung} requests without an end"),
                Promise("fronts: golden", len(set(self.goldens)) == 1, "before and after"),
                Promise("fronts: blocks", not self.num_held, f"held at the end: {self.num_held}"),
            ]
        bad = self.outcomes[WRONG] + self.outcomes[DEAD]
        if self.num_replicas > 1:
            bad += self.outcomes[REFUSED]  # the other replicas serve
        kinds = f"{len(self.kinds)} kinds of requests: {', '.join(sorted(self.kinds))}"
        return [
            Promise("storm: answers", not bad, counts),
            Promise("storm: hung", not self.num_hung, f"{self.num_hung} requests without an end"),
            Promise("storm: continued", self.num_continued > 0, f"{self.num_continued:,} choices; {kinds}"),
            Promise("storm: golden", len(set(self.goldens)) == 1, "before and after"),
            Promise("storm: blocks", not self.num_held, f"held at the end: {self.num_held}"),
        ]


class Stormer:
    """Kills one engine at a time, LONGEST_S at most after all are ready, while clients ask without end."""

    def __init__(
        self,
        num_kills: int,
        seed: int,
        log: Path,
        clock: Clock,
        show: Callable[[str], None],
        num_replicas: int = 1,
        on_ray: bool = False,
        fronts: bool = False,
    ) -> None:
        self.found = Storms(num_replicas, fronts)
        self._on_ray = on_ray
        self._wanted, self._log, self._show = num_kills, log, show
        self._dice, self._cases = random.Random(seed), cases(seed)
        self._expected: dict[Case, Any] = {}
        self._over = False

    async def run(self) -> Storms:
        """All kills. Raises Unusable for a server that is not ready again."""
        found = self.found
        kind = DeployedServer if self._on_ray else StormServer
        async with kind(found.num_replicas, self._log) as server:
            client, goldens = Client(server.url), golden_bodies("demo")
            found.goldens.append(await digest(client, goldens))
            self._expected = await undisturbed_answers(self._cases, client, self._show)
            workers = [asyncio.create_task(self._work(client)) for _ in range(NUM_WORKERS)]
            while found.num_kills < self._wanted:
                await self._until_ready(server, client)
                await asyncio.sleep(self._dice.random() * LONGEST_S)
                pid = self._victim(server)
                os.kill(pid, signal.SIGKILL)
                found.num_kills += 1
                self._show(f"kill {found.num_kills} of {self._wanted}")
                while pid in below(server.pid):
                    await asyncio.sleep(0.01)
            self._over = True
            await asyncio.gather(*workers)
            await self._until_ready(server, client)
            metrics = read_metrics((await client.get("/metrics")).body.decode())  # of this front
            found.num_continued = int(metrics["quire:continuations_total"])
            found.goldens.append(await digest(client, goldens))
            found.num_held = (await read_load(client)).held
            client.close()
        return found

    def _victim(self, server: ServerProcess) -> int:
        """Return the process to be killed: an engine, on Ray its replica at times, or the front."""
        if self.found.of_fronts:
            return next(pid for pid in below(server.pid) if command_of(pid).startswith(FRONT))
        pid = self._dice.choice([*engines(server)])
        whole = self._on_ray and self._dice.random() < WHOLE_REPLICAS
        return engines(server)[pid] if whole else pid

    async def _until_ready(self, server: ServerProcess, client: Client) -> None:
        begin_s, patience_s = time.perf_counter(), RAY_RECOVERY_S if self._on_ray else RECOVERY_S
        while not await self._is_ready(server, client):
            if server.status is not None or time.perf_counter() > begin_s + patience_s:
                raise Unusable(f"not ready after a kill:\n{server.last_of_log()}")
            await asyncio.sleep(0.02)

    async def _is_ready(self, server: ServerProcess, client: Client) -> bool:
        if self.found.num_replicas == 1:
            return await server.is_ready() and bool(engines(server))
        try:
            replicas = json.loads((await client.get("/replicas")).body)["replicas"]
        except (OSError, Lost, BadReply, ValueError):
            if not self.found.of_fronts:
                raise
            return False
        ready = [one["pid"] for one in replicas if one["health"] in ("ready", "slow")]
        return len(ready) == self.found.num_replicas and {*ready} == {*engines(server)}

    async def _work(self, client: Client) -> None:
        while not self._over:
            one = Exchange(self._dice.choice(self._cases))
            await one.run(client, PATIENCE_S)
            self._judge(one)
            if one.problem:
                await asyncio.sleep(REFUSED_PAUSE_S)

    def _judge(self, one: Exchange) -> None:
        found = self.found
        if not one.problem and essence(one.answer) != self._expected[one.case]:
            one.problem = OTHER_BITS
        came = WRONG
        if not one.problem:
            came = WHOLE
            found.kinds.add(one.case.kind)
        elif one.answer.status == 503 and not found.of_fronts:
            came = REFUSED
        elif found.of_fronts and one.problem != OTHER_BITS:
            came = CUT
        elif one.ended_with_engine:
            came = DEAD
        found.outcomes[came] += 1
        found.num_hung += one.hung
        if came in (DEAD, WRONG) and len(found.problems) < MOST_PROBLEMS:
            found.problems.append(f"kill {found.num_kills}, {one.case.kind}: {one.problem[:300]}")


def engines(server: ServerProcess) -> dict[int, int]:
    """Return the processes of all engines that are there, each with its parent."""
    return {pid: parent for pid, (name, parent) in below(server.pid).items() if name == ENGINE}


def below(ancestor: int) -> dict[int, tuple[str, int]]:
    """Return the name and the parent of each process that this one, or one below it, has started."""
    found, parents = {}, [ancestor]
    while parents:
        parent = parents.pop()
        own = children(parent)
        found |= {pid: (name, parent) for pid, name in own.items()}
        parents += own
    return found


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
