"""Text between two others: llama.cpp's /infill, and `suffix` at /v1/completions and /api/generate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from requests_over_http import idle, wait_for
from server import Server, running

from quire.weights.hub import DEMO

NAMES = {
    "<tool_call>": "<|fim_prefix|>",
    "</tool_call>": "<|fim_suffix|>",
    "<tool_response>": "<|fim_middle|>",
    "</tool_response>": "<|file_sep|>",
}
PREFIX, SUFFIX = "Once upon a time a fox", "The end."
WRITTEN = f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
GREEDY = {"temperature": 0, "n_predict": 12, "ignore_eos": True}
Object = dict[str, Any]


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the demo model with tokens of other names: what it fills in has no sense."""
    folder = tmp_path_factory.mktemp("models") / "filling"
    shutil.copytree(DEMO, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for old, new in NAMES.items():
            text = text.replace(json.dumps(old), json.dumps(new))
        (folder / name).write_text(text)
    with running(model=str(folder)) as server:
        yield server


@pytest.fixture
def filler(filling: Server) -> Iterator[httpx.Client]:
    with filling.client() as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def infill(client: httpx.Client, **body: Any) -> Any:
    return post(client, "/infill", **{"input_prefix": PREFIX, "input_suffix": SUFFIX, **GREEDY, **body})


def test_the_prompt_is_that_of_the_model(filler: httpx.Client) -> None:
    found = infill(filler, return_tokens=True)
    same = post(filler, "/completion", prompt=WRITTEN, return_tokens=True, **GREEDY)
    assert found["prompt"] == WRITTEN
    assert (found["tokens"], found["content"]) == (same["tokens"], same["content"])
    more = infill(filler, prompt=" ran", input_extra=[{"filename": "fox.txt", "text": "red", "time": 3}])
    assert more["prompt"] == f"<|file_sep|>fox.txt\nred\n<|file_sep|>filename\n{WRITTEN} ran"
    assert "warnings" not in more


def test_tokens_of_the_prompt_end_the_text(filler: httpx.Client) -> None:
    """Also the one before a file, which a model writes after the end of its own."""
    (end,) = post(filler, "/tokenize", content="<|file_sep|>", parse_special=True)["tokens"]
    forced = {"logit_bias": [[end, 100]]}
    found = infill(filler, **forced, ignore_eos=False)
    assert (found["content"], found["stop_type"], found["tokens_predicted"]) == ("", "eos", 1)
    assert infill(filler, **forced)["tokens_predicted"] == 12
    assert (
        post(filler, "/completion", prompt=WRITTEN, **{**GREEDY, "ignore_eos": False}, **forced)[
            "tokens_predicted"
        ]
        == 12
    )


def test_long_texts_are_cut_to_the_context(filler: httpx.Client) -> None:
    others = [{"filename": f"{number}", "text": "a b c " * 50} for number in range(40)]
    long = {"input_prefix": "once " * 3000 + PREFIX, "input_suffix": SUFFIX + " again" * 3000}
    for extra in ([], others):
        found = infill(filler, **long, input_extra=extra, n_predict=24)
        assert found["tokens_evaluated"] == 1024 - 24
        assert f"{PREFIX}<|fim_suffix|>{SUFFIX}" in found["prompt"]
    found = infill(filler, input_extra=others, n_predict=24)
    assert 850 < found["tokens_evaluated"] <= 1024 - 24
    assert "<|file_sep|>39\n" in found["prompt"]
    assert "<|file_sep|>0\n" not in found["prompt"]
    assert infill(filler, **long, n_predict=-1, stop=["e", " "])["tokens_evaluated"] == 768
    reply = filler.post("/infill", json={**long, "prompt": "once " * 3000})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "exceed_context_size_error")


def test_requests_of_editors(filler: httpx.Client) -> None:
    """As llama.vim sends them: all of its fields, and first one that only fills the cache."""
    asked = {
        "samplers": ["top_k", "top_p", "infill"],
        "top_k": 40,
        "top_p": 0.99,
        "cache_prompt": True,
        "n_indent": 0,
        "stream": False,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 60_000,
        "response_fields": [
            "content",
            "timings/predicted_n",
            "timings/cache_n",
            "truncated",
            "warnings",
            "no/such",
        ],
    }
    long = {"input_prefix": PREFIX * 20}
    first = infill(filler, **asked, **long, n_predict=0)
    assert (first["content"], first["timings/predicted_n"]) == ("", 0)
    assert first["warnings"] == ["samplers: 'infill' is not applied"]
    second = infill(filler, **asked, **long)
    assert second.keys() == first.keys() == {*asked["response_fields"]} - {"no/such"}
    assert second["timings/predicted_n"] == 12
    assert second["timings/cache_n"] > 60
    empty = post(filler, "/completion", prompt=PREFIX, n_predict=0, n_probs=2, return_tokens=True)
    assert (empty["content"], empty["tokens"], empty["tokens_predicted"]) == ("", [], 0)
    assert (empty["stop_type"], "completion_probabilities" in empty) == ("limit", False)
    with filler.stream(
        "POST", "/completion", json={"prompt": PREFIX, "n_predict": 0, "stream": True}
    ) as reply:
        (event,) = [json.loads(line[6:]) for line in reply.iter_lines() if line]
    assert (event["stop"], event["content"]) == (True, "")


