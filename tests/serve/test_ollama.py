"""Ollama's endpoints: answers and their lines, options, tools, what is told of the model, what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jsonschema
import msgspec
import pytest
from named_events import ScriptedRun
from outside_values import VALUES, altered, replaced
from requests_over_http import idle, wait_for
from server import Server

from quire.errors import EngineDead, QuireError, RequestError
from quire.server.chat_task import ChatRun, ChatTask, Finish
from quire.server.logprob_json import LogprobCursor
from quire.server.ollama.answers import JsonLines, OllamaAnswer, _chat_reply
from quire.server.ollama.protocol import (
    IGNORED,
    REFUSED,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaInputMessage,
    OllamaRequest,
    OllamaTask,
    _thinking,
    chat_task,
)
from quire.server.service import ServiceState
from quire.server.unsupported_fields import OFF_FROM, OFF_UP_TO
from quire.text.answer import CallArguments, CallStart, Content, Reasoning

CHAT, GENERATE = "/api/chat", "/api/generate"
STORY: list[Any] = [{"role": "user", "content": "Tell me a story about a dragon."}]
OPTIONS = {"seed": 5, "temperature": 1.0, "top_p": 1.0, "num_predict": 60}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bonn"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Bonn?"}]
COUNTS = ("prompt_eval_count", "eval_count")
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
Object = dict[str, Any]


def ask(client: httpx.Client, path: str = CHAT, **body: Any) -> Object:
    """A response as a whole."""
    given = {"messages": STORY} if path == CHAT else {"prompt": "Tell me a story about a dragon."}
    reply = client.post(path, json={"stream": False, **given, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"
    found: Object = reply.json()
    return found


def lines(client: httpx.Client, path: str = CHAT, **body: Any) -> list[Object]:
    """The objects of a stream, whose form is checked."""
    given = {"messages": STORY} if path == CHAT else {"prompt": "Tell me a story about a dragon."}
    with client.stream("POST", path, json={**given, **body}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"] == "application/x-ndjson"
        text = reply.read().decode()
    assert text.endswith("\n")
    found = [json.loads(line) for line in text.splitlines()]
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", one["created_at"]) for one in found)
    return found


def refused(client: httpx.Client, path: str = CHAT, status: int = 400, **body: Any) -> str:
    """What is said of a request that is refused, in Ollama's shape."""
    given = {"messages": STORY} if path == CHAT else {"prompt": "Hello."}
    reply = client.post(path, json={**given, **body})
    assert reply.status_code == status, (reply.status_code, reply.text)
    assert reply.json().keys() == {"error"}
    message: str = reply.json()["error"]
    return message


# Bodies


@pytest.mark.parametrize(
    "headers",
    [{}, *({"Content-Type": f"application/{kind}"} for kind in ("octet-stream", "x-www-form-urlencoded"))],
)
def test_a_body_without_a_type_is_json(client: httpx.Client, headers: Object) -> None:
    """LiteLLM sends bodies so: with httpx, and with aiohttp; and curl -d, as Ollama's documents have it."""
    body = {
        "model": "demo",
        "messages": STORY,
        "options": {"num_predict": 8, "temperature": 0.7, "stop": ["zz"]},
        "stream": False,
    }
    reply = client.post(CHAT, content=json.dumps(body).encode(), headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.json()["message"]["content"]


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (CHAT, {"Origin": "null"}),
        (CHAT, {"Origin": "https://example.com"}),
        (CHAT, {"Sec-Fetch-Site": "cross-site"}),
        (CHAT, {"Content-Type": "text/plain"}),
        (CHAT, {"Content-Type": "application/octet-stream", "Origin": "https://example.com"}),
        ("/v1/chat/completions", {"Content-Type": "application/octet-stream"}),
        ("/v1/chat/completions", {}),
    ],
)
def test_a_page_cannot_leave_out_the_type(client: httpx.Client, path: str, headers: Object) -> None:
    """A script can: of a Blob. But the browser then says where the request comes from."""
    body = json.dumps({"messages": STORY}).encode()
    assert client.post(path, content=body, headers=headers).status_code == 415


