"""A real server with several models, whose memory holds only some of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from openai import OpenAI
from scripted_server import DEMO
from server import Server, running

from quire.cli.main import main

LIMIT = 50_000_000  # bytes: one of the large models, or the small one beside nothing else
CONFIG = """
max-loaded-memory: 50M
max-model-len: 512
models:
  one: {model: demo, kv-cache-memory-bytes: 24M}
  two: {model: demo, kv-cache-memory-bytes: 24M, quantization: int8, served-model-name: [second, "gpt-*"]}
  broken: {model: BROKEN, kv-cache-memory-bytes: 2M}
"""
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two models of which one fits, and of one whose weights are cut off."""
    folder = tmp_path_factory.mktemp("several")
    broken = folder / "broken"
    shutil.copytree(DEMO, broken)
    config = folder / "models.yaml"
    config.write_text(CONFIG.replace("BROKEN", str(broken)), "utf-8")
    with running("--config", str(config), model=None) as server:
        os.truncate(next(broken.glob("*.safetensors")), 100_000)  # before that it would be refused at start
        yield server


@pytest.fixture
def client(several: Server) -> Iterator[httpx.Client]:
    with several.client() as client:
        yield client


def ask(client: httpx.Client, model: str, max_tokens: int = 8) -> httpx.Response:
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return client.post("/v1/chat/completions", json=body)


def streamed(client: httpx.Client, model: str, max_tokens: int, at_first: Callable[[], None]) -> str:
    """Stream the same answer, and call `at_first` when its first text has come."""
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    text = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                content = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                if content and not text:
                    at_first()
                text += content
    return text


def states(client: httpx.Client) -> dict[str, str]:
    listed = client.get("/v1/models").json()
    assert listed["memory_bytes"] <= listed["max_memory_bytes"] == LIMIT
    return {one["id"]: one["state"] for one in listed["data"]}


def test_models_answer_by_name_and_make_room_for_each_other(several: Server, client: httpx.Client) -> None:
    assert set(states(client).values()) == {"unloaded"}
    sdk = OpenAI(base_url=f"{several.url}/v1", api_key="unused")
    fingerprints = {}
    for name in ("one", "gpt-4o", "one"):
        reply = sdk.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "What is 3 + 4?"}], temperature=0
        )
        assert (reply.model, reply.choices[0].message.content) == (name, "3 + 4 = 7")
        fingerprints[name] = reply.system_fingerprint
        assert [state for state in states(client).values() if state == "loaded"] != []
    assert fingerprints["one"] != fingerprints["gpt-4o"]
    assert states(client)["one"] == "loaded"
    assert states(client)["second"] == states(client)["two"] == "unloaded"
    assert {one.id for one in sdk.models.list().data} == {"one", "two", "second", "broken"}
    text = client.get("/metrics").text
    assert 'quire:model_loads_total{model_name="one"} 2.0' in text
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert client.get("/load").json()["models"].keys() == {"one"}
    assert client.get("/health").json()["models"]["two"]["state"] == "unloaded"
    assert ask(client, "three").status_code == 404


def test_a_stream_is_whole_while_another_model_waits_for_its_memory(
    client: httpx.Client, several: Server
) -> None:
    alone = ask(client, "one", 400).json()["choices"][0]["message"]["content"]
    answers: dict[str, Any] = {}

    def ask_other() -> None:
        with several.client() as other:
            answers["two"] = ask(other, "two")

    thread = threading.Thread(target=ask_other)
    text = streamed(client, "one", 400, thread.start)
    thread.join(60)
    assert text == alone
    assert answers["two"].status_code == 200
    assert states(client)["one"] == "unloaded"


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_own(client: httpx.Client) -> None:
    for _ in range(2):
        reply = ask(client, "broken")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_load_failed")
        assert reply.json()["error"]["message"].startswith("model 'broken' could not be loaded")
    assert ask(client, "one").status_code == 200


def test_the_death_of_an_engine_ends_no_stream(several: Server, client: httpx.Client) -> None:
    alone = ask(client, "two", 200).json()["choices"][0]["message"]["content"]
    pid = several.engine_pid
    assert streamed(client, "two", 200, lambda: os.kill(pid, signal.SIGKILL)) == alone
    assert several.engine_pid != pid


def test_names_as_ollama_lists_them(client: httpx.Client) -> None:
    """A program may list names there, and send them to OpenAI's endpoints."""
    names = [one["name"] for one in client.get("/api/tags").json()["models"]]
    assert "two:latest" in names
    reply = ask(client, "two:latest", 4)
    assert (reply.status_code, reply.json()["model"]) == (200, "two:latest")


def test_ollama_unloads_by_keep_alive(client: httpx.Client) -> None:
    body = {"model": "two:latest", "prompt": "Hi", "options": {"num_predict": 2}, "stream": False}
    assert client.post("/api/generate", json=body).status_code == 200
    running_now = client.get("/api/ps").json()["models"]
    assert [one["name"] for one in running_now] == ["two:latest", "second:latest"]
    client.post("/api/generate", json=body | {"keep_alive": 0})
    while states(client)["two"] != "unloaded":
        pass
    assert client.get("/props?model=two").status_code == 503
    assert len(client.get("/api/tags").json()["models"]) == 4


def test_ollama_describes_a_model_without_loading_it(client: httpx.Client) -> None:
    """Clients ask this of every model that is listed, and would load one after the other."""

    def shown(name: str) -> dict[str, Any]:
        found: dict[str, Any] = client.post("/api/show", json={"model": name}).json()
        assert datetime.fromisoformat(found.pop("modified_at")).year >= 2026
        return found

    assert ask(client, "one", 1).status_code == 200
    assert states(client)["two"] == "unloaded"
    unloaded = [shown(name) for name in ("two", "second:latest")]
    assert states(client)["two"] == "unloaded"
    assert '"/api/show"' in client.get("/metrics").text
    assert ask(client, "two", 1).status_code == 200
    loaded = [shown(name) for name in ("two", "second:latest")]
    for one in (*unloaded, *loaded):
        del one["details"]["quantization_level"]  # which is chosen when it is loaded
    assert unloaded == loaded
    assert [one["modelfile"].splitlines()[0] for one in loaded] == ["FROM two", "FROM second:latest"]
    reply = client.post("/api/show", json={"model": "three"})
    assert reply.status_code == 404


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo", "demo"], "2 models with 1 names"),
        (["demo", "demo-draft", "--replicas", "2"], "replicas with several models"),
        (["demo", "demo-draft", "--max-loaded-memory", "1M"], "model 'demo' cannot be loaded"),
        (["demo", "--models", "x"], "write `models:` in a --config file"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words, "--port", "0"])
    assert ended.value.code != 0
    assert said in capsys.readouterr().err
