"""The server over an EngineClient that it does not know: two engines in this process, behind a router."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from guarded import serve
from requests_over_http import wait_for

from quire import LLM, SamplingParams
from quire.build import build
from quire.config import EngineConfig, ServerConfig
from quire.engine.caches import BlockGroup
from quire.engine.client import EngineClient, Stream
from quire.engine.engine import Engine
from quire.engine.in_process import EngineThread
from quire.engine.status import EngineStatus, StepReport
from quire.errors import EngineDead
from quire.server.app import make_app
from quire.server.lifecycle import make_service
from quire.types import NewRequest, Output

CONFIG = EngineConfig(model="demo", max_model_len=512, max_num_seqs=8, num_threads=1, speculative="off")
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, "max_tokens": 16}
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
SUMMED = ("num_running", "num_waiting", "num_free_blocks", "steps")


class TwoEngines:
    """An EngineClient that hands requests to the engines that are healthy, in turns."""

    def __init__(self, engines: list[EngineThread]) -> None:
        self.engines = engines
        self.on_record: Callable[[StepReport], None] | None = None
        self._num_submitted = 0
        for engine in engines:
            engine.on_record = lambda report: self.on_record and self.on_record(report)

    @property
    def status(self) -> EngineStatus:
        each = [engine.status for engine in self.engines]
        states = {status.state for status in each}
        sums = {name: sum(getattr(status, name) for status in each) for name in SUMMED}
        groups = (BlockGroup(sum(status.num_blocks for status in each)),)
        limits = replace(each[0].facts.limits, groups=groups)
        facts = each[0].facts._replace(limits=limits)
        return EngineStatus(state="ready" if "ready" in states else "stopped", facts=facts, **sums)

    @property
    def statuses(self) -> dict[int, EngineStatus]:
        return {0: self.status}

    def watch(self, on: bool) -> None:
        for engine in self.engines:
            engine.watch(on)

    def submit(self, request: NewRequest) -> Stream:
        able = [engine for engine in self.engines if engine.healthy(time.monotonic()) is None]
        if not able:
            raise EngineDead("no engine is left")
        self._num_submitted += 1
        return able[self._num_submitted % len(able)].submit(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        for engine in self.engines:
            engine.abort(request_id, choice)

    def healthy(self, now: float) -> str | None:
        problems = [engine.healthy(now) for engine in self.engines]
        return None if None in problems else problems[0]

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))


class Served:
    """A server over two engines. `client` asks it."""

    def __init__(self, engines: list[Engine], client: httpx.Client) -> None:
        self.engines = engines
        self.client = client

    def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = self.client.post(path, json=body)
        reply.raise_for_status()
        return reply.json()

    def idle(self) -> bool:
        load = self.client.get("/load").json()
        return load["num_requests_running"] == 0 and load["num_free_blocks"] == load["num_blocks"]


@contextmanager
def two_engines() -> Iterator[Served]:
    built = [build(CONFIG) for _ in range(2)]
    router: EngineClient = TwoEngines([EngineThread(one.engine, one.facts) for one in built])
    serving = make_service(ServerConfig(), CONFIG, router, False)
    try:
        with (
            serve(wrapped=make_app(serving, ())) as running,
            httpx.Client(base_url=f"http://127.0.0.1:{running.port}", timeout=60, trust_env=False) as client,
        ):
            yield Served([one.engine for one in built], client)
    finally:
        serving.close()
        asyncio.run(router.close())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with two_engines() as served:
        yield served


def slowly(engine: Engine, step: Callable[[], list[Output]]) -> Callable[[], list[Output]]:
    return lambda: (time.sleep(0.005), step())[1]


def test_answers_of_both_are_those_of_one(served: Served) -> None:
    with LLM("demo", max_model_len=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        expected = llm.chat(CHAT["messages"], params, use_tqdm=False)[0].outputs[0].text  # type: ignore[arg-type]
    before = [len(engine.records) for engine in served.engines]
    for _ in range(4):
        answer = served.post("/v1/chat/completions", CHAT)
        assert answer["choices"][0]["message"]["content"] == expected
    for engine, num_steps in zip(served.engines, before, strict=True):
        assert len(engine.records) >= num_steps + 2 * 16
    pieces = []
    with served.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                pieces += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == expected
    wait_for(served.idle, 60, "idle")


def test_what_is_told_is_of_both(served: Served) -> None:
    served.post("/v1/chat/completions", CHAT)
    wait_for(served.idle, 60, "idle")
    num_blocks = [engine.scheduler.caches.num_blocks for engine in served.engines]
    assert served.client.get("/load").json()["num_blocks"] == sum(num_blocks)
    text = served.client.get("/metrics").text
    steps = sum(len(engine.records) for engine in served.engines)
    assert f'quire:engine_step_total{{engine="0",model_name="demo"}} {float(steps)}' in text
    assert f'num_gpu_blocks="{sum(num_blocks)}"' in text
    assert served.client.get("/server_info").json()["chosen"]["architecture"] == "LlamaForCausalLM"


def test_who_leaves_frees_the_engine(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in served.engines:
        monkeypatch.setattr(engine, "step", slowly(engine, engine.step))
    before = sum(len(engine.records) for engine in served.engines)
    with served.client.stream("POST", "/v1/completions", json=LONG) as reply:
        next(reply.iter_lines())
    wait_for(served.idle, 60, "idle")
    assert sum(len(engine.records) for engine in served.engines) - before < 300


def test_one_engine_dies_and_the_other_serves() -> None:
    def fails() -> list[Output]:
        raise ArithmeticError("a broken kernel")

    with two_engines() as served:
        for number, engine in enumerate(served.engines):
            assert served.client.get("/health").status_code == 200
            for one in served.engines:
                vars(one)["step"] = slowly(one, one.step)
            with (
                served.client.stream("POST", "/v1/completions", json=LONG) as first,
                served.client.stream("POST", "/v1/completions", json=LONG) as second,
            ):
                lines = [reply.iter_lines() for reply in (first, second)]
                for own in lines:
                    next(own)
                vars(engine)["_step"] = fails
                for one in served.engines:
                    del vars(one)["step"]
                ended = ["a broken kernel" in "".join(own) for own in lines].count(True)
            assert ended == 1 + number  # of two streams, those of the engine that died
            if number == 0:
                assert len(served.post("/v1/chat/completions", CHAT)["choices"]) == 1
        assert served.client.get("/health").status_code == 503
        refused = served.client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