# Answers


def test_an_answer_is_that_of_a_conversation(client: httpx.Client) -> None:
    options = {"seed": 5, "temperature": 1.0, "top_p": 1.0, "max_tokens": 60}
    chat = client.post("/v1/chat/completions", json={"messages": STORY, **options}).json()
    found = ask(client, model="demo", options=OPTIONS)
    assert found["message"] == {"role": "assistant", "content": chat["choices"][0]["message"]["content"]}
    assert (found["done"], found["model"]) == (True, "demo")
    counted = chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]
    assert tuple(found[name] for name in COUNTS) == counted
    assert all(found[name] > 0 for name in DURATIONS)
    assert sum(found[name] for name in DURATIONS[1:]) == pytest.approx(found["total_duration"], rel=1e-3)
    assert ask(client, GENERATE, options=OPTIONS)["response"] == found["message"]["content"]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_stream_is_the_answer_in_parts(client: httpx.Client, path: str) -> None:
    """It is what comes where nothing is said."""
    given = {"options": OPTIONS, "logprobs": True, "top_logprobs": 2}
    whole, (*parts, last) = ask(client, path, **given), lines(client, path, **given)

    def text(one: Object) -> str:
        said: str = one["message"]["content"] if path == CHAT else one["response"]
        return said

    assert "".join(map(text, parts)) == text(whole)
    assert [p for part in parts for p in part.get("logprobs", ())] == whole["logprobs"]
    assert text(last) == ""
    assert [last[name] for name in (*COUNTS, "done_reason")] == [whole[n] for n in (*COUNTS, "done_reason")]
    assert not any(parts[0].keys() & {*COUNTS, *DURATIONS, "done_reason"})
    first = whole["logprobs"][0]
    assert first.keys() == {"token", "logprob", "bytes", "top_logprobs"}
    assert len(first["top_logprobs"]) == 2


def test_why_it_ended(client: httpx.Client) -> None:
    greedy = {"temperature": 0, "num_predict": -1}
    story = ask(client, options=greedy)
    assert story["done_reason"] == "stop"
    cut = ask(client, options=greedy | {"num_predict": 5})
    assert (cut["done_reason"], cut["eval_count"]) == ("length", 5)
    word = story["message"]["content"].split()[3]
    stopped = ask(client, options=greedy | {"stop": [word, ""]})
    assert stopped["message"]["content"] == story["message"]["content"].partition(word)[0]
    assert stopped["done_reason"] == "stop"


def test_an_assistants_message_is_gone_on_with(client: httpx.Client) -> None:
    begun = [*STORY, {"role": "assistant", "content": "Once upon a time there was a"}]
    found = ask(client, messages=begun, options={"temperature": 0})
    same = client.post(
        "/v1/chat/completions",
        json={"messages": begun, "temperature": 0, "continue_final_message": True},
    ).json()
    assert found["message"]["content"] == same["choices"][0]["message"]["content"]


def test_a_raw_prompt_is_taken_as_it_stands(client: httpx.Client) -> None:
    """Its control tokens are control tokens."""
    prompt = client.post("/apply-template", json={"messages": STORY}).json()["prompt"]
    chat = ask(client, options=OPTIONS)
    raw = ask(client, GENERATE, prompt=prompt, raw=True, options=OPTIONS)
    assert raw["response"] == chat["message"]["content"]
    assert raw["prompt_eval_count"] == chat["prompt_eval_count"]
    plain = ask(client, GENERATE, prompt=prompt, options=OPTIONS)
    assert plain["prompt_eval_count"] > raw["prompt_eval_count"] + 10
    streamed = lines(client, GENERATE, prompt=prompt, raw=True, options=OPTIONS)
    assert "".join(line["response"] for line in streamed) == raw["response"]
    assert "maximum context" in refused(client, GENERATE, prompt="word " * 2000, raw=True)


