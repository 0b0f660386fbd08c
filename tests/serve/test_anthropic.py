"""/v1/messages: its events, the conversion of its turns, and Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

import anthropic
import httpx
import msgspec
import pytest
from named_events import Object, ScriptedRun, events, sent
from outside_values import VALUES, altered, replaced
from pydantic import BaseModel
from server import Server, running

from quire.errors import EngineDead, RequestError
from quire.server import event_stream as stream_module
from quire.server.answer_blocks import encode_event
from quire.server.anthropic.messages import PING, MessageWriter, failed
from quire.server.anthropic.protocol import (
    REFUSED_HERE,
    CountRequest,
    MessageReply,
    MessagesRequest,
    MessageStop,
    MessageUsage,
    ThinkingDetails,
    task_of,
)
from quire.server.body import parse
from quire.server.chat_task import ChatTask, Finish
from quire.text.answer import CallArguments, CallStart, Content, Reasoning

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
STORY: list[Any] = [{"role": "user", "content": "Tell me a story about a dragon."}]
SAMPLED = {"seed": 5, "temperature": 1.0, "top_p": 1.0}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bonn"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}
TOOLS: list[Any] = [{"name": name, "input_schema": PARAMETERS} for name in ("get_weather", "get_news")]
ONE: Object = {"type": "any", "disable_parallel_tool_use": True}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"enum": [1, 2]}},
    "required": ["age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


def ask(client: httpx.Client, path: str = PATH, **body: Any) -> Object:
    reply = client.post(path, json={"messages": STORY, "max_tokens": 200, **body})
    assert reply.status_code == 200, reply.text
    found: Object = reply.json()
    return found


def refused(client: httpx.Client, path: str = PATH, **body: Any) -> str:
    """Return the message of a request's error, which is a 400 in Anthropic's shape."""
    reply = client.post(path, json={"messages": STORY, "max_tokens": 200, **body})
    assert reply.status_code == 400, (reply.status_code, reply.text)
    answer = reply.json()
    assert answer.keys() == {"type", "error"}
    assert answer["error"].keys() == {"type", "message"}
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    message: str = answer["error"]["message"]
    return message


def joined(found: list[Object]) -> Object:
    """Assemble the message of a stream from its events; check their order."""
    start, *events, delta, stop = found
    assert [start["type"], delta["type"], stop["type"]] == ["message_start", "message_delta", "message_stop"]
    message: Object = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    while events:
        first, index = events.pop(0), len(message["content"])
        assert (first["type"], first["index"]) == ("content_block_start", index)
        block, text = first["content_block"], ""
        kind, name = DELTAS.get(block["type"], ("input_json_delta", "partial_json"))
        while (event := events.pop(0))["type"] == "content_block_delta":
            assert (event["index"], event["delta"]["type"]) == (index, kind)
            text += event["delta"][name]
        assert (event["type"], event["index"]) == ("content_block_stop", index)
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = _whole_object(text)
        else:
            assert block[name] == ""
            block[name] = text
        message["content"].append(block)
    return {**message, **delta["delta"], "usage": delta["usage"], "timings": delta["timings"]}


def _whole_object(text: str) -> Object:
    try:
        found: Object = json.loads(text)
    except ValueError:
        return {}
    return found


def comparable(message: Object) -> Object:
    """Return a message without the fields that differ each time."""
    blocks = [{**block, "id": ""} for block in message["content"]]
    return {**message, "id": "", "timings": None, "usage": None, "content": blocks}


# Events, without a server


def streamed(*batches: Any, error: Exception | None = None, max_tokens: int = 20) -> list[Object]:
    message = MessageReply(id="msg_1", model="demo", usage=MessageUsage(0, 0, 0, ThinkingDetails(0)))
    run: Any = ScriptedRun(*batches, error=error)
    return sent(MessageWriter(message, run, max_tokens).events(), failed)


ANSWER = [
    [Reasoning("Let me"), Reasoning(" see.")],
    [Content("I ask."), CallStart(0, "call_a", "f"), CallArguments(0, '{"a":')],
    [CallArguments(0, " 1}"), CallStart(1, "call_b", "g"), CallArguments(1, "{}")],
]


def test_thinking_text_and_calls_are_blocks_of_their_own() -> None:
    found = joined(streamed(*ANSWER, [Finish("tool_calls", None)]))
    assert found["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "I ask."},
        {"type": "tool_use", "id": "call_a", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_b", "name": "g", "input": {}},
    ]
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)
    assert found["usage"] == {
        "input_tokens": 6,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": 20,
        "output_tokens_details": {"thinking_tokens": 5},
    }


def test_the_input_of_a_call_is_what_the_model_wrote() -> None:
    """Also a number that no float holds: the call must not be made with nothing."""
    written = '{"a": 1e999, "b": [1.50, 18446744073709551616]}'
    message = MessageReply(id="msg_1", model="demo", usage=MessageUsage(0, 0, 0, ThinkingDetails(0)))
    calls = [CallStart(0, "call_a", "f"), CallArguments(0, written), Finish("tool_calls", None)]
    run: Any = ScriptedRun(calls)
    whole = asyncio.run(MessageWriter(message, run, 20).whole())
    assert f'"input":{written}'.encode() in whole
    assert json.loads(whole)["content"] == joined(streamed(calls))["content"]


@pytest.mark.parametrize(
    ("finish", "max_tokens", "reason", "sequence"),
    [
        (Finish("stop", None), 20, "end_turn", None),
        (Finish("stop", 7), 20, "end_turn", None),
        (Finish("stop", "END"), 20, "stop_sequence", "END"),
        (Finish("tool_calls", None), 20, "tool_use", None),
        (Finish("length", None), 20, "max_tokens", None),
        (Finish("length", None), 21, "model_context_window_exceeded", None),
    ],
)
def test_stop_reasons(finish: Finish, max_tokens: int, reason: str, sequence: str | None) -> None:
    found = joined(streamed([Content("a")], [finish], max_tokens=max_tokens))
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def test_an_empty_answer_is_an_empty_text() -> None:
    assert joined(streamed([Finish("stop", None)]))["content"] == [{"type": "text", "text": ""}]


def test_a_failure_within_a_stream_is_its_last_event() -> None:
    *_, last = streamed(*ANSWER, error=EngineDead("it died"))
    assert last == {"type": "error", "error": {"type": "api_error", "message": "it died"}}
    assert "secret" not in json.dumps(streamed(*ANSWER, error=KeyError("secret"))[-1])


def test_pings_break_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "FIRST_S", 0.01)
    monkeypatch.setattr(stream_module, "KEEP_ALIVE_S", 0.05)
    parts: list[bytes] = []

    async def slow() -> AsyncGenerator[bytes, None]:
        while parts.count(PING) < 2:
            await asyncio.sleep(0.001)
        yield encode_event(MessageStop())

    found = [event["type"] for event in sent(slow(), failed, PING, parts)]
    assert found == ["ping", "ping", "message_stop"]


# Requests, without a server


def task(**body: Any) -> ChatTask:
    given = {"messages": STORY, "max_tokens": 9, **body}
    return task_of(parse(json.dumps(given).encode(), MessagesRequest)[0])


def test_turns_become_a_conversation() -> None:
    def text(said: str) -> Object:
        return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}

    turns = [
        {"role": "user", "content": [text("a"), text("b")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                text("I ask."),
                {"type": "tool_use", "id": "A", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "B", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "A", "content": "one"},
                {"type": "tool_result", "tool_use_id": "B", "content": [text("two")], "is_error": True},
                {"type": "tool_result", "tool_use_id": "C"},
                text("And?"),
            ],
        },
        {"role": "assistant", "content": "Well"},
    ]
    found = task(messages=turns, system=[text("Be"), text("brief.")])
    system, user, assistant, one, two, none, again, last = found.messages
    assert system == {"role": "system", "content": "Be\nbrief."}
    assert user == {"role": "user", "content": "a\nb"}
    assert (assistant["role"], assistant["content"]) == ("assistant", "I ask.")
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"] == [
        {"id": "A", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "B", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    assert one == {"role": "tool", "tool_call_id": "A", "content": "one"}
    assert two == {"role": "tool", "tool_call_id": "B", "content": "Error: two"}
    assert none == {"role": "tool", "tool_call_id": "C", "content": ""}
    assert again == {"role": "user", "content": "And?"}
    assert last == {"role": "assistant", "content": "Well"}
    assert (found.continue_final_message, found.add_generation_prompt) == (True, False)


def test_options_become_those_of_a_task() -> None:
    found = task(tools=TOOLS, tool_choice=ONE, stop_sequences=["END"], top_k=5, temperature=0.5)
    assert (found.tool_choice, found.parallel_tool_calls) == ("required", False)
    assert found.sampling == {"max_tokens": 9, "stop": ["END"], "top_k": 5, "temperature": 0.5}
    assert found.tools is not None
    assert found.tools[0] == {
        "type": "function",
        "function": {"name": "get_weather", "parameters": PARAMETERS},
    }
    assert task(tool_choice={"type": "tool", "name": "f"}).tool_choice == {"name": "f"}
    assert task(tool_choice={"type": "none"}).tool_choice == "none"
    assert task(tool_choice={"type": "auto"}).tool_choice == task().tool_choice == "auto"
    assert (task().continue_final_message, task().add_generation_prompt) == (False, True)


def test_thinking_sets_a_variable_of_the_template() -> None:
    def options(thinking: Object | None) -> tuple[Any, bool]:
        found = task(thinking=thinking)
        return found.chat_template_kwargs, found.include_reasoning

    assert options(None) == ({}, True)
    assert options({"type": "enabled", "budget_tokens": 1024}) == ({"enable_thinking": True}, True)
    assert options({"type": "adaptive", "display": "omitted"}) == ({"enable_thinking": True}, False)
    assert options({"type": "disabled"}) == ({"enable_thinking": False}, False)


def turn(role: str = "user", **block: Any) -> list[Object]:
    return [{"role": role, "content": [block]}]


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("image", {"messages": turn(type="image", source={"type": "url", "url": "http://127.0.0.1:1/a"})}),
        ("document", {"messages": turn(type="document", source={})}),
        ("tool_use_id", {"messages": turn(type="tool_result", content="x")}),
        ("tool_use", {"messages": turn("assistant", type="tool_use", name="f", input={})}),
        ("tool_use", {"messages": turn("assistant", type="tool_use", id="A", input={})}),
        ("text", {"messages": turn(type="text")}),
        ("system", {"system": [{"type": "image"}]}),
        ("role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("block of type 'tool_use'", {"messages": [{"role": "system", "content": [{"type": "tool_use"}]}]}),
        ("bash_20250124", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ("compaction", {"compaction": {"type": "enabled"}}),
        ("'sometimes'", {"tool_choice": {"type": "sometimes"}}),
        ("'sometimes'", {"thinking": {"type": "sometimes"}}),
        ("output_config", {"output_config": {"format": {"type": "json_schema"}}}),
        ("output_config", {"output_config": {"format": {"type": "xml", "schema": {}}}}),
        ("output_format", {"output_format": {"type": "json_schema"}}),
        ("contradict", {"output_format": FORMAT, "output_config": {"format": FORMAT}}),
        ("n", {"n": 2}),
        ("guided_json", {"guided_json": {}}),
    ],
)
def test_unsupported_fields_are_refused_by_name(words: str, body: Object) -> None:
    with pytest.raises(RequestError) as caught:
        task(**body)
    assert words in caught.value.message


# Over real sockets


def test_a_message_has_the_shape_that_clients_read(client: httpx.Client) -> None:
    found = ask(client, model="demo", max_tokens=8, system="Be brief.", metadata={"user_id": "me"})
    assert found["id"].startswith("msg_")
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "demo")
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    assert found["usage"]["output_tokens"] == 8
    assert found["timings"]["completion_tokens"] == 8
    assert "warnings" not in found


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 40},
        {"stop_sequences": ["."]},
        {"tools": TOOLS, "tool_choice": ONE},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "get_news"}},
        {"tools": TOOLS, "tool_choice": ONE, "max_tokens": 12},
        {"output_config": {"format": FORMAT}},
        {"output_format": FORMAT},
        {"max_tokens": 100_000, "ignore_eos": True},
    ],
)
def test_stream_and_message_are_equal(client: httpx.Client, body: Object) -> None:
    whole = ask(client, **body, **SAMPLED)
    found = joined(events(client, PATH, **{"messages": STORY, "max_tokens": 200, **body, **SAMPLED}))
    assert comparable(found) == comparable(whole)
    assert found["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    if "stop_sequences" in body:
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", ".")
    if body.get("max_tokens") == 100_000:
        assert whole["stop_reason"] == "model_context_window_exceeded"


def test_the_older_name_of_the_format_is_honoured(client: httpx.Client) -> None:
    """Clients with the beta header structured-outputs-2025-11-13 send `output_format`."""
    found = ask(client, max_tokens=200, output_format=FORMAT, **SAMPLED)
    assert found == ask(client, max_tokens=200, output_config={"format": FORMAT}, **SAMPLED) | {
        name: found[name] for name in ("id", "timings", "usage")
    }
    assert json.loads(found["content"][0]["text"]).keys() >= set(SCHEMA["required"])
    assert "warnings" not in found


def test_the_answer_is_that_of_chat_completions(client: httpx.Client) -> None:
    asked = [{"role": "system", "content": "Be brief."}, *STORY]
    chat = client.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 30, **SAMPLED}).json()
    found = ask(client, system="Be brief.", max_tokens=30, **SAMPLED)
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


def test_the_answer_continues_the_last_turn(client: httpx.Client) -> None:
    greedy = {"temperature": 0, "top_k": -1}
    text = ask(client, max_tokens=30, **greedy)["content"][0]["text"]
    begun = text[: text.index(" ", 10)]
    found = ask(client, messages=[*STORY, {"role": "assistant", "content": begun}], max_tokens=5, **greedy)
    assert text.startswith(begun + found["content"][0]["text"])


@pytest.mark.parametrize(("stop", "reason"), [('"days"', "stop_sequence"), ("</tool_call>", "tool_use")])
def test_a_stop_sequence_within_a_call_is_no_call(client: httpx.Client, stop: str, reason: str) -> None:
    """An agent would make the call, without its arguments."""
    found = ask(client, tools=TOOLS, tool_choice=ONE, stop_sequences=[stop], **SAMPLED)
    assert found["stop_reason"] == reason
    assert found["stop_sequence"] == (stop if reason == "stop_sequence" else None)
    assert [(block["type"], bool(block["input"])) for block in found["content"]] == [
        ("tool_use", reason == "tool_use")
    ]


def test_calls_and_their_results(client: httpx.Client) -> None:
    found = ask(client, tools=TOOLS, tool_choice=ONE, **SAMPLED)
    assert found["stop_reason"] == "tool_use"
    (call,) = found["content"]
    assert call["input"]["days"] in (1, 2, 3)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}
    turns = [*STORY, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    again = ask(client, messages=turns, tools=TOOLS, max_tokens=5, **SAMPLED)
    assert again["timings"]["prompt_tokens"] > found["timings"]["prompt_tokens"] + 10


def test_tokens_are_counted_as_in_a_request(client: httpx.Client) -> None:
    for body in ({}, {"system": "Be brief."}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": ONE}):
        reply = client.post(COUNT, json={"messages": STORY, **body})
        assert reply.status_code == 200, reply.text
        read = ask(client, max_tokens=1, **body)["timings"]["prompt_tokens"]
        assert reply.json() == {"input_tokens": read}


def test_fields_without_effect_are_in_the_warnings(client: httpx.Client) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    found = ask(client, max_tokens=1, frobnicate=1, thinking=thinking, output_config={"effort": "low"})
    warnings = " ".join(found["warnings"])
    for name in ("frobnicate", "thinking.budget_tokens", "output_config.effort"):
        assert name in warnings
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    body = {"messages": STORY, "max_tokens": 1, "service_tier": "auto", "container": None}
    reply = client.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert "warnings" not in reply.json()


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("max_tokens is missing", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": 0}),
        ("messages", {"messages": []}),
        ("messages", {"messages": None}),
        ("prompt is too long", {"messages": [{"role": "user", "content": "dragon " * 3000}]}),
        ("temperature", {"temperature": 1.5}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("tools[0].name", {"tools": [{"name": "a b", "input_schema": PARAMETERS}]}),
        ("tools[0].input_schema", {"tools": [{"name": "f", "input_schema": {"type": "array"}}]}),
        ("tools[0].input_schema", {"tools": [{"name": "f", "input_schema": {"allOf": 1}, "strict": True}]}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        (
            "output_config.format",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        ),
        ("output_format", {"output_format": {"type": "json_schema", "schema": {"type": "x"}}}),
        ("the last message", {"messages": [*STORY, *turn("assistant", type="tool_use", id="A", name="f")]}),
        ("'image'", {"messages": turn(type="image", source={"type": "base64", "data": "x"})}),
    ],
)
def test_errors_name_the_fields_of_the_request(client: httpx.Client, words: str, body: Object) -> None:
    for stream in (False, True):
        body = {name: value for name, value in body.items() if name != "max_tokens" or value is not None}
        if words == "max_tokens is missing":
            reply = client.post(PATH, json={"messages": STORY, "stream": stream})
            assert reply.status_code == 400
            assert words in reply.json()["error"]["message"]
            continue
        message = refused(client, **body, stream=stream)
        assert words in message
        assert not any(name in message for name in ("structured_outputs", ".function.", "continue_final"))


@pytest.mark.parametrize("field", sorted(REFUSED_HERE))
def test_refused_fields_are_refused_with_any_value(client: httpx.Client, field: str) -> None:
    for path in (PATH, COUNT):
        for value in ("x", 3, {"a": 1}, ["a"], True):
            assert field in refused(client, path, **{field: value})


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_every_field_with_values_from_outside(client: httpx.Client, path: str, value: str) -> None:
    base: Object = {"messages": STORY, "max_tokens": 1}
    for field in msgspec.structs.fields(MessagesRequest if path == PATH else CountRequest):
        body = replaced(base, field.encode_name, VALUES[value])
        reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
        statuses = (200, 400, 404) if field.name == "model" else (200, 400)
        assert reply.status_code in statuses, (field.name, value, reply.text)
        if reply.status_code == 400:
            error = reply.json()["error"]
            assert (reply.json()["type"], error.keys() - {"details"}) == ("error", {"type", "message"})
            assert len(reply.json()["error"]["message"]) < 1000


def test_odd_values_in_every_place(client: httpx.Client) -> None:
    said = [{"type": "text", "text": "Hi"}]
    call = {"type": "tool_use", "id": "a", "name": "get_news", "input": {}}
    turns = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": said}]},
    ]
    choice = {"type": "tool", "name": "get_news", "disable_parallel_tool_use": True}
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    options = {"system": said, "thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": form}
    body = {"messages": turns, "max_tokens": 1, "tools": TOOLS[1:], "tool_choice": choice, **options}
    assert client.post(PATH, json=body).status_code == 200
    for changed in altered(body):
        for path in (PATH, COUNT):
            reply = client.post(path, json=changed)
            assert reply.status_code in (200, 400), (path, changed, reply.text)
            if reply.status_code == 400:
                error = reply.json()["error"]
                assert (reply.json()["type"], error.keys() - {"details"}) == ("error", {"type", "message"})


def test_the_document_describes_the_body(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert set(schemas["MessagesRequest"]["required"]) == {"messages", "max_tokens"}
    listed = document["paths"][PATH]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    names = {one["$ref"].rpartition("/")[2] for one in listed["anyOf"]}
    types = [schemas[name]["properties"]["type"]["enum"][0] for name in names - {"AnthropicErrorBody"}]
    assert {event["type"] for event in streamed(*ANSWER, [Finish("stop", None)])} | {"ping"} == set(types)
    for path in (PATH, COUNT):
        error = document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]
        assert error["schema"]["$ref"].endswith("/AnthropicErrorBody")


# Anthropic's own client


@pytest.fixture
def sdk(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        yield sdk


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[1, 2]


def test_sdk_lists_models(sdk: anthropic.Anthropic) -> None:
    (card,) = sdk.models.list()
    assert (card.id, card.type, card.display_name, card.max_input_tokens) == ("demo", "model", "demo", 1024)
    assert sdk.models.retrieve("demo").created_at == card.created_at
    assert card.created_at.year >= 2026


def test_sdk_sends_system_messages_between_turns(sdk: anthropic.Anthropic) -> None:
    turns: Any = [*STORY, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    assert sdk.messages.create(model="demo", max_tokens=5, messages=turns).usage.output_tokens > 0
    before = sdk.messages.count_tokens(model="demo", messages=STORY)
    assert sdk.messages.count_tokens(model="demo", messages=turns).input_tokens > before.input_tokens


def test_sdk_creates_a_message(sdk: anthropic.Anthropic) -> None:
    found = sdk.messages.create(model="demo", max_tokens=20, messages=STORY, system="Be brief.")
    assert found.stop_reason == "max_tokens"
    assert found.content[0].type == "text"
    assert found.usage.output_tokens == 20


def test_sdk_follows_a_stream(sdk: anthropic.Anthropic) -> None:
    body: Object = {"model": "demo", "max_tokens": 60, "messages": STORY}
    body["extra_body"] = {"temperature": 0}
    whole = sdk.messages.create(**body)
    with sdk.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].type == whole.content[0].type == "text"
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    kinds = [event.type for event in sdk.messages.create(**body, stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_sdk_runs_tools(sdk: anthropic.Anthropic) -> None:
    asked: Object = {"model": "demo", "max_tokens": 300, "tools": TOOLS}
    found = sdk.messages.create(messages=STORY, tool_choice=ONE, **asked)
    call = found.content[-1]
    assert call.type == "tool_use"
    assert call.input["city"] in ("Ulm", "Bonn")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*STORY, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    again = sdk.messages.create(messages=turns, tool_choice={"type": "none"}, **asked)
    assert again.content[0].type == "text"
    with sdk.messages.stream(messages=STORY, tool_choice=ONE, **asked) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "tool_use"
    assert final.content[0].input["days"] in (1, 2, 3)


def test_sdk_parses_an_answer_with_a_schema(sdk: anthropic.Anthropic) -> None:
    found = sdk.messages.parse(model="demo", max_tokens=200, messages=STORY, output_format=Person)
    assert isinstance(found.parsed_output, Person)


def test_sdk_counts_tokens(sdk: anthropic.Anthropic) -> None:
    found = sdk.messages.count_tokens(model="demo", messages=STORY, tools=TOOLS)
    assert found.input_tokens > 50


def test_sdk_raises_errors(sdk: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        sdk.messages.create(model="demo", max_tokens=1, messages=STORY, extra_body={"temperature": 1.5})
    with pytest.raises(anthropic.NotFoundError) as caught:
        sdk.messages.create(model="another", max_tokens=1, messages=STORY)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_sdk_sends_its_key() -> None:
    body: Object = {"model": "demo", "max_tokens": 1, "messages": STORY}
    with running(QUIRE_API_KEY="secret") as server:
        with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as sdk:
            assert sdk.messages.create(**body).content
        with (
            anthropic.Anthropic(base_url=server.url, api_key="other", max_retries=0) as sdk,
            pytest.raises(anthropic.AuthenticationError),
        ):
            sdk.messages.create(**body)
