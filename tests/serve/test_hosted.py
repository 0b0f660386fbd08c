"""Several models in one server: which one answers, when each is loaded, and what requests may notice."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from remote_engines import until
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp
from tiny_encoders import write_bert, write_cross_encoder

from quire.cluster.local import local_replicas
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError, Overloaded, QuireError, RequestError
from quire.server.app import HANDLERS, REFUSALS
from quire.server.errors import HTTPRefusal
from quire.server.hosted import policy
from quire.server.hosted.budget import Allotment, ModelSpec, budgets
from quire.server.hosted.door import Door
from quire.server.hosted.host import Host, HostedModel
from quire.server.hosted.policy import Need
from quire.server.hosted.routes import show_unloaded
from quire.server.hosted.serving import open_models
from quire.server.llamacpp import routes as llamacpp
from quire.server.logs import RequestLog
from quire.server.ollama import models as ollama
from quire.server.openai import responses
from quire.server.service import QueueFull

UNUSED: Any = None
PATHS = ("/v1/completions", "/page/experiments/fleet")
EVERY = Starlette(
    routes=[
        *(Route(path, lambda request: UNUSED, methods=["POST"]) for path in PATHS),
        Route("/props", lambda request: UNUSED),
        *ollama.ROUTES,
        *responses.ROUTES,
    ],
    exception_handlers=HANDLERS,
)
REFUSING = Starlette(
    routes=[*llamacpp.ROUTES, *ollama.ROUTES, *responses.ROUTES], exception_handlers=HANDLERS
)


@dataclass
class FakeService:
    """What the host asks a service."""

    requests: set[Any] = field(default_factory=set)
    adapters: dict[str, Any] = field(default_factory=dict)
    is_over: bool = False

    def end_feeds(self) -> None:
        """Nobody watches."""


class FakeModels:
    """Models of 6 of 10 bytes each, whose loading waits until it `may`, and fails if it is told to."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.may = asyncio.Event()
        self.may.set()
        self.error: Exception | None = None
        self.held: list[str] = []
        self.past: list[tuple[str, ...]] = []
        self.config = ServerConfig(**options)
        models = []
        for name in names:
            spec = ModelSpec(name, ServerConfig(served_model_name=(name, f"{name}-*")), EngineConfig())
            models.append(
                HostedModel(spec, Allotment(10, Need(name, 4, 2), 1, UNUSED, None), self.config.idle_unload)
            )
        self.host = Host(self.config, models, 10, self.open)

    @asynccontextmanager
    async def open(self, spec: ModelSpec, _: Allotment) -> AsyncIterator[Any]:
        self.held.append(spec.name)
        self.past.append(tuple(self.held))
        try:
            await self.may.wait()
            if self.error is not None:
                raise self.error
            yield FakeService(), PlainTextResponse(spec.name)
        finally:
            self.held.remove(spec.name)

    async def enter(self, name: str) -> HostedModel:
        model = self.host.find(name)
        await self.host.enter(model, asyncio.get_running_loop().create_future())
        return model


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(whole())


def test_a_model_is_loaded_once_for_all_that_wait() -> None:
    async def test() -> None:
        fake = FakeModels("a", "b")
        fake.may.clear()
        entering = [asyncio.create_task(fake.enter("a")) for _ in range(3)]
        await asyncio.sleep(0)
        assert [one.state for one in fake.host.models.values()] == ["loading", "unloaded"]
        fake.may.set()
        await asyncio.gather(*entering)
        assert (fake.past, fake.host.models["a"].num_users, fake.host.used_bytes) == ([("a",)], 3, 6)
        await fake.host.close()
        assert fake.held == []

    run(test)


def test_a_model_in_use_is_not_unloaded_under_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "TURN_S", 0.0)

    async def test() -> None:
        fake = FakeModels("a", "b")
        first = await fake.enter("a")
        other = asyncio.create_task(fake.enter("b"))
        await until(lambda: first.is_closed)
        assert fake.held == ["a"]
        again = asyncio.create_task(fake.enter("a"))  # it must wait until b has had its turn
        await until(lambda: first.waiters)
        fake.host.leave(first)
        second = await other
        assert fake.past == [("a",), ("b",)]
        fake.host.leave(second)
        await again
        assert fake.past == [("a",), ("b",), ("a",)]
        await fake.host.close()

    run(test)