def test_a_system_message(client: httpx.Client) -> None:
    found = ask(client, GENERATE, prompt="Hello.", system="Be brief.", options=OPTIONS)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    assert found["response"] == ask(client, messages=messages, options=OPTIONS)["message"]["content"]
    assert "raw" in refused(client, GENERATE, system="Be brief.", raw=True)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_format(client: httpx.Client, path: str) -> None:
    options = {"temperature": 0, "num_predict": 100}
    found = ask(client, path, format=PARAMETERS, options=options)
    text = found["message"]["content"] if path == CHAT else found["response"]
    jsonschema.validate(json.loads(text), PARAMETERS)
    same = ask(client, path, format="", options=options)
    none = ask(client, path, format=None, options=options)
    assert {**same, **dict.fromkeys((*DURATIONS, "created_at"))} == {
        **none,
        **dict.fromkeys((*DURATIONS, "created_at")),
    }
    assert refused(client, path, format="xml").startswith("format")
    assert refused(client, path, format={"type": "nothing"}).startswith("format")


def test_any_json(client: httpx.Client) -> None:
    found = lines(client, format="json", options={"num_predict": 20, "temperature": 0})
    text = "".join(line["message"]["content"] for line in found)
    assert text.lstrip().startswith("{")


def test_tools(client: httpx.Client) -> None:
    """A call comes whole, its arguments as an object."""
    given: Object = {"messages": WEATHER, "tools": TOOLS, "options": {"temperature": 0, "num_predict": 100}}
    whole = ask(client, **given)
    (call,) = whole["message"]["tool_calls"]
    assert call["id"]
    assert (call["function"]["name"], call["function"]["index"]) == ("get_weather", 0)
    jsonschema.validate(call["function"]["arguments"], PARAMETERS)
    assert whole["done_reason"] == "stop"
    *parts, last = lines(client, **given)
    (streamed,) = (c for part in parts for c in part["message"].get("tool_calls", ()))
    assert streamed["function"] == call["function"]
    assert "tool_calls" not in last["message"]
    turns = [
        *WEATHER,
        whole["message"],
        {"role": "tool", "content": "rain " * 20, "tool_name": "get_weather"},
    ]
    again = ask(client, messages=turns, tools=TOOLS, options=given["options"])
    assert again["prompt_eval_count"] > whole["prompt_eval_count"] + 40
    assert "tools[0]" in refused(client, tools=[{"type": "function"}])


def test_to_load_a_model_is_done(client: httpx.Client) -> None:
    for path, body in ((CHAT, {"messages": []}), (GENERATE, {"prompt": "", "keep_alive": 0})):
        reply = client.post(path, json={"model": "demo", **body})
        assert (reply.status_code, reply.json()["done"], reply.json()["done_reason"]) == (200, True, "load")
    assert client.post(GENERATE, json={"model": "demo"}).json()["response"] == ""
    assert client.post(CHAT, json={"model": "demo"}).json()["message"]["content"] == ""


@pytest.mark.parametrize("name", ["demo", "demo:latest", None])
def test_names(client: httpx.Client, name: str | None) -> None:
    assert ask(client, model=name, options={"num_predict": 1})["model"] == (name or "demo")


@pytest.mark.parametrize("name", ["other", "demo:7b", "other:latest", ":latest", ""])
def test_other_names(client: httpx.Client, name: str) -> None:
    assert "not served" in refused(client, status=404, model=name)
    assert "not served" in refused(client, "/api/show", status=404, model=name or "x")


# Events, without a server


def streamed(*batches: Any, error: Exception | None = None) -> list[Object]:
    """The lines of a run that says this."""
    run: Any = ScriptedRun(*batches, error=error)
    times = dict.fromkeys(("total_ms", "queue_ms", "prefill_ms"), 1.0)
    run.generation = SimpleNamespace(timings=lambda: times)
    output: Any = SimpleNamespace(token_ids=[], logprobs=None)
    answer = OllamaAnswer(
        cast(ChatRun, run), LogprobCursor(output, None), partial(_chat_reply, model="demo"), []
    )
    parts: list[bytes] = []

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    async def receive() -> Object:
        raise AssertionError

    asyncio.run(JsonLines(answer.lines())({"type": "http", "path": CHAT}, receive, send))
    return [json.loads(line) for line in b"".join(parts).splitlines()]


