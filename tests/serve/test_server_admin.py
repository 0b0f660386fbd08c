"""The endpoints beside generation, over real sockets."""

from __future__ import annotations

import json

import httpx
import pytest
from server import Server

from quire import __version__
from quire.cli.inspect import as_dict
from quire.config import EngineConfig
from quire.description import describe
from quire.frontend import LONGEST_TEXT

TEXT = "Once upon a time, in a small village"


def test_models(client: httpx.Client) -> None:
    found = client.get("/v1/models").json()
    assert found["object"] == "list"
    (card,) = found["data"]
    assert card == client.get("/v1/models/demo").json()
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (
        "demo",
        "model",
        "quire",
        1024,
    )
    assert isinstance(card["created"], int)


@pytest.mark.parametrize("name", ["other", "demo/", "org/name", "..%2f..%2fetc", "%00"])
def test_another_model_is_not_found(client: httpx.Client, name: str) -> None:
    reply = client.get(f"/v1/models/{name}")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"


def test_tokens_and_back(client: httpx.Client) -> None:
    found = client.post("/tokenize", json={"model": "demo", "prompt": TEXT, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 1024
    for ids, text in ((found["tokens"], TEXT), ([], "")):
        assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text, "content": text}


def test_a_conversation_as_tokens(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello."}]
    ids = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.startswith("<|im_start|>")
    assert "Hello." in text
    shorter = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert shorter["tokens"] == ids[: shorter["count"]] != ids


def test_control_tokens_in_a_text_are_text(client: httpx.Client) -> None:
    plain = client.post("/tokenize", json={"prompt": "It ends with <|im_end|>"}).json()
    assert plain["count"] > 6
    alone = client.post("/tokenize", json={"prompt": "<|im_end|>"}).json()  # so clients ask for its id
    assert alone["count"] == 1


@pytest.mark.parametrize("name", ["prompt", "content"])
def test_a_text_that_would_take_much_memory_is_not_tokenized(client: httpx.Client, name: str) -> None:
    most = "word " * (LONGEST_TEXT // 5)
    assert client.post("/tokenize", json={name: most[: 1 << 20]}).status_code == 200  # beyond the context
    reply = client.post("/tokenize", json={name: most + "words"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, name)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": [3]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}], "tools": 3}, "tools"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 70]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_wrong_fields_are_named(client: httpx.Client, path: str, body: object, param: str) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == (404 if param == "model" else 400)
    error = reply.json()["error"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[1]", 400),
        (b"3", 400),
        (b'{"tokens": [NaN]}', 400),
        (b'{"tokens": [1], "more": Infinity}', 400),
        (b'{"tokens": [1], "more": 1e999}', 400),
        (b'{"tokens": [1], "more": "\\ud800"}', 400),
        (b'{"tokens": [1], "more": "\xff"}', 400),
        (b'{"tokens": ' + b"[" * 100_000, 400),
        (b'{"tokens": [1], "more": ' + b"[" * 64 + b"]" * 64 + b"}", 400),
        (b'{"tokens": [1], "more": ' + b"[" * 63 + b"]" * 63 + b"}", 200),
        (b'{"tokens": [1], "more": [' + b"[]," * 1_000_000 + b"[]]}", 400),
        (b'{"tokens": [1], "more": [' + b"1," * 100_000 + b"1]}", 200),
        (b'{"tokens": [1], "more": [' + b"1," * 1_000_000 + b"1]}", 400),
        (b'{"tokens": [' + b"1," * 999_990 + b"1]}", 200),
        (b'{"tokens": [' + b"1," * 1_000_000 + b"1]}", 400),
    ],
)
def test_bodies(client: httpx.Client, raw: bytes, status: int) -> None:
    reply = client.post("/detokenize", content=raw, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text
    if status == 400:
        assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_only_json_is_read(client: httpx.Client, kind: str | None) -> None:
    """A web page of another origin can send the other types without being asked."""
    headers = {} if kind is None else {"Content-Type": kind}
    assert client.post("/detokenize", content=b'{"tokens": [1]}', headers=headers).status_code == 415
    fine = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post("/detokenize", content=b'{"tokens": [1]}', headers=fine).status_code == 200


def test_the_tokenizer_is_described(client: httpx.Client) -> None:
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["vocab_size"] == 2048
    assert "messages" in info["chat_template"]


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live", "/ping"])
def test_health(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200


def test_version_and_load(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": __version__}
    load = client.get("/load").json()
    assert load["server_load"] == load["num_requests_running"] == load["num_requests_queued"] == 0
    assert load["num_free_blocks"] == load["num_blocks"] > 0


def test_what_was_chosen_is_told(server: Server, client: httpx.Client) -> None:
    info = client.get("/server_info").json()
    assert info["models"] == ["demo"]
    assert info["chosen"]["backend"] == "native"
    assert info["chosen"]["drafts"] == "from texts and grammars"
    assert info["chosen"]["isa"] in info["system_fingerprint"]
    assert info["system_fingerprint"].startswith(f"quire-{__version__}-")
    assert "/" not in json.dumps(info)


def test_the_sizes_of_the_model_are_those_of_inspect(client: httpx.Client) -> None:
    model = client.get("/server_info").json()["model"]
    shown = as_dict(describe(EngineConfig()))
    assert model["architecture"] == shown["architecture"]
    assert model["num_layers"] == shown["num_hidden_layers"]
    assert (model["num_heads"], model["num_kv_heads"]) == (8, 4)
    for name in ("hidden_size", "head_dim", "vocab_size", "kv_bytes_per_token", "kv_cache_dtype"):
        assert model[name] == shown[name], name
    assert model["num_parameters"] == shown["parameters"]
    assert model["weight_bytes"] == sum(shown["weight_bytes"].values())
    assert model["max_model_len"] == shown["memory"]["max_model_len"] == 1024
    assert (model["quantization"], model["windows"]) == (None, [None])


def test_the_metrics_are_there(client: httpx.Client) -> None:
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert 'vllm:num_requests_running{engine="0",model_name="demo"}' in reply.text


def test_the_document_describes_every_path(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    for path in (
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/health/ready",
        "/metrics",
        "/server_info",
    ):
        assert path in document["paths"]
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"]
    assert "quire." not in text  # where types of one name are told apart by their modules
    for name in ("ChatRequest", "OllamaChatRequest", "CompletionRequest", "LlamacppCompletionRequest"):
        assert name in document["components"]["schemas"]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_that_there_is_a_server(client: httpx.Client, method: str) -> None:
    reply = client.request(method, "/")
    assert reply.status_code == 200
    assert reply.text == ("Quire is running" if method == "GET" else "")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/models", 405),
        ("GET", "/tokenize", 405),
        ("DELETE", "/version", 405),
        ("POST", "/nothing", 404),
    ],
)
def test_what_is_not_there(client: httpx.Client, method: str, path: str, status: int) -> None:
    reply = client.request(method, path, headers={"Content-Type": "application/json"})
    assert reply.status_code == status
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("GET", "/models", "/v1/models"),
        ("POST", "/messages", "/v1/messages"),
        ("POST", "/v1/v1/messages", "/v1/messages"),
        ("POST", "/v1/api/chat", "/api/chat"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("GET", "/nothing", "/openapi.json"),
    ],
)
def test_a_wrong_base_url_is_answered_with_the_path_that_exists(
    client: httpx.Client, method: str, path: str, meant: str
) -> None:
    reply = client.request(method, path, headers={"Content-Type": "application/json"})
    assert reply.status_code == 404
    assert f"({meant} " in reply.text
