"""A soak: workers that ask without end, and around them what watches, interrupts and compares."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.processes import ServerProcess, Usage

from endurance.answers import Case
from endurance.asking import Exchange
from endurance.clock import Clock
from endurance.mixture import SCHEMA, Mixture
from quire.bench.http_client import Client
from quire.bench.openai_api import CHAT, COMPLETIONS, find_model

SAMPLE_S = 2.0
END_OF_STREAMS_S = 1.0  # after the engine's death
RECOVERY_S = 60.0
SETTLE_S = 1.0  # from the last answer to blocks that are free and connections that are closed
MOST_PROBLEMS = 8  # of each kind that are reported in full
STORY = "Tell me a story about a fox and a lantern."


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a soak; times in seconds."""

    seconds: float
    streams: int
    num_prompt_words: int
    num_output_tokens: int
    kill_every_s: float | None
    idle_every_s: float
    golden_every_s: float
    warm_up_s: float
    patience_s: float
    max_slope_mb: float
    max_drift: float
    seed: int


@dataclass(frozen=True, slots=True)
class Idle:
    """The resources held at an idle moment."""

    at_s: float
    num_requests: int
    num_blocks_held: int
    cache_usage: float
    usage: dict[str, Usage]


@dataclass(slots=True)
class Kill:
    """One death of the engine by our hand."""

    at_s: float
    open_streams: int  # that had brought something
    ready_after_s: float = 0.0
    slowest_end_s: float = 0.0  # of those streams