def test_thoughts_text_and_calls() -> None:
    *parts, last = streamed(
        [Reasoning("Let me"), Reasoning(" see.")],
        [Content("I ask."), CallStart(0, "call_a", "f"), CallArguments(0, '{"a":')],
        [CallArguments(0, " 1}"), CallStart(1, "call_b", "g"), CallArguments(1, "{}")],
        [Finish("tool_calls", None)],
    )
    assert [part["message"] for part in parts] == [
        {"role": "assistant", "content": "", "thinking": "Let me see."},
        {"role": "assistant", "content": "I ask."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_a", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_b", "function": {"index": 1, "name": "g", "arguments": {}}}],
        },
    ]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 10, 20)


@pytest.mark.parametrize("text", ["", '{"city": "Ul', '{"city": {"a": 1}'])
def test_a_call_that_was_cut_is_not_made(text: str) -> None:
    found = streamed([CallStart(0, "call_a", "f"), CallArguments(0, text)], [Finish("length", None)])
    assert [line["done_reason"] for line in found] == ["length"]
    assert "tool_calls" not in found[0]["message"]


@pytest.mark.parametrize(
    ("error", "words"),
    [(EngineDead("gone"), "gone"), (QuireError("failed"), "failed"), (ValueError("/etc/x"), "its log")],
)
def test_an_error_within_a_stream(error: Exception, words: str) -> None:
    first, last = streamed([Content("a")], error=error)
    assert first["message"]["content"] == "a"
    assert last.keys() == {"error"}
    assert words in last["error"]


def test_a_client_that_goes(server: Server, client: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "raw": True, "options": {"num_predict": 900, "temperature": 2}}
    with client.stream("POST", GENERATE, json=body) as reply:
        assert next(reply.iter_lines())
    wait_for(lambda: idle(server), 1.0, "its request ends")


# What is asked


def _service(reasoning: object = None, read: str = "") -> ServiceState:
    """A model whose template reads this variable."""
    frontend, output_format = SimpleNamespace(max_model_len=1024), SimpleNamespace(reasoning=reasoning)
    named = {"frontend": frontend, "names": ("demo",), "output_format": output_format}
    return cast(ServiceState, SimpleNamespace(**named, template_reads=read.__eq__))


@pytest.mark.parametrize(
    ("think", "variables", "shown"),
    [
        (None, {}, True),
        (True, {"enable_thinking": True}, True),
        (False, {"enable_thinking": False}, False),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}, True),
        ("max", {"enable_thinking": True, "reasoning_effort": "high"}, True),
    ],
)
def test_thinking(think: Any, variables: Object, shown: bool) -> None:
    task = chat_task(
        OllamaChatRequest(messages=[OllamaInputMessage(role="User", content="Hi")], think=think), _service(1)
    )
    assert task.chat is not None
    assert task.chat.chat_template_kwargs == variables
    assert task.chat.include_reasoning is shown
    assert task.chat.messages == [{"role": "user", "content": "Hi"}]


def test_a_level_of_thinking_that_the_template_does_not_read_is_said() -> None:
    asked = OllamaChatRequest(messages=[OllamaInputMessage(role="user", content="Hi")], think="low")
    without, reading = (chat_task(asked, _service(1, read)).chat for read in ("", "reasoning_effort"))
    assert without is not None
    assert without.warnings == ["think = 'low' has the effect of true: this model has no levels"]
    assert reading is not None
    assert reading.warnings == []


def test_a_model_that_does_not_think(client: httpx.Client) -> None:
    assert refused(client, think=True).startswith('"demo" does not support thinking')
    assert refused(client, GENERATE, think="low").startswith('"demo" does not support thinking')
    assert refused(client, think="wild").startswith("think")
    assert ask(client, think=False, options={"num_predict": 1})["done"]
    with pytest.raises(RequestError, match="known"):
        _thinking(OllamaRequest(think="hard"), _service(1))


