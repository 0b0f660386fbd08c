"""Conversion of the input items of /v1/responses to messages."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from named_events import Object
from test_responses import ask, refused

from quire.errors import RequestError
from quire.server.body import parse
from quire.server.chat_task import ChatTask
from quire.server.openai.items import IDLE_INCLUDES, ResponseRequest, task_of

USER = {"role": "user", "content": "Hi"}
TRIGGER = {"type": "compaction_trigger"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}


def task(*items: Object, **body: Any) -> ChatTask:
    asked, unknown = parse(json.dumps({"input": items, **body}).encode(), ResponseRequest)
    assert unknown == []
    return task_of(asked)[0]


def messages(*items: Object) -> list[Object]:
    return [dict(message) for message in task(*items).messages]


def thought(text: str | None, **more: Any) -> Object:
    content = None if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs", "summary": [], "content": content, **more}


def call(call_id: str) -> Object:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def test_calls_of_every_kind_have_the_names_that_the_model_sees() -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5, "user": None}
    (message,) = messages(
        {"type": "function_call", "call_id": "A", "namespace": "n", "name": "f", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "B", "name": "patch", "input": 'é "\n'},
        {"type": "custom_tool_call", "call_id": "C", "namespace": "n", "name": "run", "input": ""},
        {"type": "tool_search_call", "call_id": "D", "execution": "client", "arguments": {"q": "x"}},
        {"type": "local_shell_call", "id": "lsh", "call_id": "E", "status": "completed", "action": action},
    )
    assert (message["role"], message["content"]) == ("assistant", "")
    calls = [
        (one["id"], one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]
    ]
    assert calls == [
        ("A", "n.f", '{"x": 1}'),
        ("B", "patch", '{"input": "é \\"\\n"}'),
        ("C", "n.run", '{"input": ""}'),
        ("D", "tool_search", {"q": "x"}),
        ("E", "local_shell", {"command": ["ls"], "timeout_ms": 5}),
    ]


def test_results_of_calls() -> None:
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    found = messages(
        {"type": "function_call_output", "call_id": "A", "output": parts},
        {"type": "custom_tool_call_output", "call_id": "B", "output": "done"},
        {"type": "local_shell_call_output", "id": "C", "output": "listed"},
        {"type": "tool_search_output", "call_id": "D", "tools": []},
        {"type": "tool_search_output", "call_id": "E", "tools": [{"type": "function", "name": "f"}]},
    )
    assert {message["role"] for message in found} == {"tool"}
    assert [message["tool_call_id"] for message in found] == ["A", "B", "C", "D", "E"]
    texts = [message["content"] for message in found]
    assert texts[:3] == ["one\ntwo", "done", "listed"]
    assert "No tools" in texts[3]
    assert texts[4].endswith(": f")


def test_reasoning_is_part_of_the_message_after_it() -> None:
    said = {"role": "assistant", "content": "I look."}
    found = messages(thought("a"), said, call("A"), thought("b"), call("B"), USER, thought("c"), USER)
    first, second, *users = found
    assert (first["content"], first["reasoning_content"]) == ("I look.", "a")
    assert [one["id"] for one in first["tool_calls"]] == ["A"]
    assert (second["content"], second["reasoning_content"]) == ("", "b")
    assert [one["id"] for one in second["tool_calls"]] == ["B"]
    assert users == [USER, USER]  # what led to nothing is not shown


def test_encrypted_reasoning_is_skipped() -> None:
    encrypted = thought(None, encrypted_content="gAAAA", summary=[{"type": "summary_text", "text": "x"}])
    (message,) = messages(encrypted, call("A"), encrypted, call("B"))
    assert "reasoning_content" not in message
    assert len(message["tool_calls"]) == 2


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_text", "text": "Look:"}, IMAGE]},
        {
            "type": "function_call_output",
            "call_id": "A",
            "output": [{"type": "input_text", "text": "Look:"}, IMAGE],
        },
    ],
)
def test_a_note_replaces_an_image(item: Object) -> None:
    found = task(item, item)
    assert [message["content"] for message in found.messages] == [
        "Look:\n[image omitted: this server reads only text]"
    ] * 2
    (warning,) = found.warnings
    assert "input_image" in warning


def test_calls_run_by_another_server_are_skipped_with_a_warning() -> None:
    search = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}}
    picture = {"type": "image_generation_call", "id": "ig", "status": "completed", "result": "AAAA"}
    found = task(USER, search, picture, search)
    assert list(found.messages) == [USER]
    assert [("web_search_call" in warning) for warning in found.warnings] == [True, False]


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "context_compaction"])
def test_a_note_replaces_a_compacted_history(kind: str) -> None:
    found = task({"type": kind, "encrypted_content": "gAAAA"}, USER)
    note, user = found.messages
    assert (note["role"], user) == ("user", USER)
    assert "cannot read" in note["content"]
    assert kind in found.warnings[0]


def test_messages_between_agents() -> None:
    content = [{"type": "input_text", "text": "Done."}]
    (message,) = messages({"type": "agent_message", "author": "a1", "recipient": "a0", "content": content})
    assert message == {"role": "user", "content": "Message of a1:\nDone."}


@pytest.mark.parametrize(
    "item",
    [
        TRIGGER,
        {"type": "mcp_approval_request", "id": "x", "name": "x", "arguments": "{}", "server_label": "x"},
        {"type": "computer_call_output", "call_id": "x", "output": "x"},
        {"type": "anything_call", "call_id": "x", "name": "f"},
        {"type": "custom_tool_call", "call_id": "x", "input": "x"},
        {"type": "tool_search_call", "arguments": {}},
        {"role": "user", "content": [{"type": "output_video", "text": "x"}]},
    ],
)
def test_items_that_change_the_question_are_refused(item: Object) -> None:
    with pytest.raises(RequestError) as caught:
        task(USER, item)
    assert caught.value.param == "input[1]"


def test_a_reference_to_an_item_is_refused_with_what_to_set() -> None:
    """Vercel's AI SDK sends references to its own server's items, unless its option `store` is false."""
    with pytest.raises(RequestError, match="item_reference") as caught:
        task(USER, {"type": "item_reference", "id": "msg_1"})
    assert "store is false" in (caught.value.hint or "")


# Over real sockets


def test_options_of_agents_are_accepted(client: httpx.Client) -> None:
    options: Object = {
        "store": False,
        "prompt_cache_key": "x",
        "client_metadata": {"turn_id": "x", "x-meta": "{}"},
        "service_tier": "auto",
        "previous_response_id": None,
        "stream_options": {"include_obfuscation": False},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
    }
    assert "warnings" not in ask(client, max_output_tokens=1, **options)
    idle = {"effort": "low", "summary": "auto", "context": "all_turns"}
    warnings = ask(client, max_output_tokens=1, reasoning=idle, include=["reasoning.encrypted_content"])[
        "warnings"
    ]
    for name in ("reasoning.effort", "reasoning.summary", "reasoning.context", "reasoning.encrypted_content"):
        assert any(warning.startswith((name, f"include of {name}")) for warning in warnings)


@pytest.mark.parametrize("name", IDLE_INCLUDES)
def test_details_of_tools_that_are_left_out_are_left_out(client: httpx.Client, name: str) -> None:
    """Clients ask for the sources of a search wherever they offer one."""
    tools = [{"type": "web_search"}]
    warnings = ask(client, max_output_tokens=1, tools=tools, include=[name], max_tool_calls=3)["warnings"]
    assert f"include of {name} has no effect" in warnings
    assert "max_tool_calls has no effect" in warnings


def test_a_websocket_is_refused_with_a_status_that_agents_handle(client: httpx.Client) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    reply = client.get("/v1/responses", headers={**headers, "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="})
    assert (reply.status_code, reply.json()["error"]["code"]) == (426, "upgrade_refused")
    assert "HTTP" in reply.json()["error"]["message"]
    plain = client.get("/v1/responses")
    assert (plain.status_code, plain.headers["allow"]) == (405, "POST")
    assert ask(client, max_output_tokens=1)["object"] == "response"


def test_compaction_is_refused_with_a_hint(client: httpx.Client) -> None:
    reply = client.post("/v1/responses/compact", json={"model": "demo", "input": [USER]})
    assert reply.status_code == 404
    for message in (reply.json()["error"]["message"], refused(client, input=[USER, TRIGGER])["message"]):
        assert "summary" in message


def test_every_item_is_in_the_prompt(client: httpx.Client) -> None:
    """Each item makes the prompt longer."""
    items: list[Object] = [USER, {"role": "developer", "content": "Be brief."}, thought("hm"), call("A")]
    items += [
        {"type": "function_call_output", "call_id": "A", "output": "x"},
        {"role": "user", "content": "?"},
    ]
    counts = []
    for end in (1, 2, 4, 5, 6):
        reply = client.post("/v1/responses/input_tokens", json={"input": items[:end]})
        assert reply.status_code == 200, reply.text
        counts.append(reply.json()["input_tokens"])
    assert counts == sorted(set(counts))


def test_malformed_arguments_are_refused(client: httpx.Client) -> None:
    assert refused(client, input=[USER, {**call("A"), "arguments": '{"a'}])["param"] == "input"