@dataclass(slots=True)
class Found:
    """Everything that was seen. Times are of the soak's clock, from the beginning of the traffic."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, what came of it)
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0
    num_hung: int = 0
    samples: list[tuple[float, dict[str, Usage]]] = field(default_factory=list)
    idles: list[Idle] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    goldens: list[tuple[float, str]] = field(default_factory=list)
    ttft: list[tuple[float, float]] = field(default_factory=list)  # (when it ended, seconds)
    per_event: list[tuple[float, float]] = field(default_factory=list)  # seconds between events of a chat
    totals: dict[str, float] = field(default_factory=dict)  # of /metrics, at the end


class Soak:
    """One run against a server that is there."""

    def __init__(self, server: ServerProcess, settings: Settings) -> None:
        self.server, self.settings = server, settings
        self.found = Found()
        self.exit_status: int | None = None
        self.log = ""
        self.clock = Clock()
        self.num_restarts_expected = 0
        self._client = Client(server.url, timeout_s=10 * settings.patience_s)  # an Exchange has less
        self._open: set[Exchange] = set()
        self._traffic = asyncio.Event()
        self._pausing = asyncio.Lock()  # an engine is not killed while leaks are looked for
        self._outage = False
        self._over = False

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    async def run(self) -> None:
        """Goldens on the idle server, then traffic with the periodic checks, then a last look."""
        model = (await find_model(self._client, None)).name
        mixture = Mixture(
            model, self.settings.seed, self.settings.num_prompt_words, self.settings.num_output_tokens
        )
        self._goldens = golden_bodies(model)
        self.clock = Clock()
        watch = asyncio.create_task(self.clock.watch())  # a slow golden answer is no pause of the machine
        await self._compare()
        await self._ask(mixture.largest())  # what the engine holds for it would look like growth later on
        self._traffic.set()
        workers = [asyncio.create_task(self._work(mixture)) for _ in range(self.settings.streams)]
        others = [asyncio.create_task(coroutine) for coroutine in self._periodic()]
        tasks = [*workers, *others]
        try:
            await self._last(tasks)
            self._over = True
            async with self._pausing:
                await asyncio.gather(*workers)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        await self._compare()
        await self._look(final=True)
        watch.cancel()
        self._client.close()

    async def _last(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until it has lasted long enough, or something is amiss."""
        while self.now_s < self.settings.seconds:
            done, _ = await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                return

    def _periodic(self) -> list[Any]:
        settings = self.settings
        found = [
            self._every(SAMPLE_S, self._sample),
            self._every(settings.golden_every_s, self._compare),
            self._every(settings.idle_every_s, self._look),
        ]
        if settings.warm_up_s < settings.idle_every_s:
            found.append(self._once(settings.warm_up_s, self._look))
        if settings.kill_every_s:
            found.append(self._every(settings.kill_every_s, self._kill))
        return found

    async def _once(self, after_s: float, do: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(after_s)
        await do()

    async def _every(self, period_s: float, do: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(period_s)
            await do()

    # Traffic

    async def _work(self, mixture: Mixture) -> None:
        while not self._over:
            await self._traffic.wait()
            await self._ask(mixture.draw())

    async def _ask(self, case: Case) -> None:
        one, during_outage = Exchange(case), self._outage
        self._open.add(one)
        try:
            await one.run(self._client, self.settings.patience_s)
        finally:
            self._open.discard(one)
        self._judge(one, during_outage or self._outage)
        if one.answer.status == 503:
            await asyncio.sleep(0.2)

    def _judge(self, one: Exchange, outage: bool) -> None:
        """Count it. What the death of the engine excuses is an error in the server's own words, no more."""
        kind, found = one.case.kind, self.found
        found.num_hung += one.hung
        if one.answer.hung_up:
            came = "hung up on"
        elif outage and one.ended_with_engine:
            came = "ended with the engine"
        elif one.ended_with_engine and self.clock.stood_still(one.begin_s - SETTLE_S, one.end_s):
            came = "refused with 503"  # no step had ended for long
        elif one.problem:
            came = "wrong"
            found.num_problems += 1
            if found.outcomes[kind, came] < MOST_PROBLEMS:
                asked = one.case.body[:200].decode("utf-8", "replace")
                found.problems.append(f"{self.now_s:.1f} s, {kind}: {one.problem[:300]}; asked was `{asked}`")
        else:
            came = "as it must be"
        found.outcomes[kind, came] += 1
        if kind == "chat" and came == "as it must be" and one.num_events > 10 and not outage:
            found.ttft.append((self.now_s, one.first_s - one.begin_s))
            found.per_event.append((self.now_s, (one.end_s - one.first_s) / (one.num_events - 1)))

    # Beside it

    async def _sample(self) -> None:
        usage = self.server.usage()
        self.found.samples.append((self.now_s, usage))
        if sys.stderr.isatty():
            held = ", ".join(f"{name} {one.rss_bytes >> 20} MB" for name, one in usage.items())
            count = sum(self.found.outcomes.values())
            line = f"{self.now_s:.0f} of {self.settings.seconds:.0f} s  {count:,} requests, "
            line += f"{self.found.num_problems} wrong, {held}"
            print(end=f"\r\x1b[K{line}", file=sys.stderr, flush=True)

    async def _compare(self) -> None:
        """Golden prompts, amid whatever else runs, but not while the engine is killed."""
        async with self._pausing:
            while True:
                begin_s = time.perf_counter()
                found = await digest(self._client, self._goldens)
                if not self.clock.stood_still(begin_s - SETTLE_S, time.perf_counter()):
                    break
            self.found.goldens.append((self.now_s, found))

    async def _look(self, final: bool = False) -> None:
        """Let everything end, and see what is still held."""
        async with self._pausing:
            self._traffic.clear()
            while self._open:
                await asyncio.sleep(0.05)
            self._client.close()
            await asyncio.sleep(SETTLE_S)
            load = await read_load(self._client)
            metrics = read_metrics((await self._client.get("/metrics")).body.decode())
            idle = Idle(
                self.now_s,
                load.running + load.waiting,
                load.held,
                metrics.get("vllm:kv_cache_usage_perc", -1.0),
                self.server.usage(),
            )
            self.found.idles.append(idle)
            self.found.totals = metrics
            if not final:
                self._traffic.set()

    async def _kill(self) -> None:
        """Kill the engine, wait until the server is ready again, and see how the open streams ended."""
        async with self._pausing:
            streams = [one for one in self._open if one.first_s]
            kill, begin_s = Kill(self.now_s, len(streams)), time.perf_counter()
            self._outage = True
            self.num_restarts_expected += self.server.kill_engine()
            while any(one in self._open for one in streams) and time.perf_counter() < begin_s + RECOVERY_S:
                await asyncio.sleep(0.01)
            kill.slowest_end_s = time.perf_counter() - begin_s if streams else 0.0
            await self.server.until_ready(RECOVERY_S)
            kill.ready_after_s = time.perf_counter() - begin_s
            self.found.kills.append(kill)
            await asyncio.sleep(SETTLE_S)  # the last of what it ended is judged by then
            self._outage = False

    def as_json(self) -> dict[str, Any]:
        """All that was seen."""
        found = self.found
        return {
            "settings": asdict(self.settings),
            "command": self.server.command,
            "exit_status": self.exit_status,
            "outcomes": {f"{kind}: {came}": count for (kind, came), count in sorted(found.outcomes.items())},
            "problems": found.problems,
            "samples": [(at, {k: asdict(u) for k, u in held.items()}) for at, held in found.samples],
            "idles": [asdict(idle) for idle in found.idles],
            "kills": [asdict(kill) for kill in found.kills],
            "goldens": found.goldens,
            "totals": found.totals,
            "pauses": self.clock.pauses,
        }


def golden_bodies(model: str) -> list[tuple[str, bytes]]:
    """Requests whose answers are fixed by what they say: greedy or seeded, constrained, with logprobs."""
    chat = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 64}
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {**chat, "temperature": 0, "logprobs": True, "top_logprobs": 5}),
        (CHAT, {**chat, "seed": 5, "n": 3, "temperature": 1.0, "top_p": 0.9}),
        (CHAT, {**chat, "seed": 6, "response_format": form}),
        (COMPLETIONS, {"prompt": [300, 400, 500] * 60, "seed": 7, "max_tokens": 100, "logprobs": 5}),
        (COMPLETIONS, {"prompt": STORY, "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}),
        (
            COMPLETIONS,
            {"prompt": STORY, "seed": 8, "repetition_penalty": 1.3, "min_p": 0.05, "max_tokens": 80},
        ),
    ]
    return [(path, json.dumps({"model": model, **body}).encode()) for path, body in bodies]


@dataclass(frozen=True, slots=True)
class Load:
    """The requests and cache blocks of a server."""

    running: int  # requests
    waiting: int
    held: int  # blocks of the KV cache


async def read_load(client: Client) -> Load:
    """Read /load."""
    load = json.loads((await client.get("/load")).body)
    held = load["num_blocks"] - load["num_free_blocks"]
    return Load(load["num_requests_running"], load["num_requests_waiting"], held)


async def digest(client: Client, goldens: list[tuple[str, bytes]]) -> str:
    """Return a digest of the answers to golden requests."""
    found = hashlib.sha256()
    for path, body in goldens:
        reply = json.loads((await client.post(path, body)).body)
        found.update(json.dumps(reply.get("choices", reply), sort_keys=True).encode())
    return found.hexdigest()[:16]


def read_metrics(text: str) -> dict[str, float]:
    """Names and values of Prometheus' text, summed over labels; buckets are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.split("{")[0].split(" ")[0]
        if line and not line.startswith("#") and not name.endswith("_bucket"):
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found