def test_turns_as_templates_read_them() -> None:
    turns = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "thinking": "Hm.",
            "tool_calls": [{"function": {"index": 0, "name": "f", "arguments": {"a": 1}}, "id": "call_a"}],
        },
        {"role": "tool", "content": "rain", "tool_name": "f", "tool_call_id": "call_a"},
    ]
    (task, *_) = chat_task(msgspec.convert({"messages": turns}, OllamaChatRequest), _service())
    function = {"name": "f", "arguments": {"a": 1}}
    assert isinstance(task, ChatTask)
    assert list(task.messages) == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"type": "function", "function": function, "id": "call_a"}],
        },
        {"role": "tool", "content": "rain", "name": "f", "tool_call_id": "call_a"},
    ]
    assert task.add_generation_prompt
    assert chat_task(OllamaChatRequest(), _service()) == OllamaTask(None)


def test_calls_without_ids_are_given_some() -> None:
    """Ollama's own package leaves them out, and there are templates that refuse calls without."""

    def call(name: str, **more: str) -> Object:
        return {"function": {"name": name, "arguments": {}}, **more}

    def result(**more: str) -> Object:
        return {"role": "tool", "content": "x", **more}

    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call("f"), call("g"), call("h", id="own")]},
        *(result(), result(tool_call_id="own"), result()),
        {"role": "assistant", "tool_calls": [call("f")]},
        *(result(), result()),
    ]
    (task, *_) = chat_task(msgspec.convert({"messages": turns}, OllamaChatRequest), _service())
    assert task is not None
    calls = [one["id"] for message in task.messages for one in message.get("tool_calls", ())]
    assert calls == ["call00001", "call00002", "own", "call00004"]
    told = [message.get("tool_call_id") for message in task.messages if message["role"] == "tool"]
    assert told == ["call00001", "own", "call00002", "call00004", None]


def test_options_of_a_samplers_own(client: httpx.Client) -> None:
    asked = dict.fromkeys((*OFF_UP_TO, "n", "guided_json"), 3) | dict.fromkeys(OFF_FROM, 0.5)
    for name, value in asked.items():
        assert refused(client, options={name: value}).startswith(f"{name} is not supported")
    harmless: Object = {**OFF_UP_TO, **OFF_FROM, **dict.fromkeys(IGNORED, 1)}
    harmless |= {"mirostat_tau": 5.0, "num_ctx": 1024}
    found = ask(client, options={**OPTIONS, **harmless}, keep_alive="5m", truncate=True, shift=False)
    assert found["message"] == ask(client, options=OPTIONS)["message"]
    assert "warnings" not in found
    told = lines(client, options={"num_predict": 1, "surprise": 1, "num_ctx": 2048}, oddity=2)
    assert told[-1]["warnings"] == [
        "unknown field 'oddity' has no effect",
        "unknown option 'options.surprise' has no effect",
        "num_ctx = 2048: the context has 1024 tokens (--max-model-len)",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_predict": 0}, "options.num_predict = 0"),
        ({"num_predict": 1 << 40}, "options.num_predict must be"),
        ({"temperature": 3}, "options.temperature must be"),
        ({"temperature": "hot"}, "options.temperature: expected"),
        ({"repeat_penalty": 0}, "options.repeat_penalty must be"),
        ({"top_k": 1.5}, "options.top_k: expected"),
        ({"stop": [1]}, "options.stop[0]: expected"),
        ([], "options: expected"),
    ],
)
def test_options_that_are_refused(client: httpx.Client, options: Any, words: str) -> None:
    for path in (CHAT, GENERATE):
        assert refused(client, path, options=options).startswith(words)


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_are_refused(client: httpx.Client, name: str) -> None:
    value: Any = [1] if name == "context" else 5 if name in ("width", "height", "steps") else "x"
    assert refused(client, GENERATE, **{name: value}).startswith(f"{name} is not supported")


