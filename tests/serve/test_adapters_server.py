"""Adapters over HTTP: their names, loading and unloading while others are served, and what is refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapter_files as files
import httpx
import numpy as np
import pytest
from server import Server, running

from quire.cli.main import main
from quire.cluster.called_replicas import CalledReplicas
from quire.cluster.split import SplitEngine
from quire.config import EngineConfig, ServerConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.server.app import make_app
from quire.server.openai.adapters import check

KEY = "secret"
ASKED = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 1}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def write(folder: Path, seed: int, model: str = "demo") -> None:
    """An adapter of an embedded model."""
    draw, arrays = np.random.default_rng(seed), {}
    for name, spec in describe(EngineConfig(model=model)).program.weights().items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            out, width = spec.shape
            for part, shape in (("lora_A", (4, width)), ("lora_B", (out, 4))):
                values = 0.3 * draw.standard_normal(shape, np.float32)
                arrays[f"base_model.model.{name.removesuffix('.weight')}.{part}.weight"] = values
    files.write_adapter(folder, files.config(), arrays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        write(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Iterator[Server]:
    with running("--adapter-dir", str(folder), "--load-adapters", QUIRE_API_KEY=KEY) as server:
        yield server


@pytest.fixture
def asking(adapted: Server) -> Iterator[httpx.Client]:
    with adapted.client() as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


def completion(client: httpx.Client, model: str) -> dict[str, object]:
    reply = client.post("/v1/completions", json={**ASKED, "model": model})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return dict(reply.json()["choices"][0])


def test_names(asking: httpx.Client) -> None:
    cards = {card["id"]: card["parent"] for card in asking.get("/v1/models").json()["data"]}
    assert {**cards, "demo": None, "first": "demo", "second": "demo"} == cards
    assert asking.get("/v1/models/first").json()["root"].startswith("first@")
    answers = [completion(asking, name) for name in ("demo", "first", "second", "first")]
    assert answers[1] == answers[3]
    assert len({str(answer["text"]) for answer in answers}) == 3
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    for path in ("/v1/chat/completions", "/v1/messages"):
        texts = [asking.post(path, json={**chat, "model": model}).text for model in ("demo", "first")]
        assert texts[0] != texts[1]
    assert asking.post("/v1/completions", json={**ASKED, "model": "third"}).status_code == 404


def test_loading(asking: httpx.Client, folder: Path) -> None:
    write(folder / "later", 7)
    before = completion(asking, "first")
    reply = asking.post(LOAD, json={"lora_name": "third", "lora_path": str(folder / "later")})
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'third' added successfully.")
    third = completion(asking, "third")
    assert asking.post(LOAD, json={"lora_name": "third", "lora_path": "later"}).status_code == 400
    assert asking.post(LOAD, json={"lora_name": "demo", "lora_path": "later"}).status_code == 400
    assert asking.post(UNLOAD, json={"lora_name": "third"}).status_code == 200
    assert asking.post("/v1/completions", json={**ASKED, "model": "third"}).status_code == 404
    assert asking.post(UNLOAD, json={"lora_name": "third"}).status_code == 404
    for path in ("/etc", "../later", "missing"):
        reply = asking.post(LOAD, json={"lora_name": "third", "lora_path": path})
        assert reply.status_code == 400, reply.text
    asking.post(LOAD, json={"lora_name": "again", "lora_path": "later"}).raise_for_status()
    assert completion(asking, "again") == third
    assert completion(asking, "first") == before


def ollama(client: httpx.Client, path: str, **body: object) -> dict[str, Any]:
    reply = client.post(path, json={"options": {"num_predict": 8, "temperature": 0}, "stream": False, **body})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_names_in_ollamas_form(asking: httpx.Client) -> None:
    for path in ("/api/tags", "/api/ps"):
        found = {one["name"]: one for one in asking.get(path).json()["models"]}
        assert found.keys() >= {"demo:latest", "first:latest", "second:latest"}
        assert len({one["digest"] for one in found.values()}) == len(found)
        parents = {one["details"]["parent_model"] for name, one in found.items() if name != "demo:latest"}
        assert (found["demo:latest"]["details"]["parent_model"], parents) == ("", {"demo"})
    talk = [{"role": "user", "content": "Hi"}]
    said = {"messages": talk, "max_tokens": 8, "temperature": 0}
    expected = asking.post("/v1/chat/completions", json={**said, "model": "first"}).json()
    for name in ("first", "first:latest"):
        answer = ollama(asking, "/api/chat", model=name, messages=talk)
        assert (answer["model"], answer["message"]["content"]) == (
            name,
            expected["choices"][0]["message"]["content"],
        )
        same = asking.post("/v1/chat/completions", json={**said, "model": name}).json()
        assert (same["model"], same["choices"]) == (name, expected["choices"])
        assert (
            ollama(asking, "/api/generate", model=name, prompt="Hi")["response"]
            == (answer["message"]["content"])
        )
        shown = ollama(asking, "/api/show", model=name)
        assert shown["modelfile"].splitlines()[:2] == ["FROM demo", f"ADAPTER {name}"]
        assert shown["details"]["parent_model"] == "demo"
    raw = [ollama(asking, "/api/generate", model=m, prompt="Once", raw=True) for m in ("demo", "first")]
    assert raw[0]["response"] != raw[1]["response"]
    assert asking.post("/api/chat", json={"model": "third:latest", "messages": talk}).status_code == 404
    assert asking.post("/api/embed", json={"model": "first", "input": "Hi"}).status_code == 404


CONFIG = """
max-model-len: 512
load-adapters: true
models:
  one: {model: demo, adapter-dir: ONE}
  two: {model: demo-draft, adapter-dir: TWO}
