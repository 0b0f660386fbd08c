"""Adapters over HTTP: their names, loading and unloading while others are served, and what is refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import adapter_files as files
import httpx
import numpy as np
import pytest
from server import Server, running

from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.server.openai.adapters import check

KEY = "secret"
ASKED = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 1}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def write(folder: Path, seed: int) -> None:
    """An adapter of the demo model."""
    draw, arrays = np.random.default_rng(seed), {}
    for name, spec in describe(EngineConfig()).program.weights().items():
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
    assert cards == {"demo": None, "first": "demo", "second": "demo"}
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
    expected = completion(asking, "again")
    os.kill(adapted.engine_pid, signal.SIGKILL)
    while asking.get("/health/ready").status_code == 200:
        time.sleep(0.02)
    while asking.get("/health/ready").status_code != 200:
        time.sleep(0.05)
    assert completion(asking, "again") == expected