def test_pictures_are_refused(client: httpx.Client) -> None:
    assert refused(client, GENERATE, images=["aGk="]).startswith("images")
    message = {"role": "user", "content": "What is it?", "images": ["aGk="]}
    assert refused(client, messages=[message]).startswith("messages[0].images")
    assert ask(client, messages=[message | {"images": []}], options={"num_predict": 1})["done"]
    assert refused(client, top_logprobs=3).startswith("top_logprobs needs logprobs")


@pytest.mark.parametrize("value", [name for name in VALUES if "long" not in name])
def test_odd_values_of_every_field(client: httpx.Client, value: str) -> None:
    for path, kind in ((CHAT, OllamaChatRequest), (GENERATE, OllamaGenerateRequest)):
        base: Object = {"messages": STORY} if path == CHAT else {"prompt": "Hello."}
        base |= {"options": {"num_predict": 1}}
        for field in msgspec.structs.fields(kind):
            body = replaced(base, field.encode_name, VALUES[value])
            reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
            statuses = (200, 400, 404) if field.name == "model" else (200, 400)
            assert reply.status_code in statuses, (field.name, value, reply.text)
            if reply.status_code != 200:
                assert reply.json().keys() == {"error"}
                assert len(reply.json()["error"]) < 1000


def test_odd_values_in_every_place(client: httpx.Client) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Ulm"}}, "id": "a"}
    turns = [
        {"role": "assistant", "content": "x", "thinking": "y", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_name": "get_weather"},
    ]
    body = {"messages": turns, "options": {"num_predict": 1, "stop": ["a"]}, "stream": False}
    assert client.post(CHAT, json=body).status_code == 200
    for changed in altered(body):
        reply = client.post(CHAT, json=changed)
        assert reply.status_code in (200, 400), (changed, reply.text)


# The model


def test_models(client: httpx.Client) -> None:
    (model,) = client.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "demo:latest"
    assert re.fullmatch("[0-9a-f]{64}", model["digest"])
    assert model["size"] == 2 * 2_885_888
    details = model["details"]
    assert (details["family"], details["parameter_size"]) == ("llama", "2.9M")
    assert details["quantization_level"] == "as stored"
    (running,) = client.get("/api/ps").json()["models"]
    assert (running["name"], running["context_length"]) == ("demo:latest", 1024)
    assert client.head("/api/tags").status_code == 200


def test_a_model_is_shown(client: httpx.Client) -> None:
    for body in ({"model": "demo:latest"}, {"name": "demo"}, {"model": "demo", "verbose": True}):
        found = client.post("/api/show", json=body).json()
        assert found["capabilities"] == ["completion", "tools"]
        family = found["model_info"]["general.architecture"]
        assert found["model_info"][f"{family}.context_length"] == 1024
        assert found["parameters"] == "temperature 0.5\ntop_p 0.95"
        assert found["modelfile"].startswith("FROM demo")
        assert "im_start" in found.pop("template")
        assert "/" not in json.dumps(found)


def test_the_version_is_one_that_clients_can_compare(client: httpx.Client) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", client.get("/api/version").json()["version"])


@pytest.mark.parametrize("name", ["pull", "push", "create", "copy", "blobs/sha256:00"])
def test_what_is_not_done_here(client: httpx.Client, name: str) -> None:
    assert "not supported" in refused(client, f"/api/{name}", status=501)
    assert client.request("DELETE", "/api/delete", json={"model": "demo"}).status_code == 501
    assert "there is no" in refused(client, "/api/nothing", status=404)


def test_the_document(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    responses = document["paths"][CHAT]["post"]["responses"]
    assert responses["200"]["content"].keys() == {"application/json", "application/x-ndjson"}
    error = responses["default"]["content"]["application/json"]["schema"]["$ref"]
    assert error.endswith("/OllamaErrorBody")
    assert {GENERATE, "/api/tags", "/api/show", "/api/ps", "/api/version"} <= document["paths"].keys()
