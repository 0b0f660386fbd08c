"""A soak of several replicas: engines die, are replaced, stopped and started, while others go on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from serving.processes import ENGINE, ServerProcess, Usage, children, usage

from endurance.mixture import Mixture
from endurance.soaking import SETTLE_S, Settings, Soak, digest
from quire.bench.openai_api import Unusable

FAULTS = ("death", "restart", "scale down", "scale up", "death", "restart of all")
RECOVERY_S = 300.0  # until all replicas are ready again, on a machine that others use
SAVE_S = 15.0
LEAST_S = 5.0  # of full load, before the capacity is measured
BACKLOG_S = 1.0  # of requests that are late
SETTLED = ("ready", "slow")


class ReplicaServer(ServerProcess):
    """`quire serve --replicas N`; each engine is named by its process."""

    def usage(self) -> dict[str, Usage]:
        """Of the server and the engines."""
        pids = {"server": self.pid}
        pids |= {f"engine {pid}": pid for pid, name in children(self.pid).items() if name == ENGINE}
        found = {name: usage(pid) for name, pid in pids.items() if pid}
        return {name: one for name, one in found.items() if one is not None}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault by our hand, and after how long all replicas that should run were ready."""

    kind: str
    at_s: float
    num_open: int  # requests
    ready_after_s: float
    error: str  # of the operation


class ReplicaSoak(Soak):
    """One run against replicas. No fault excuses anything: every answer must be whole.

    For `capacity_s` the workers ask as fast as they can; then requests come at random, as many a second as
    `load` of what was answered. The state is written to `file` every SAVE_S.
    """

    def __init__(
        self,
        server: ServerProcess,
        settings: Settings,
        num_replicas: int,
        load: float,
        capacity_s: float,
        file: Path,
    ) -> None:
        super().__init__(server, settings)
        self.capacity = 0.0  # requests a second
        self.faults: list[Fault] = []
        self._num_replicas, self._load, self._file = num_replicas, load, file
        self._capacity_s = capacity_s
        self._dice = random.Random(settings.seed)
        self._next_faults: Iterator[str] = cycle(FAULTS)
        self._next_s = 0.0  # when the next request comes

    def _periodic(self) -> list[Any]:
        return [
            *super()._periodic(),
            self._once(LEAST_S, self._find_capacity),
            self._every(SAVE_S, self._save),
        ]

    async def _find_capacity(self) -> None:
        async with self._pausing:
            before, begin_s = self.found.outcomes.total(), time.perf_counter()
            await asyncio.sleep(self._capacity_s)
            seconds = time.perf_counter() - begin_s
            self.capacity = (self.found.outcomes.total() - before) / seconds

    async def _work(self, mixture: Mixture) -> None:
        while not self._over:
            await self._arrive()
            await self._traffic.wait()
            await self._ask(mixture.draw())

    async def _arrive(self) -> None:
        """Wait until a request comes; at once while the capacity is not known."""
        if not self.capacity:
            return
        now_s = time.perf_counter()
        pause_s = self._dice.expovariate(self._load * self.capacity)
        self._next_s = max(self._next_s, now_s - BACKLOG_S) + pause_s
        await asyncio.sleep(max(0.0, self._next_s - now_s))

    async def _compare(self) -> None:
        """Golden prompts, whatever happens to engines meanwhile."""
        while True:
            begin_s = time.perf_counter()
            found = await digest(self._client, self._goldens)
            if not self.clock.stood_still(begin_s - SETTLE_S, time.perf_counter()):
                break
        self.found.goldens.append((self.now_s, found))

    async def _kill(self) -> None:
        """Do the next fault, and wait until all replicas that should run are ready."""
        async with self._pausing:
            kind, at_s, begin_s = next(self._next_faults), self.now_s, time.perf_counter()
            num_open = len(self._open)
            await self._do(kind)
            count = self._num_replicas - (kind == "scale down")
            error = await self._recovered(count)
            self.faults.append(Fault(kind, at_s, num_open, time.perf_counter() - begin_s, error))
            self.save()

    async def _do(self, kind: str) -> None:
        one = self._dice.randrange(self._num_replicas)
        if kind == "death":
            pid = (await self._replicas())["replicas"][one]["pid"]
            os.kill(pid, signal.SIGKILL)
            while pid in children(self.server.pid):
                await asyncio.sleep(0.01)
            return
        path, body = {
            "restart": (f"/replicas/{one}/restart", {}),
            "restart of all": ("/replicas/restart", {}),
            "scale down": ("/replicas", {"count": self._num_replicas - 1}),
            "scale up": ("/replicas", {"count": self._num_replicas}),
        }[kind]
        reply = await self._client.post(path, json.dumps(body).encode())
        if reply.status != 202:
            raise Unusable(f"{kind}: HTTP {reply.status}: {reply.body.decode()[:300]}")

    async def _recovered(self, count: int) -> str:
        """Wait until `count` replicas are ready and no operation runs; return its error, if it failed."""
        for _ in range(int(RECOVERY_S / 0.1)):  # the clock would count while the machine stood still
            found = await self._replicas()
            operation = found["operation"] or {"seconds": 0.0, "error": None}
            ready = [one for one in found["replicas"] if one["health"] in SETTLED and one["pid"]]
            if operation["seconds"] is not None and (operation["error"] or len(ready) == count):
                return operation["error"] or ""
            await asyncio.sleep(0.1)
        return f"not ready after {RECOVERY_S:g} s"

    async def _replicas(self) -> Any:
        return json.loads((await self._client.get("/replicas")).body)

    async def _save(self) -> None:
        self.save()

    def save(self) -> None:
        """Write the state; after the server's end once more, as how it ended belongs to it."""
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.state()), "utf-8")
        part.rename(self._file)

    def state(self) -> dict[str, Any]:
        """All that the verdict needs."""
        outcomes = self.found.outcomes
        return {
            "seconds": min(self.now_s, self.settings.seconds),
            "begin_s": time.time() - self.now_s,
            "warm_up_s": self.settings.warm_up_s,
            "command": self.server.command,
            "load": self._load,
            "capacity": self.capacity,
            "outcomes": [(kind, came, count) for (kind, came), count in sorted(outcomes.items())],
            "problems": self.found.problems,
            "num_problems": self.found.num_problems,
            "num_hung": self.found.num_hung,
            "goldens": self.found.goldens,
            "faults": [asdict(fault) for fault in self.faults],
            "held": [max(one.num_blocks_held, one.num_requests) for one in self.found.idles],
            "rss": [
                (at, {name: one.rss_bytes for name, one in held.items()}) for at, held in self.found.samples
            ],
            "ttft": self.found.ttft,
            "per_event": self.found.per_event,
            "preemptions": self.found.totals.get("vllm:num_preemptions_total", 0.0),
            "exit_status": self.exit_status,
            "num_tracebacks": self.log.count("Traceback (most recent call last)"),
        }