"""


@pytest.fixture
def several(folder: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """A server of two models, of which each has adapters of its own."""
    write(tmp_path / "two" / "other", 3, "demo-draft")
    config = tmp_path / "models.yaml"
    text = CONFIG.replace("ONE", str(folder)).replace("TWO", str(tmp_path / "two"))
    config.write_text(text, "utf-8")
    with running("--config", str(config), model=None, QUIRE_API_KEY=KEY) as server, server.client() as client:
        client.headers["Authorization"] = f"Bearer {KEY}"
        yield client


def test_adapters_of_several_models(several: httpx.Client, folder: Path) -> None:
    """They are listed and found whether or not their model is loaded, which a request for one loads."""

    def cards() -> dict[str, Any]:
        return {card["id"]: card for card in several.get("/v1/models").json()["data"]}

    parents = {name: (card["parent"], card["state"]) for name, card in cards().items()}
    assert parents["other"] == ("two", "unloaded")
    assert (parents["first"], parents["one"]) == (("one", "unloaded"), (None, "unloaded"))
    assert several.get("/v1/models/other").json() == cards()["other"]
    answers = [completion(several, name)["text"] for name in ("other", "two")]
    assert answers[0] != answers[1]
    assert (cards()["two"]["state"], cards()["one"]["state"]) == ("loaded", "unloaded")
    assert several.get("/v1/models/other").json()["root"].startswith("other@")
    assert completion(several, "first")["text"] != completion(several, "one")["text"]
    talk = [{"role": "user", "content": "Hi"}]
    assert ollama(several, "/api/chat", model="other:latest", messages=talk)["model"] == "other:latest"
    for path in ("/api/tags", "/api/ps"):
        listed = {one["name"]: one["details"]["parent_model"] for one in several.get(path).json()["models"]}
        assert (listed["other:latest"], listed["first:latest"], listed["two:latest"]) == ("two", "one", "")
    for taken in ("first", "one", "two"):
        reply = several.post(LOAD, json={"lora_name": taken, "lora_path": "other", "model": "two"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "lora_name")
    body = {"lora_name": "more", "lora_path": "other", "model": "two"}
    several.post(LOAD, json=body).raise_for_status()
    assert completion(several, "more")["text"] == answers[0]
    several.post(UNLOAD, json={"lora_name": "more", "model": "two"}).raise_for_status()
    assert "more" not in cards()


def test_two_models_cannot_share_names_of_adapters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo", "demo-draft", "--adapter-dir", str(folder), "--port", "0"])
    assert ended.value.code != 0
    said = "the adapter 'first' of model 'demo-draft' has the name of model 'demo', or of an adapter of that"
    assert said in capsys.readouterr().err


class Changing:
    """An engine whose adapters change, as one in a process of its own."""

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("role", "engine"),
    [
        ("prefill", Changing()),
        ("decode", SplitEngine.__new__(SplitEngine)),
        ("both", CalledReplicas.__new__(CalledReplicas)),  # as on Ray
    ],
)
def test_servers_that_change_no_adapters_do_not_start(role: str, engine: Any) -> None:
    link: Any = {} if role == "both" else {"link": ("127.0.0.1:1",), "link_key_file": "key"}
    config = ServerConfig(role=role, load_adapters=True, **link)
    service: Any = SimpleNamespace(config=config, engine_config=EngineConfig(adapter_dir="."), engine=engine)
    with pytest.raises(ConfigError, match="with a role, or on Ray: adapters do not change there"):
        make_app(service, (KEY,))


def test_a_key_is_needed(adapted: Server, server: Server) -> None:
    for path, body in ((LOAD, {"lora_name": "x", "lora_path": "first"}), (UNLOAD, {"lora_name": "first"})):
        assert httpx.post(f"{adapted.url}{path}", json=body).status_code == 401
        assert httpx.post(f"{server.url}{path}", json=body).status_code == 404  # off by default
    with pytest.raises(ConfigError, match="without an API key"):
        check(EngineConfig(adapter_dir="."), keyed=False)
    with pytest.raises(ConfigError, match="without adapter_dir"):
        check(EngineConfig(), keyed=True)


def test_after_a_death(adapted: Server, asking: httpx.Client) -> None:
    """The engine that follows one that died has the adapters that were loaded."""
    asking.post(LOAD, json={"lora_name": "kept", "lora_path": "second"}).raise_for_status()
    expected = completion(asking, "kept")
    os.kill(adapted.engine_pid, signal.SIGKILL)
    while asking.get("/health/ready").status_code == 200:
        time.sleep(0.02)
    while asking.get("/health/ready").status_code != 200:
        time.sleep(0.05)
    assert completion(asking, "kept") == expected
