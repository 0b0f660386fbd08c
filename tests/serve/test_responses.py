"""/v1/responses: its events, the conversion of its items, and OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import msgspec
import openai
import pytest
from named_events import Object, ScriptedRun, events, sent
from outside_values import VALUES, altered, replaced
from pydantic import BaseModel
from server import Server

from quire.errors import EngineDead, RequestError
from quire.outputs import CompletionOutput
from quire.server.body import parse
from quire.server.chat_task import Finish
from quire.server.logprob_json import LogprobCursor
from quire.server.openai.items import (
    REFUSED_HERE,
    ReasoningOptions,
    ResponseObject,
    ResponseRequest,
    TextOptions,
    task_of,
)
from quire.server.openai.response_tools import Toolbox
from quire.server.openai.responses import ResponseWriter
from quire.text.answer import CallArguments, CallStart, Content, Reasoning

PATH = "/v1/responses"
UNASKED = LogprobCursor(CompletionOutput(0), None)  # log-probabilities
STORY = "Tell me a story about a dragon."
SAMPLED = {"seed": 5, "temperature": 1.0, "top_p": 1.0}
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": name,
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Ulm", "Bonn"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    }
    for name in ("get_weather", "get_news")
]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"enum": [1, 2]}},
    "required": ["age"],
    "additionalProperties": False,
}
STREAMED = {"output_text": "text", "reasoning_text": "text", "function_call_arguments": "arguments"}


def ask(client: httpx.Client, **body: Any) -> Object:
    reply = client.post(PATH, json={"input": STORY, **body})
    assert reply.status_code == 200, reply.text
    found: Object = reply.json()
    return found


def refused(client: httpx.Client, **body: Any) -> Object:
    reply = client.post(PATH, json={"input": STORY, **body})
    assert reply.status_code == 400, (reply.status_code, reply.text)
    error: Object = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def joined(found: list[Object]) -> Object:
    """Assemble the response of a stream from its events; check their order and that they agree."""
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    first, second, *events, last = found
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    assert first["response"] == second["response"]
    assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
    items: list[Object] = []
    while events:
        items.append(_joined_item(events, len(items)))
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    return {**last["response"], "output": items}


def _joined_item(events: list[Object], index: int) -> Object:
    """Remove the events of one item from the list and return the item."""

    def next_event(kind: str) -> Object:
        event = events.pop(0)
        assert event["type"] == f"response.{kind}"
        assert event["output_index"] == index
        assert event.get("item_id", item["id"]) == item["id"]
        assert event.get("content_index", 0) == 0
        return event

    item = events[0]["item"]
    next_event("output_item.added")
    assert item["status"] == "in_progress"
    call = item["type"] == "function_call"
    if not call:
        assert item["content"] == []
        part = next_event("content_part.added")["part"]
    name = "function_call_arguments" if call else part["type"]
    text = ""
    while events[0]["type"].endswith(".delta"):
        text += next_event(f"{name}.delta")["delta"]
    assert next_event(f"{name}.done")[STREAMED[name]] == text
    if call:
        assert item["arguments"] == ""
        item["arguments"] = text
    else:
        item["content"] = [{**part, "text": text}]
        assert next_event("content_part.done")["part"] == item["content"][0]
    whole = next_event("output_item.done")["item"]
    assert whole == {**item, "status": whole["status"]}
    return dict(whole)


def comparable(response: Object) -> Object:
    """Return a response without the fields that differ each time."""
    own = {**response, "id": "", "created_at": 0, "completed_at": 0, "timings": None, "usage": None}
    own["output"] = [
        {**item, "id": "", **({"call_id": ""} if "call_id" in item else {})} for item in response["output"]
    ]
    return own


# Events, without a server


def response() -> ResponseObject:
    return ResponseObject(
        id="resp_1",
        created_at=1,
        model="demo",
        system_fingerprint="f",
        instructions=None,
        max_output_tokens=None,
        metadata={},
        parallel_tool_calls=True,
        reasoning=ReasoningOptions(),
        temperature=1.0,
        text=TextOptions(),
        tool_choice="auto",
        tools=[],
        top_p=1.0,
        user=None,
    )


def streamed(*batches: Any, error: Exception | None = None) -> list[Object]:
    stream = ResponseWriter(response(), ScriptedRun(*batches, error=error), Toolbox(), UNASKED)  # type: ignore[arg-type]
    return sent(stream.events(), stream.failed)


ANSWER = [
    [Reasoning("Let me"), Reasoning(" see.")],
    [Content("I ask."), CallStart(0, "call_a", "f"), CallArguments(0, '{"a":')],
    [CallArguments(0, " 1}"), CallStart(1, "call_b", "g"), CallArguments(1, "{}")],
]


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    found = joined(streamed(*ANSWER, [Finish("tool_calls", None)]))
    assert found["status"] == "completed"
    reasoning, said, one, other = found["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert reasoning["summary"] == []
    assert said["content"][0]["text"] == "I ask."
    assert (said["type"], said["role"]) == ("message", "assistant")
    assert (one["call_id"], one["name"], one["arguments"]) == ("call_a", "f", '{"a": 1}')
    assert (other["call_id"], other["name"], other["arguments"]) == ("call_b", "g", "{}")
    assert {item["status"] for item in found["output"]} == {"completed"}
    assert [item["id"].split("_")[0] for item in found["output"]] == ["rs", "msg", "fc", "fc"]
    assert len({item["id"] for item in found["output"]}) == 4
    assert found["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 5},
        "total_tokens": 30,
    }


def test_the_item_that_is_cut_is_incomplete() -> None:
    found = joined(streamed(*ANSWER, [Finish("length", None)]))
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in found["output"]] == ["completed"] * 3 + ["incomplete"]
    assert found["completed_at"] is None


def test_an_empty_answer_is_an_empty_message() -> None:
    (item,) = joined(streamed([Finish("stop", None)]))["output"]
    assert (item["type"], item["content"][0]["text"], item["status"]) == ("message", "", "completed")


def test_long_texts_are_cut_into_deltas() -> None:
    found = streamed([Content("x" * 10_000)], [Finish("stop", None)])
    deltas = [event["delta"] for event in found if event["type"].endswith(".delta")]
    assert len(deltas) == 3
    assert joined(found)["output"][0]["content"][0]["text"] == "x" * 10_000


def test_a_failure_within_a_stream_is_its_last_event() -> None:
    first, *_, last = streamed(*ANSWER, error=EngineDead("it died"))
    assert first["type"] == "response.created"
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "it died"}
    assert len(last["response"]["output"]) == 4
    secret = streamed(*ANSWER, error=KeyError("secret"))[-1]
    assert "secret" not in json.dumps(secret)


def test_a_late_failure_before_all_events_opens_the_stream() -> None:
    stream = ResponseWriter(response(), ScriptedRun(), Toolbox(), UNASKED)  # type: ignore[arg-type]
    text = stream.failed(EngineDead("it died")).decode()
    names = [line.removeprefix("event: ") for line in text.split("\n") if line.startswith("event")]
    assert names == ["response.created", "response.in_progress", "response.failed"]


# Requests, without a server


def messages(**body: Any) -> list[Object]:
    asked, _ = parse(json.dumps({"input": "Hi", **body}).encode(), ResponseRequest)
    return [dict(message) for message in task_of(asked)[0].messages]


def test_text_is_a_message_of_the_user() -> None:
    assert messages() == [{"role": "user", "content": "Hi"}]
    assert messages(instructions="Be brief.")[0] == {"role": "system", "content": "Be brief."}


def test_items_become_a_conversation() -> None:
    items = [
        {"role": "developer", "content": "No jokes."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I ask.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "A", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "B", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "A", "output": "one"},
        {"type": "function_call_output", "call_id": "B", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    system, user, assistant, one, two, last = messages(input=items, instructions="Be brief.")
    assert system == {"role": "system", "content": "Be brief.\n\nNo jokes."}
    assert user == {"role": "user", "content": "a\nb"}
    assert (assistant["role"], assistant["content"]) == ("assistant", "I ask.")
    assert assistant["tool_calls"] == [
        {"id": "A", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "B", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert one == {"role": "tool", "tool_call_id": "A", "content": "one"}
    assert two == {"role": "tool", "tool_call_id": "B", "content": "two"}
    assert last == {"role": "assistant", "content": "No."}


def test_calls_without_text_before_them() -> None:
    call = {"type": "function_call", "call_id": "A", "name": "f", "arguments": "{}"}
    _, assistant = messages(input=[{"role": "user", "content": "Hi"}, call])
    assert (assistant["role"], assistant["content"], len(assistant["tool_calls"])) == ("assistant", "", 1)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input[0]", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input[0]", {"input": [{"type": "compaction_trigger"}]}),
        ("input[0]", {"input": [{"type": "mcp_call", "id": "x"}]}),
        ("input[0]", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
        ("input[0]", {"input": [{"role": "critic", "content": "x"}]}),
        ("input[0]", {"input": [{"role": "user"}]}),
        ("input[0]", {"input": [{"type": "function_call", "name": "f"}]}),
        ("input[0]", {"input": [{"type": "function_call", "call_id": "f"}]}),
        ("input[0]", {"input": [{"type": "function_call_output", "output": "f"}]}),
        ("input[0]", {"input": [{"type": "function_call_output", "call_id": "f"}]}),
        ("include", {"include": ["program.output"]}),
        ("include", {"include": ["message.output_text.logprobs", "surprise"]}),
        ("text.format", {"text": {"format": {"type": "xml"}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("tools[0]", {"tools": [{"type": "apply_patch"}]}),
        ("tools[1]", {"tools": [TOOLS[0], {"type": "custom"}]}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "web_search"}}),
        ("truncation", {"truncation": "auto"}),
        ("n", {"n": 2}),
        ("guided_json", {"guided_json": {}}),
    ],
)
def test_unsupported_fields_are_refused_by_name(param: str, body: Object) -> None:
    with pytest.raises(RequestError) as caught:
        messages(**body)
    assert caught.value.param == param
    assert param.split("[")[0] in caught.value.message


# Over real sockets


def test_a_response_has_the_shape_that_clients_read(client: httpx.Client) -> None:
    found = ask(client, model="demo", max_output_tokens=8, metadata={"a": "b"}, instructions="Be brief.")
    assert found["id"].startswith("resp_")
    assert (found["object"], found["model"], found["status"]) == ("response", "demo", "incomplete")
    assert (found["metadata"], found["instructions"]) == ({"a": "b"}, "Be brief.")
    assert (found["store"], found["background"], found["previous_response_id"]) == (False, False, None)
    assert (found["temperature"], found["top_p"]) == (0.5, 0.95)  # the model's own
    assert (found["tool_choice"], found["tools"], found["error"]) == ("auto", [], None)
    assert found["text"]["format"] == {"type": "text"}
    assert found["usage"]["output_tokens"] == 8
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + 8
    assert found["timings"]["completion_tokens"] == 8
    assert "warnings" not in found


@pytest.mark.parametrize(
    "body",
    [
        {"max_output_tokens": 40},
        {"stop": ["."]},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "get_news"}, "max_output_tokens": 200},
        {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 12},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ],
)
def test_stream_and_response_are_equal(client: httpx.Client, body: Object) -> None:
    whole = ask(client, **body, **SAMPLED)
    found = joined(events(client, PATH, input=STORY, **body, **SAMPLED))
    assert comparable(found) == comparable(whole)
    assert found["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert "timings" in found


def test_the_answer_is_that_of_chat_completions(client: httpx.Client) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}]
    chat = client.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 30, **SAMPLED}).json()
    found = ask(client, instructions="Be brief.", max_output_tokens=30, **SAMPLED)
    assert found["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_calls_and_their_results(client: httpx.Client) -> None:
    found = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **SAMPLED)
    (call,) = found["output"]
    assert call["type"] == "function_call"
    assert json.loads(call["arguments"])["days"] in (1, 2, 3)
    assert found["tools"] == TOOLS
    turns = [{"role": "user", "content": STORY}, call]
    turns.append({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"})
    again = ask(client, input=turns, tools=TOOLS, max_output_tokens=5, **SAMPLED)
    assert again["usage"]["input_tokens"] > found["usage"]["input_tokens"] + 10


def test_structures(client: httpx.Client) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    found = ask(client, text={"format": form}, **SAMPLED)
    assert json.loads(found["output"][0]["content"][0]["text"])["age"] in (1, 2)
    assert found["text"]["format"] == form
    anything = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=20, **SAMPLED)
    assert anything["output"][0]["content"][0]["text"].startswith("{")


def test_fields_without_effect_are_in_the_warnings(client: httpx.Client) -> None:
    options = {"store": True, "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"]}
    found = ask(client, max_output_tokens=1, frobnicate=1, text={"verbosity": "low"}, **options)
    warnings = " ".join(found["warnings"])
    for name in ("frobnicate", "store", "reasoning.effort", "encrypted_content", "text.verbosity"):
        assert name in warnings
    assert len(found["warnings"]) == 5
    harmless = {"store": False, "background": False, "truncation": "disabled", "previous_response_id": None}
    harmless |= {"service_tier": "auto", "user": "me", "prompt_cache_key": "x", "safety_identifier": "x"}
    assert "warnings" not in ask(client, max_output_tokens=1, **harmless)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {"input": []}),
        ("input", {"input": None}),
        ("input", {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]}),
        ("input", {"input": "dragon " * 3000}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("temperature", {"temperature": 2.5}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}}),
        ("tools[0].name", {"tools": [{"type": "function", "name": "a b"}]}),
        (
            "tools[0].parameters",
            {"tools": [{"type": "function", "name": "f", "parameters": {"allOf": 1}, "strict": True}]},
        ),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}),
        ("metadata", {"metadata": {str(i): "x" for i in range(17)}}),
        ("metadata", {"metadata": {"a": 1}}),
    ],
)
def test_errors_name_the_fields_of_the_request(client: httpx.Client, param: str, body: Object) -> None:
    for stream in (False, True):
        error = refused(client, **body, stream=stream)
        assert error["param"] == param
        assert "structured_outputs" not in error["message"]
        assert ".function." not in error["message"]


@pytest.mark.parametrize("field", sorted(REFUSED_HERE))
def test_refused_fields_are_refused_with_any_value(client: httpx.Client, field: str) -> None:
    for value in ("x", 3, {"a": 1}, ["a"], True):
        assert refused(client, **{field: value})["param"] == field


@pytest.mark.parametrize("value", VALUES)
def test_every_field_with_values_from_outside(client: httpx.Client, value: str) -> None:
    base: Object = {"input": "Hi", "max_output_tokens": 1}
    for field in msgspec.structs.fields(ResponseRequest):
        body = replaced(base, field.encode_name, VALUES[value])
        reply = client.post(PATH, content=body, headers={"Content-Type": "application/json"})
        statuses = (200, 400, 404) if field.name == "model" else (200, 400)
        assert reply.status_code in statuses, (field.name, value, reply.text)
        if reply.status_code == 400:
            assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
            assert len(reply.json()["error"]["message"]) < 1000


def test_odd_values_in_every_place(client: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "get_news", "arguments": "{}"}
    turns = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        call,
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]},
    ]
    options = {"tool_choice": {"type": "function", "name": "get_news"}, "reasoning": {"effort": "low"}}
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"}
    body = {"input": turns, "tools": TOOLS[1:], "text": form, "max_output_tokens": 1, **options}
    assert client.post(PATH, json=body).status_code == 200
    for changed in altered(body):
        reply = client.post(PATH, json=changed)
        assert reply.status_code in (200, 400), (changed, reply.text)
        if reply.status_code == 400:
            assert reply.json()["error"].keys() == {"message", "type", "param", "code"}


def test_the_document_describes_the_body(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["components"]["schemas"]["ResponseRequest"]["required"] == ["input"]
    listed = document["paths"][PATH]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    names = {one["$ref"].rpartition("/")[2] for one in listed["anyOf"]}
    types = [document["components"]["schemas"][name]["properties"]["type"] for name in names - {"ErrorBody"}]
    assert {event["type"] for event in streamed(*ANSWER, [Finish("stop", None)])} <= {
        type_["enum"][0] for type_ in types
    }


# OpenAI's own client


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


LOGPROBS: Any = "message.output_text.logprobs"


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[1, 2]


def test_sdk_creates_a_response(sdk: openai.OpenAI) -> None:
    found = sdk.responses.create(model="demo", input=STORY, instructions="Be brief.", max_output_tokens=20)
    assert found.status == "incomplete"
    assert found.output_text
    assert found.usage is not None
    assert found.usage.output_tokens == 20


def test_sdk_follows_a_stream(sdk: openai.OpenAI) -> None:
    body: Object = {"model": "demo", "input": STORY, "temperature": 0, "extra_body": {"stop": ["."]}}
    whole = sdk.responses.create(**body)
    with sdk.responses.stream(**body) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    kinds = [event.type for event in sdk.responses.create(**body, stream=True)]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_sdk_reads_logprobs(sdk: openai.OpenAI) -> None:
    """They equal a chat completion's, and come with the text of their tokens."""
    body: Object = {"model": "demo", "temperature": 0, "extra_body": {"stop_token_ids": [5]}}
    messages: Any = [{"role": "user", "content": STORY}]
    chat = sdk.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=2, max_completion_tokens=30, **body
    )
    assert chat.choices[0].logprobs is not None
    expected = [entry.to_dict() for entry in chat.choices[0].logprobs.content or ()]
    body |= {"input": STORY, "max_output_tokens": 30, "top_logprobs": 2, "include": [LOGPROBS]}
    found: Any = sdk.responses.create(**body)
    assert [entry.to_dict() for entry in found.output[0].content[0].logprobs] == expected
    assert found.top_logprobs == 2
    events: Any = list(sdk.responses.create(**body, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.to_dict() for event in deltas for entry in event.logprobs] == expected
    for event in deltas:
        assert "".join(entry.token for entry in event.logprobs).strip() == event.delta.strip()
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.to_dict() for entry in done.logprobs] == expected
    assert [entry.to_dict() for entry in events[-1].response.output[0].content[0].logprobs] == expected


