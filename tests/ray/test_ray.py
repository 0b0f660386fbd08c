"""A deployment on Ray answers as one server does, and loses no request that it took."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
import yaml
from both import both
from deployments import free_port, parent, processes
from ray import serve
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.request_router import RequestRouter
from ray.serve.schema import ServeDeploySchema
from request_mix import answer
from request_mix import request as draw
from requests_over_http import wait_for
from server import PYTHON, Server

from quire.cluster.called_replicas import CalledReplicas
from quire.cluster.ray import BlockRouter, EngineReplica, RayConfig, app, deploy
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError

TESTS = Path(__file__).parents[1]
NUM_REQUESTS = 24
LIMIT_S = 300  # on a machine that has other work
LONG_CLIENTS = ("test_lm_eval.py", "test_evaluate_example.py", "test_schemathesis.py")
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0}
Asked = tuple[str, dict[str, Any], bool]


def drawn(seed: int, count: int = NUM_REQUESTS) -> list[Asked]:
    rng = random.Random(seed)
    return [(*draw(rng), rng.random() < 0.5) for _ in range(count)]


def lengthened(seed: int, count: int) -> list[Asked]:
    """Streams that take long enough for something to happen to them."""
    shared = "Tell me a story about a fox and a lantern. "
    return [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": shared * i}], "seed": seed + i, **LONG},
            True,
        )
        for i in range(1, count + 1)
    ]


def answers(server: Any, asked: list[Asked]) -> list[Any]:
    """What a server answers to requests that it gets together."""
    with server.client() as client, ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: answer(client, *one), asked))


def during(server: Any, asked: list[Asked], act: Callable[[], None]) -> list[Any]:
    """What a server answers to streams while something happens to it, after each has begun."""
    begun = [threading.Event() for _ in asked]

    def follow(one: Asked, has_begun: threading.Event) -> Any:
        try:
            return answer(client, *one, has_begun.set)
        finally:
            has_begun.set()

    with server.client() as client, ThreadPoolExecutor(len(asked)) as pool:
        running = [pool.submit(follow, *pair) for pair in zip(asked, begun, strict=True)]
        for has_begun in begun:
            has_begun.wait()
        act()
        return [one.result(LIMIT_S) for one in running]


def test_answers_are_those_of_one_server(deployed: Any, alone: Server) -> None:
    asked = drawn(1)
    assert answers(deployed, asked) == answers(alone, asked)
    with deployed.client() as client:
        engines = {
            line.split('engine="')[1][0]
            for line in client.get("/metrics").text.splitlines()
            if "engine=" in line
        }
        assert engines == {"0", "1"}


def test_engines_of_a_host_share_their_weights(deployed: Any) -> None:
    first, second = (
        {
            line.split()[-1]
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            if "/packed/" in line
        }
        for pid in deployed.engines()
    )
    assert len(first) == 1
    assert first == second


def test_replicas_and_decisions_are_shown(deployed: Any) -> None:
    with deployed.client() as client:
        body = {"model": "demo", "prompt": "Once upon a time. " * 20, "max_tokens": 2}
        answered = client.post("/v1/completions", json=body)
        listed = client.get("/replicas").json()
        assert {one["pid"] for one in listed["replicas"]} == {*deployed.engines()}
        assert [one["health"] for one in listed["replicas"]] == ["ready", "ready"]
        assert all(one["name"] and one["host"] for one in listed["replicas"])
        last = client.get("/router/decisions?last=1").json()["decisions"][0]
        assert last["request"] == answered.headers["x-quire-tag"]
        assert last["num_prompt_blocks"] > 2
        assert "quire:router_decisions_total" in client.get("/metrics").text
        for path, asked in (("/replicas", {"count": 1}), ("/replicas/restart", None)):
            refused = client.post(path, json=asked)
            assert refused.status_code == 409
            assert "Ray Serve" in refused.json()["error"]["message"]


def test_clients_find_nothing_different(deployed: Any, alone: Server) -> None:
    """All packages that are installed; each answer is that of one server, to the bit."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore"]
    command += [f"--confcutdir={TESTS / 'clients'}", str(TESTS / "clients")]
    command += [f"--ignore={TESTS / 'clients' / name}" for name in LONG_CLIENTS]
    command += ["-k", "not keys and not full_server and not dies and not patience and not are_left"]
    with both(deployed.url, alone.url) as (url, found):
        env = {**os.environ, "QUIRE_TEST_SERVER": url, "QUIRE_TEST_PYTHON": PYTHON}
        done = subprocess.run(
            command, env=env, cwd=TESTS.parent, capture_output=True, text=True, timeout=LIMIT_S
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not found.differences
    assert found.num_same > 100


def test_streams_go_on_when_an_engine_is_killed(deployed: Any, alone: Server) -> None:
    asked = lengthened(100, 6)
    expected = answers(alone, asked)
    killed = deployed.engines()[0]
    assert during(deployed, asked, lambda: os.kill(killed, signal.SIGKILL)) == expected
    wait_for(lambda: len(deployed.engines()) == 2, LIMIT_S, "two engines")
    assert killed not in deployed.engines()


def test_streams_go_on_when_a_replica_of_serve_is_killed(deployed: Any, alone: Server) -> None:
    asked = lengthened(200, 6)
    expected = answers(alone, asked)
    (killed,) = {parent(pid) for pid in deployed.engines()[:1]}
    assert during(deployed, asked, lambda: os.kill(killed, signal.SIGKILL)) == expected
    wait_for(lambda: len(deployed.engines()) == 2, LIMIT_S, "two engines")


def test_a_front_that_is_killed_cuts_its_streams_and_another_one_serves(deployed: Any, alone: Server) -> None:
    """Whoever it answered is told at once, and who comes while there is no front waits for the next."""
    (asked,) = lengthened(250, 1)
    expected = answers(alone, [asked])
    (killed,) = deployed.fronts()

    def cut() -> None:
        with deployed.client() as client, pytest.raises(httpx.TransportError):
            answer(client, *asked, lambda: os.kill(killed, signal.SIGKILL))

    cut()
    assert answers(deployed, [asked]) == expected
    assert deployed.fronts() not in ([], [killed])
    with deployed.client() as client:
        wait_for(lambda: not client.get("/load").json()["server_load"], LIMIT_S, "no request that is left")


@pytest.mark.parametrize("change", ["fewer engines", "more engines", "other engines"])
def test_changes_lose_no_stream(deployed: Any, alone: Server, change: str) -> None:
    """Engines are stopped, started, and replaced by others while streams run."""
    config = deployed.config
    changed = {
        "fewer engines": replace(config, replicas=1),
        "more engines": replace(config, replicas=2),
        "other engines": replace(config, engine=replace(config.engine, max_num_seqs=24)),
    }[change]
    asked = lengthened(300, 6)
    assert during(deployed, asked, lambda: deployed.redeploy(changed)) == answers(alone, asked)
    wait_for(lambda: len(deployed.engines()) == changed.replicas, LIMIT_S, "as many engines")


def test_engines_are_added_for_the_load(deployed: Any) -> None:
    """No number of engines keeps such a goal, so the most are wanted as soon as there is any load."""
    deployed.redeploy(replace(deployed.config, replicas=1))
    engine = replace(deployed.config.engine, itl_goal=1e-5, max_num_prefill_tokens=None)
    deployed.redeploy(replace(deployed.config, replicas=(1, 2), engine=engine))
    wait_for(lambda: len(deployed.engines()) == 1, LIMIT_S, "one engine")
    with deployed.client() as client:

        def added() -> bool:
            client.post("/v1/completions", json={"model": "demo", "prompt": "a", "max_tokens": 8})
            return len(deployed.engines()) == 2

        wait_for(added, LIMIT_S, "two engines")
        listed = client.get("/replicas").json()
        assert listed["num_places"] == 2
        assert [(change["before"], change["after"]) for change in listed["autoscaling"]["changes"]] == [
            (1, 2)
        ]


def test_options_of_serve_run_are_fields() -> None:
    assert isinstance(app({"replicas": "[1, 4]", "ttft_goal": 2}), serve.Application)
    with pytest.raises(ConfigError, match="need a latency goal"):
        app({"replicas": [1, 4]})
    with pytest.raises(ConfigError, match="one front"):
        app({"replicas": [1, 4], "ttft_goal": 2, "fronts": 2})
    with pytest.raises(ConfigError, match="fronts = 0"):
        app({"fronts": 0})
    built = app({"model": "demo", "replicas": "3", "quantization": "int8", "served-model-name": ["a", "b"]})
    assert isinstance(built, serve.Application)
    with pytest.raises(ConfigError, match="no option 'replica'"):
        app({"replica": 1})
    with pytest.raises(ConfigError, match="max_num_seqs"):
        app({"max_num_seqs": "many"})


def test_engines_ask_ray_for_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    options = serve.Deployment.options

    def keep(self: serve.Deployment, **how: Any) -> serve.Deployment:
        if "ray_actor_options" in how:
            asked[how["name"]] = how["ray_actor_options"].get("num_gpus")
        return options(self, **how)

    monkeypatch.setattr(serve.Deployment, "options", keep)
    for device, ranks in (("native", 1), ("auto", 1), ("cuda:1", 1), ("cuda", 2), ("auto", 2)):
        assert isinstance(app({"device": device, "tensor_parallel_size": ranks}), serve.Application)
        assert asked == {"engines": 0 if "cuda" not in device and ranks == 1 else ranks, "front": None}
        config = EngineReplica(EngineConfig(device=device, tensor_parallel_size=ranks))._config
        assert config.device == ("cuda" if asked["engines"] else "native")


def test_example_files_are_what_ray_reads() -> None:
    folder = TESTS.parent / "examples" / "ray"
    (found,) = ServeDeploySchema(**yaml.safe_load((folder / "serve.yaml").read_text())).applications
    assert found.import_path == "quire.cluster.ray:app"
    assert isinstance(app(found.args), serve.Application)
    validate_config(prepare_config(yaml.safe_load((folder / "cluster.yaml").read_text())))


def test_the_router_overrides_only_what_is_documented() -> None:
    public = {"choose_replicas", "on_request_routed", "update_replicas", "on_replica_actor_died"}
    own = {name for name in vars(BlockRouter) if not name.startswith("__") and name != "_abc_impl"}
    assert own & {*dir(RequestRouter)} == public


def test_proxies_that_start_slowly_are_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own limit is a minute for each call; the second is the last."""
    tried: list[str] = []

    def slow(*args: Any, **fields: Any) -> None:
        tried.append("start" if "http_options" in fields else "run")
        raise TimeoutError("HTTP proxies not available after 60s.")

    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(serve, "start", slow)
    monkeypatch.setattr(serve, "run", slow)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr("quire.cluster.ray.hand_down", lambda variables: None)
    with pytest.raises(ConfigError, match="not deployed: HTTP proxies"):
        deploy(RayConfig(server=ServerConfig(), engine=EngineConfig()), print)
    assert tried == ["start", "run"]


@pytest.mark.parametrize("method", ["generate", "poll"])
def test_a_call_without_its_replica_is_given_to_others(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Serve asks again at once, and without a pause, for a call that gets none: nothing else would run."""
    unready = SimpleNamespace(choose=lambda request_id, among: None)
    monkeypatch.setattr(CalledReplicas, "of_front", unready)
    candidates: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id="here"))]
    call: Any = SimpleNamespace(args=["gone"], metadata=SimpleNamespace(call_method=method))
    router: Any = object.__new__(BlockRouter)
    assert asyncio.run(router.choose_replicas(candidates, call)) == [candidates]


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    command = [
        sys.executable,
        "-m",
        "quire",
        "deploy",
        "ray",
        "demo",
        "--port",
        str(port),
        "--num-threads",
        "1",
    ]
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(
            lambda: child.poll() is not None or f"127.0.0.1:{port}/v1" in log.read_text(),
            LIMIT_S,
            "the address",
        )
        assert child.poll() is None, log.read_text()
        below = processes(child.pid)
        assert "quire-engine" in below.values()
        child.send_signal(signal.SIGINT)
        assert child.wait(LIMIT_S) == 0, log.read_text()
        assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]
    finally:
        child.kill()
