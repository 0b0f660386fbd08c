"""What load generators and front ends send, written out, and what they read of the answers."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Tell me a story about a dragon."
PARTS = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]


def events(client: httpx.Client, path: str, body: Any) -> Iterator[Any]:
    """As most clients read: lines, of which those with data count, up to [DONE]."""
    with client.stream("POST", path, json=body, headers={"Accept": "text/event-stream"}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
    raise AssertionError("no [DONE]")


def test_vllm_bench_serve_of_completions(client: httpx.Client) -> None:
    """`vllm bench serve --backend openai --ignore-eos`: the first token is the first chunk with choices."""
    body = {
        "model": "demo",
        "prompt": TEXT,
        "repetition_penalty": 1.0,
        "max_tokens": 200,  # on a busy machine many come together
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    text, counted, times = "", None, []
    for event in events(client, COMPLETIONS, body):
        if choices := event.get("choices"):
            times.append(time.perf_counter())
            text += choices[0].get("text") or ""
        elif usage := event.get("usage"):
            counted = usage
    assert counted is not None
    assert (counted["prompt_tokens"], counted["completion_tokens"]) == (len(_ids(client)), 200)
    assert text
    assert len(times) > 1


def test_vllm_bench_serve_of_chat(client: httpx.Client) -> None:
    body = {
        "model": "demo",
        "messages": PARTS,
        "max_completion_tokens": 40,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    *found, last = events(client, CHAT, body)
    contents = [event["choices"][0]["delta"].get("content") for event in found]
    assert contents[0] == ""  # the role comes with the first token
    assert "".join(content or "" for content in contents)
    assert last["usage"]["completion_tokens"] == 40
    assert not last["choices"]


def test_vllm_bench_serve_reads_metrics(client: httpx.Client) -> None:
    """Those of speculation by the beginnings of their names; and a profiler may be absent."""
    found = {}
    for line in client.get("/metrics").text.splitlines():
        for name in ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total"):
            if line.startswith(f"vllm:spec_decode_{name}"):
                found[name] = float(line.split()[-1])
    assert len(found) == 3
    assert found["num_draft_tokens_total"] >= found["num_drafts_total"]
    assert found["num_draft_tokens_total"] >= found["num_accepted_tokens_total"]
    assert client.post("/start_profile").status_code == 404


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_guidellm(client: httpx.Client, path: str) -> None:
    """Health, the first model, and usage with every chunk."""
    assert client.get("/health").status_code == 200
    model = client.get("/v1/models").json()["data"][0]["id"]
    body: Any = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "stop": None,
    }
    if path == CHAT:
        body |= {"messages": PARTS, "max_completion_tokens": 40}
    else:
        body |= {"prompt": TEXT, "max_tokens": 40}
    found = list(events(client, path, body))
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert all(before <= after for before, after in itertools.pairwise(counts))
    assert counts[0] >= 1
    assert counts[-1] == 40
    assert {event["usage"]["prompt_tokens"] for event in found} == {found[0]["usage"]["prompt_tokens"]}


def test_aiperf(client: httpx.Client) -> None:
    """Server-sent events by the standard, tokens by the usage at the end, and the server's own gauges."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": TEXT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 30,
        "min_tokens": 30,
        "ignore_eos": True,
    }
    with client.stream("POST", CHAT, json=body) as reply:
        raw = reply.read().decode()
    messages = re.split(r"\r\n\r\n|\n\n|\r\r", raw)
    fields = [line.partition(":") for message in messages for line in message.splitlines()]
    assert {name for name, _, _ in fields} == {"data"}
    found = [json.loads(value) for _, _, value in fields if value.strip() != "[DONE]"]
    deltas = [choice["delta"] for event in found for choice in event["choices"]]
    assert "".join(d.get("reasoning_content") or d.get("reasoning") or d.get("content") or "" for d in deltas)
    assert found[-1]["usage"]["completion_tokens"] == 30
    text = client.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert re.search(rf'^vllm:{name}{{[^}}]*model_name="demo"[^}}]*}} [0-9.]+$', text, re.MULTILINE)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert f"vllm:{name}_bucket" in text


def test_open_webui(client: httpx.Client) -> None:
    """No line is longer than the buffers of aiohttp; a title is asked for beside the answer."""
    body = {
        "model": "demo",
        "stream": True,
        "messages": [{"role": "user", "content": TEXT}],
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 200,
        "return_token_ids": True,
        "metadata": {"chat_id": "1"},
    }
    with client.stream("POST", CHAT, json=body) as reply:
        assert max(len(line) for line in reply.read().splitlines()) < 1 << 16
    title = {"model": "demo", "messages": body["messages"], "stream": False, "max_completion_tokens": 20}
    assert client.post(CHAT, json=title).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("as_text", [False, True])
def test_lm_eval_weighs_continuations(client: httpx.Client, as_text: bool) -> None:
    """Its greedy flag asks for equal floats: the token's own logprob among the likeliest ones."""
    ids = _ids(client)
    prompt: Any = [TEXT, TEXT] if as_text else [ids, ids]
    body = {
        "model": "demo",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = client.post(COMPLETIONS, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    flags = set()
    for choice in choices:
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(ids) + 1
        pairs = list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:-1]
        assert all(token in top.values() for token, top in pairs)
        flags |= {token == max(top.values()) for token, top in pairs}
        assert sum(token for token, _ in pairs) < 0
    assert flags == {False, True}
    assert choices[0]["logprobs"] == choices[1]["logprobs"]


def test_lm_eval_finds_the_tokenizer_here(client: httpx.Client) -> None:
    """What it probes before it takes the server's instead of one of its own."""
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"]
    asked = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert client.post("/tokenize", json=asked).json()["count"] == 1
    assert client.post("/detokenize", json={"tokens": _ids(client)}).json()["prompt"] == TEXT


def _ids(client: httpx.Client) -> list[int]:
    reply = client.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False})
    found: list[int] = reply.json()["tokens"]
    return found