def test_sdk_reads_the_logprobs_of_chosen_tokens_alone(sdk: openai.OpenAI) -> None:
    found: Any = sdk.responses.create(model="demo", input=STORY, max_output_tokens=4, include=[LOGPROBS])
    assert [len(entry.top_logprobs) for entry in found.output[0].content[0].logprobs] == [0] * 4


def test_sdk_counts_tokens(sdk: openai.OpenAI) -> None:
    asked: Object = {"model": "demo", "input": STORY, "instructions": "Be brief."}
    counted = sdk.responses.input_tokens.count(**asked)
    found = sdk.responses.create(**asked, max_output_tokens=1)
    assert found.usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", found.usage.input_tokens)
    with pytest.raises(openai.BadRequestError, match=r"input\[0\] has no content"):
        sdk.responses.input_tokens.count(model="demo", input=[{"role": "user"}])  # type: ignore[list-item]


def test_sdk_gets_an_error_for_stored_responses(sdk: openai.OpenAI) -> None:
    for call in (
        sdk.responses.retrieve,
        sdk.responses.cancel,
        sdk.responses.delete,
        sdk.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError, match="stateless"):
            call("resp_1")
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        sdk.responses.create(model="demo", input=STORY, previous_response_id="resp_1")


def test_sdk_parses_an_answer_with_a_schema(sdk: openai.OpenAI) -> None:
    found = sdk.responses.parse(model="demo", input="Who?", text_format=Person)
    assert isinstance(found.output_parsed, Person)
    with sdk.responses.stream(model="demo", input="Who?", text_format=Person) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)


def test_sdk_runs_tools(sdk: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    asked: Object = {"model": "demo", "tools": TOOLS, "parallel_tool_calls": False}
    found = sdk.responses.create(input=turns, tool_choice="required", **asked)
    turns += found.output
    (call,) = [item for item in found.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Ulm", "Bonn")
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    again = sdk.responses.create(input=turns, tool_choice="none", max_output_tokens=10, **asked)
    assert again.output_text
    with sdk.responses.stream(input=turns[:1], tool_choice="required", **asked) as stream:
        final = stream.get_final_response()
    assert final.output[0].type == "function_call"


def test_sdk_raises_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.responses.create(model="demo", input=STORY, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        sdk.responses.create(model="another", input=STORY)
    with pytest.raises(openai.BadRequestError), sdk.responses.stream(model="demo", input=[]) as stream:
        stream.until_done()