def test_samplers_that_are_not_listed_are_off(filler: httpx.Client) -> None:
    def settings(*names: str) -> Object:
        found = infill(
            filler, samplers=[*names], temperature=0.2, top_k=7, top_p=0.5, min_p=0.1, repeat_penalty=1.3
        )
        shown: Object = found["generation_settings"]
        return {name: shown[name] for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")}

    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    assert settings("xtc") == off
    assert settings("top_k", "top_p") == off | {"top_k": 7, "top_p": 0.5}
    assert settings("penalties", "temperature") == off | {"temperature": 0.2, "repeat_penalty": 1.3}


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_of_too_little_indentation_ends_the_text(
    filling: Server, filler: httpx.Client, stream: bool
) -> None:
    """The sequence is aborted; of several prompts, others go on."""
    asked = {
        "grammar": 'root ::= "a b\\n  c\\nd e f g h i j k l m n o p q r s t u v w x y z"',
        "n_indent": 1,
        "n_predict": 60,
    }
    body = {"prompt": [PREFIX, SUFFIX], **asked, "stream": stream}
    if stream:
        with filler.stream("POST", "/completion", json=body) as reply:
            events = [json.loads(line[6:]) for line in reply.iter_lines() if line]
        texts = ["".join(event["content"] for event in events if event["index"] == index) for index in (0, 1)]
        ends = [event for event in events if event["stop"]]
    else:
        ends = post(filler, "/completion", **body)
        texts = [one["content"] for one in ends]
    assert texts == ["a b\n  c"] * 2
    assert [one["stop_type"] for one in ends] == ["limit"] * 2
    assert all(one["timings"]["prompt_ms"] > 0 for one in ends)
    wait_for(lambda: idle(filling), 60, "nothing runs")
    whole = post(filler, "/completion", **{**body, "stream": False, "n_indent": 0})
    assert all(one["content"].endswith("x y z") for one in whole)


def test_after_a_time_a_line_break_ends_the_text(filler: httpx.Client) -> None:
    words = "".join(f"w{number}\\n" for number in range(100))
    asked = {"prompt": PREFIX, "grammar": f'root ::= "{words}"', "n_predict": 500}
    found = post(filler, "/completion", **asked, t_max_predict_ms=0.001)
    assert found["content"].endswith("\n")
    assert 1 <= found["content"].count("\n") < 100
    assert found["stop_type"] == "limit"
    assert post(filler, "/completion", **asked, t_max_predict_ms=600_000)["content"].count("\n") == 100


def test_a_suffix_of_a_completion(filler: httpx.Client) -> None:
    asked = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    found = post(filler, "/v1/completions", **asked)
    assert found["choices"][0]["text"] == infill(filler)["content"]
    assert found["usage"]["prompt_tokens"] == infill(filler)["tokens_evaluated"]
    two = post(filler, "/v1/completions", **{**asked, "prompt": [PREFIX, "Once"], "n": 2, "temperature": 1})
    assert len(two["choices"]) == 4
    plain = post(filler, "/v1/completions", **{**asked, "suffix": ""})
    assert plain["usage"]["prompt_tokens"] == len(post(filler, "/tokenize", prompt=PREFIX)["tokens"])
    for name, value in (
        ("echo", True),
        ("truncate_prompt_tokens", 5),
        ("add_special_tokens", False),
        ("prompt", [5]),
    ):
        reply = filler.post("/v1/completions", json={**asked, name: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


def test_a_suffix_in_ollamas_form(filler: httpx.Client) -> None:
    asked: Object = {
        "prompt": PREFIX,
        "suffix": SUFFIX,
        "stream": False,
        "options": {"num_predict": 12, "temperature": 0},
    }
    found = post(filler, "/api/generate", **asked)
    assert found["response"] == infill(filler, ignore_eos=False)["content"]
    assert found["prompt_eval_count"] == infill(filler)["tokens_evaluated"]
    assert post(filler, "/api/generate", **{**asked, "prompt": ""})["eval_count"] > 0
    for name, value in (("system", "Be brief."), ("raw", True), ("images", ["QUJD"])):
        assert filler.post("/api/generate", json={**asked, name: value}).status_code == 400
    shown = post(filler, "/api/show", model="filling")
    assert "insert" in shown["capabilities"]
    assert shown["template"].startswith(
        "{{- if .Suffix }}<|fim_prefix|>{{ .Prompt }}<|fim_suffix|>{{ .Suffix }}<|fim_middle|>{{- end }}"
    )


def test_a_model_without_such_tokens(client: httpx.Client) -> None:
    texts = {"input_prefix": PREFIX, "input_suffix": SUFFIX}
    reply = client.post("/infill", json=texts)
    assert (reply.status_code, reply.json()["error"]["type"]) == (501, "not_supported_error")
    for path in ("/v1/completions", "/api/generate"):
        reply = client.post(path, json={"model": "demo", "prompt": PREFIX, "suffix": SUFFIX})
        assert (reply.status_code, "does not fill in" in reply.text) == (400, True)
    shown = client.post("/api/show", json={"model": "demo"}).json()
    assert "insert" not in shown["capabilities"]
    assert ".Suffix" not in shown["template"]