def test_a_load_that_fails_is_an_error_of_its_requests_alone() -> None:
    async def test() -> None:
        fake = FakeModels("a", "b")
        used = await fake.enter("a")
        fake.host.leave(used)
        fake.error = ConfigError("a tensor is missing", "download it again")
        for _ in range(2):  # each time it is tried again
            both = await asyncio.gather(fake.enter("b"), fake.enter("b"), return_exceptions=True)
            assert [type(one) for one in both] == [HTTPRefusal, HTTPRefusal]
            assert both[0].message == "model 'b' could not be loaded: a tensor is missing"
            assert (both[0].status, both[0].hint) == (503, "download it again")
        fake.error = None
        assert (await fake.enter("b")).num_failures == 2
        await fake.host.close()

    run(test)


def test_waiting_has_limits() -> None:
    async def test() -> None:
        fake = FakeModels("a", "b", load_wait=0.02, max_queued_requests=1)
        await fake.enter("a")
        late = asyncio.create_task(fake.enter("b"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await fake.enter("b")
        with pytest.raises(Overloaded, match=r"memory of models in use \(a\)"):
            await late
        fake.host.leave(fake.host.models["a"])
        fake.may.clear()
        with pytest.raises(Overloaded, match="loading goes on"):
            await fake.enter("b")
        await fake.host.close()

    run(test)


def test_a_client_that_leaves_while_it_waits_holds_nothing() -> None:
    async def test() -> None:
        fake = FakeModels("a")
        fake.may.clear()
        waiting = asyncio.create_task(fake.enter("a"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        fake.may.set()
        model = fake.host.models["a"]
        await until(lambda: model.state == "loaded")
        assert (model.num_users, model.waiters) == (0, [])
        await fake.host.close()

    run(test)


def test_models_are_unloaded_after_idle_time_and_with_their_engines() -> None:
    async def test() -> None:
        fake = FakeModels("a", idle_unload=0.02)
        model = await fake.enter("a")
        await asyncio.sleep(0.05)
        assert model.state == "loaded"
        fake.host.leave(model)
        await until(lambda: (model.state, fake.held) == ("unloaded", []))
        model = await fake.enter("a")
        fake.host.leave(model, 60.0)
        await asyncio.sleep(0.05)
        assert model.state == "loaded"
        model.service.is_over = True  # type: ignore[union-attr, misc]
        assert not fake.host.is_over
        await until(lambda: model.state == "unloaded")

    run(test)


@contextmanager
def refused(status: int) -> Iterator[None]:
    with pytest.raises(QuireError) as caught:
        yield
    assert getattr(caught.value, "status", 503) == status


def test_names_patterns_and_tags_are_found() -> None:
    async def test() -> None:
        host = FakeModels("a", "b").host
        asked = {None: "a", "a": "a", "b": "b", "b-large": "b", "b:latest": "b"}
        assert {name: host.find(name).name for name in asked} == asked
        with refused(404):
            host.find("c")

    run(test)


def test_an_adapter_of_two_models_is_an_error_for_its_name_alone() -> None:
    async def test() -> None:
        host = FakeModels("a", "b").host
        for name, adapters in (("a", ("x", "b", "b-large")), ("b", ("x", "y"))):
            service: Any = FakeService()
            service.adapters = {own: SimpleNamespace(name=own, adapter=f"{own}@{name}") for own in adapters}
            host.models[name].service = service
        # Names of models come first, and patterns last.
        asked = {"y": "b", "y:latest": "b", "b": "b", "b-large": "a", "b-small": "b"}
        assert {name: host.find(name).name for name in asked} == asked
        with pytest.raises(RequestError, match="several models have an adapter 'x': a, b"):
            host.find("x")
        assert host.names_beside("a") == {"b", "x", "y"}

    run(test)


def test_the_door_reads_the_model_and_passes_the_body_on() -> None:
    async def test() -> None:
        fake = FakeModels("a", "b")
        door = Door(fake.host, UNUSED, [], [], EVERY)
        bodies = [(b'{"x": [1], "mod', 1), (b'el": "b"}', 0)]
        assert await sent(door, bodies, "/v1/completions") == (200, b"b")
        assert await sent(door, [(b'{"model": "b", "keep_alive": 0}', 0)], "/api/chat") == (200, b"b")
        assert fake.host.models["b"].state == "unloading"
        assert (await sent(door, [(b'{"model": 7}', 0)], "/v1/completions"))[0] == 400
        assert (await sent(door, [(b'{"model": "c"}', 0)], "/v1/completions"))[0] == 404
        assert (await sent(door, [], "/props", "GET"))[0] == 503
        assert await sent(door, [(b"{}", 0)], "/page/experiments/fleet", query=b"model=b") == (200, b"b")
        assert await sent(door, [(b'{"model": "a"}', 0)], "/v1/completions", query=b"model=b") == (200, b"a")
        await fake.host.close()

    run(test)


@pytest.mark.parametrize("keep_alive", [b"1" + b"0" * 400, b"-1", b'"9h"', b"1e300"])
def test_a_model_that_is_kept_for_long_can_still_make_room(keep_alive: bytes) -> None:
    async def test() -> None:
        fake = FakeModels("a", "b")
        door = Door(fake.host, UNUSED, [], [], EVERY)
        body = b'{"model": "a", "keep_alive": %s}' % keep_alive
        assert await sent(door, [(body, 0)], "/api/chat") == (200, b"a")
        assert fake.host.models["a"].num_users == 0
        assert fake.host.models["a"].idle_unload_s > 3600
        assert await sent(door, [(b'{"model": "b"}', 0)], "/v1/completions") == (200, b"b")
        await fake.host.close()

    run(test)


def test_no_model_is_loaded_for_what_no_route_is_for() -> None:
    async def test() -> None:
        fake = FakeModels("a", "b")
        door = Door(fake.host, UNUSED, [], [], EVERY)
        assert (await sent(door, [(b'{"model": "b"}', 0)], "/completions"))[0] == 404
        assert (await sent(door, [(b'{"model": "b"}', 0)], "/props"))[0] == 405
        assert (await sent(door, [], "/nowhere", "GET"))[0] == 404
        assert not fake.past
        answer = await sent(door, [(b"{}", 0)], "/completions")
        assert b"/v1/completions exists" in answer[1]
        await fake.host.close()

    run(test)


def test_no_model_is_loaded_for_what_is_refused_in_any_case() -> None:
    async def test() -> None:
        fake = FakeModels("a", "b")
        door = Door(fake.host, UNUSED, [], [], REFUSING, REFUSALS)
        for path, method, status in (
            ("/api/pull", "POST", 501),
            ("/props", "POST", 501),
            ("/slots/0", "POST", 501),
            ("/api/blobs/sha256:0", "HEAD", 501),
            ("/v1/responses/compact", "POST", 404),
            ("/v1/responses/resp_1", "GET", 404),
            ("/v1/responses/resp_1/cancel", "POST", 404),
        ):
            assert (await sent(door, [(b'{"model": "b"}', 0)], path, method))[0] == status
        assert not fake.past
        assert await sent(door, [(b'{"model": "b"}', 0)], "/v1/responses/input_tokens") == (200, b"b")
        await fake.host.close()

    run(test)


def test_a_model_that_is_given_up_before_it_gets_a_request_is_an_error() -> None:
    async def test() -> None:
        fake = FakeModels("a")

        @asynccontextmanager
        async def given_up(*args: Any) -> AsyncIterator[Any]:
            async with fake.open(*args) as (service, app):
                service.is_over = True
                asyncio.get_running_loop().call_soon(lambda: fake.host.is_over)
                yield service, app

        host = Host(fake.config, [*fake.host.models.values()], 10, given_up)
        status, body = await sent(Door(host, UNUSED, [], [], EVERY), [(b"{}", 0)], "/v1/completions")
        assert (status, b"model 'a' is unloaded" in body) == (503, True)
        assert host.models["a"].num_users == 0
        await host.close()

    run(test)


def test_no_body_is_kept_while_its_request_is_answered() -> None:
    async def test() -> None:
        fake, pieces, counts = FakeModels("a"), [(b'{"model": "a"}'.ljust(99), 0)], list[int]()

        async def answered(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            counts.append(sys.getrefcount(pieces[0][0]))
            await PlainTextResponse("a")(scope, receive, send)

        (await fake.enter("a")).app = answered
        await sent(Door(fake.host, UNUSED, [], [], EVERY), pieces, "/v1/completions")
        assert counts == [sys.getrefcount(pieces[0][0])]
        await fake.host.close()

    run(test)


def test_what_is_refused_before_a_model_is_counted_by_its_path() -> None:
    async def test() -> None:
        fake, counted = FakeModels("a"), list[str]()
        count: Any = lambda method, path, status: counted.append(path)  # noqa: E731
        log = RequestLog(Door(fake.host, UNUSED, [], [], EVERY, REFUSALS), count)
        await sent(log, [(b'{"model": "c"}', 0)], "/v1/completions")
        await sent(log, [], "/props", "GET")
        await sent(log, [(b"{}", 0)], "/v1/responses/resp_1/cancel")
        paths = ("/v1/completions", "/props", "/v1/responses/{response_id}/cancel")
        assert counted == [*paths]
        await fake.host.close()

    run(test)


async def sent(
    door: ASGIApp, body: list[tuple[bytes, int]], path: str, method: str = "POST", query: bytes = b""
) -> tuple[int, bytes]:
    """Send a request in these pieces; return the status and the body of the answer."""
    messages = [{"type": "http.request", "body": piece, "more_body": bool(more)} for piece, more in body]
    answers: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [],
        "query_string": query,
        "state": {},
    }
    await door(scope, receive, send)
    return answers[0]["status"], answers[1]["body"]


def specs(**options: Any) -> list[ModelSpec]:
    engine = EngineConfig(model="demo", max_model_len=256, max_num_seqs=4, **options)
    other = EngineConfig(model="demo-draft", max_model_len=256, max_num_seqs=4, **options)
    return [ModelSpec("a", ServerConfig(), engine), ModelSpec("b", ServerConfig(), other)]


def test_memory_is_divided_and_what_cannot_fit_is_refused() -> None:
    limit, (one, other) = budgets(specs(), 60_000_000)
    assert one.need.total_bytes + other.need.total_bytes <= limit == 60_000_000
    assert one.available_bytes < limit
    tight = max(one.need.total_bytes, other.need.total_bytes) + 1_000_000
    assert all(each.need.total_bytes <= tight for each in budgets(specs(), tight)[1])  # each alone
    with pytest.raises(
        ConfigError, match="model 'a' cannot be loaded: 1 MB of memory are available"
    ) as error:
        budgets(specs(), 1_000_000)
    assert "max-loaded-memory" in str(error.value.hint)
    with pytest.raises(ConfigError, match="are free"):
        budgets(specs(), 1 << 60)


def test_the_use_of_a_model_is_known_before_it_is_loaded(tmp_path: Path) -> None:
    """Ollama's clients list models by what they can do."""
    embedder, scorer = (
        ModelSpec(own.name, ServerConfig(), EngineConfig(model=str(own)))
        for own in (write_bert(tmp_path / "embedder"), write_cross_encoder(tmp_path / "scorer"))
    )
    _, found = budgets([specs()[0], embedder, scorer], None)
    capabilities = [ollama.capabilities_of(one.pooling, False) for one in found]
    assert capabilities == [["completion"], ["embedding"], []]


def test_models_with_the_same_weights_share_them() -> None:
    first, other = specs()
    _, both = budgets([first, ModelSpec("c", other.config, first.engine_config)], 60_000_000)
    assert both[0].need.weights == both[1].need.weights
    assert [one.num_sharing for one in both] == [2, 2]


def test_what_starts_several_engines_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process would keep a part of the GPU's memory: "auto" is the CPU there."""

    def asked(*_: Any) -> None:
        raise AssertionError("a GPU was asked for its memory")

    monkeypatch.setattr("quire.backends.device.automatic_gpu", asked)
    monkeypatch.setattr("quire.description.automatic_gpu", asked)
    found = specs()
    assert {spec.engine_config.device for spec in found} == {"auto"}
    config = ServerConfig()
    open_models(config, found, UNUSED, UNUSED)
    local_replicas(replace(config, replicas=2), found[0].engine_config, measure=False)


def test_replicas_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of their memory, which the process of the server never asks for."""
    made: list[Any] = []

    def make(config: EngineConfig, **how: Any) -> None:
        made.append((config.device, how["available_bytes"], how["num_sharing"]))

    monkeypatch.setattr("quire.cluster.local.RemoteEngine", make)
    for device in ("cuda:1", "auto"):
        config = EngineConfig(device=device, tensor_parallel_size=2)
        replicas = local_replicas(ServerConfig(replicas=2), config, measure=False)
        for place in replicas.places:
            replicas._make(place)
    assert made == [(f"cuda:{first}", None, 1) for first in (1, 3, 0, 2)]


def test_a_model_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Where its files went after the start, and before it is described."""
    facts: Any = SimpleNamespace(max_model_len=64, sees=False, quantization=None)
    spec = ModelSpec("gone", ServerConfig(), EngineConfig(model=str(tmp_path / "gone")))
    model = HostedModel(spec, Allotment(10, Need("gone", 4, 2), 1, facts, None), 60.0)
    with pytest.raises(HTTPRefusal, match="model 'gone' cannot be read") as caught:
        asyncio.run(show_unloaded(UNUSED, model, "gone"))
    assert caught.value.status == 503
    assert model.shown is None
