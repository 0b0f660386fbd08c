"""/v1/messages: conversion of the blocks and tools that agents send, and the warnings about it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from named_events import Object

from quire.errors import RequestError
from quire.server.anthropic.protocol import MessagesRequest, task_of
from quire.server.body import parse
from quire.server.chat_task import ChatTask

SCHEMA: Object = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
IMAGE: Object = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF: Object = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="},
}
SEARCH: Object = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
HEADER = "x-anthropic-billing-header: cc_version=2.1.197.f42; cc_entrypoint=cli; cch=0aaa9;"


def task(**body: Any) -> ChatTask:
    given = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, **body}
    return task_of(parse(json.dumps(given).encode(), MessagesRequest)[0])


def text(said: str) -> Object:
    return {"type": "text", "text": said}


def tool(name: str, **more: Any) -> Object:
    return {"name": name, "input_schema": SCHEMA, **more}


def result(*content: Object, **more: Any) -> Object:
    return {"type": "tool_result", "tool_use_id": "A", "content": list(content), **more}


def user(*blocks: Object) -> list[Object]:
    return [{"role": "user", "content": list(blocks)}]


def names(found: ChatTask) -> list[str]:
    return [one["function"]["name"] for one in found.tools or ()]


# What tools return


def test_a_note_replaces_unreadable_parts_of_a_result() -> None:
    found = task(messages=user(result(text("a"), IMAGE, IMAGE), PDF, text("b")))
    returned, said = found.messages
    note = "[image omitted: this server reads only text]"
    assert returned == {"role": "tool", "tool_call_id": "A", "content": f"a\n{note}\n{note}"}
    assert said == {"role": "user", "content": "[document omitted: this server reads only text]\nb"}
    images, documents = found.warnings
    assert "'image' (2)" in images
    assert "'document' (1)" in documents


@pytest.mark.parametrize("block", [IMAGE, PDF, {"type": "text"}])
def test_unreadable_blocks_of_a_user_are_refused(block: Object) -> None:
    with pytest.raises(RequestError) as caught:
        task(messages=user(text("What is this?"), block))
    assert f"messages[0]: a block of type '{block['type']}'" in caught.value.message


def test_notes_replace_calls_run_by_anthropics_servers() -> None:
    used = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "fox"}}
    came = {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "error"}}
    turns = [
        *user(text("Hi")),
        {"role": "assistant", "content": [used, came, text("Well")]},
        *user(text("?")),
    ]
    found = task(messages=turns)
    assert found.messages[1]["content"].count("omitted") == 2
    assert found.messages[1]["content"].endswith("\nWell")
    assert len(found.warnings) == 2


def test_documents_of_text_are_read() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "one"}
    found = task(
        messages=user(
            {"type": "document", "source": plain, "title": "A", "cache_control": {"type": "ephemeral"}},
            {"type": "document", "source": {"type": "content", "content": "two"}},
            {"type": "search_result", "source": "https://a.b/", "title": "B", "content": [text("three")]},
        )
    )
    assert found.messages == [{"role": "user", "content": "A\none\ntwo\nB\nhttps://a.b/\nthree"}]
    assert found.warnings == []


def test_citations_are_not_made() -> None:
    hit = {
        "type": "search_result",
        "source": "a",
        "title": "b",
        "content": [],
        "citations": {"enabled": True},
    }
    assert task(messages=user(result(hit))).warnings == ["citations has no effect"]
    assert task(messages=user(result(hit | {"citations": {"enabled": False}}))).warnings == []


def test_the_result_of_a_failed_tool_says_so() -> None:
    found = task(messages=user(result(text("no such file"), is_error=True)))
    assert found.messages[0]["content"] == "Error: no such file"
    found = task(messages=user(result(text("done"), is_error=False)))
    assert found.messages[0]["content"] == "done"


def test_reasoning_reaches_the_template() -> None:
    thinking = {"type": "thinking", "thinking": "Let me see.", "signature": ""}
    redacted = {"type": "redacted_thinking", "data": "x"}
    turns = [*user(text("Hi")), {"role": "assistant", "content": [thinking, redacted, text("Hello")]}]
    *_, last = task(messages=[*turns, *user(text("?"))]).messages[:2]
    assert last == {"role": "assistant", "content": "Hello", "reasoning_content": "Let me see."}


# Tools


def test_fields_of_tools_that_agents_send() -> None:
    extra = {"type": "custom", "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}
    found = task(tools=[tool("f", description="Does it.", input_examples=[{"a": 1}, {"a": 2}], **extra)])
    assert found.tools is not None
    assert found.tools[0]["function"] == {
        "name": "f",
        "description": 'Does it.\nExamples of its input:\n{"a": 1}\n{"a": 2}',
        "parameters": SCHEMA,
    }
    assert found.warnings == []


def test_tools_of_anthropics_servers_are_left_out() -> None:
    mcp = {"type": "mcp_toolset", "mcp_server_name": "x"}
    code = tool("g", allowed_callers=["code_execution_20260120"])
    found = task(tools=[SEARCH, tool("f"), mcp, code], tool_choice={"type": "any"})
    assert names(found) == ["f"]
    assert found.tool_choice == "required"
    for word, warning in zip(("web_search_20250305", "mcp_toolset", "'g'"), found.warnings, strict=True):
        assert word in warning
    assert task(tools=[SEARCH]).tools is None
    assert names(task(tools=[tool("g", allowed_callers=["direct", "code_execution_20260120"])])) == ["g"]


def test_warnings_are_bounded() -> None:
    found = task(tools=[SEARCH] * 100, messages=user(result(*({"type": f"x{n}"} for n in range(100)))))
    assert found.warnings[16] == "84 more tools are left out"
    assert len(found.warnings) == 33


def test_a_choice_of_a_tool_that_is_left_out_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        task(tools=[SEARCH], tool_choice={"type": "tool", "name": "web_search"})
    assert "'web_search', which only Anthropic's servers run" in caught.value.message
    assert caught.value.param == "tool_choice"


def test_deferred_tools_are_offered_once_they_are_loaded() -> None:
    tools = [tool("f"), tool("g", defer_loading=True), tool("h", defer_loading=True)]
    assert names(task(tools=tools)) == ["f"]
    loaded = {"type": "tool_reference", "tool_name": "h"}
    found = task(tools=tools, messages=user(result(loaded), text("Tool loaded.")))
    assert names(found) == ["f", "h"]
    assert found.messages[0]["content"] == "The tool h can be called now."
    assert found.warnings == []
    finder = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    found = task(tools=[finder, *tools])  # nobody searches here: so all are loaded
    assert names(found) == ["f", "g", "h"]
    assert len(found.warnings) == 1


# The system


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ([text(HEADER), text("Be brief.")], "Be brief."),
        ([text(f"{HEADER}\nBe brief."), text("Be kind.")], "Be brief.\nBe kind."),
        (f"{HEADER}\nBe brief.", "Be brief."),
        ([text("Be brief."), text(f"Write {HEADER}")], f"Be brief.\nWrite {HEADER}"),
        ([text(HEADER)], None),
        (HEADER, None),
        ([], None),
    ],
)
def test_the_billing_header_is_removed(system: Any, expected: str | None) -> None:
    found = [message["content"] for message in task(system=system).messages if message["role"] == "system"]
    assert found == ([] if expected is None else [expected])


def test_prompts_with_different_billing_headers_share_the_cache(client: httpx.Client) -> None:
    def computed(header: str) -> int:
        """Return the number of prompt tokens that were not found in the cache."""
        system = [text(header), text("You are an agent that sorts words about foxes and lanterns. " * 4)]
        body = {"messages": [{"role": "user", "content": "Begin."}], "max_tokens": 1, "system": system}
        usage = client.post("/v1/messages", json=body).json()["usage"]
        assert usage["cache_read_input_tokens"] + usage["input_tokens"] > 60
        number: int = usage["input_tokens"]
        return number

    computed(HEADER)
    assert computed(HEADER.replace("0aaa9", "36ee5")) <= 16  # what does not fill a block
    assert computed(HEADER.replace("2.1.197.f42", "2.1.200.0df")) <= 16


# Options


def test_thinking_of_every_type() -> None:
    def options(kind: str) -> Any:
        return task(thinking={"type": kind, "block_binding": None}).chat_template_kwargs

    assert options("adaptive") == options("enabled") == options("between_tools") == {"enable_thinking": True}
    assert options("disabled") == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("effort", "expected"), [("low", "low"), ("high", "high"), ("xhigh", "high"), ("max", "high")]
)
def test_effort_reaches_the_template(effort: str, expected: str) -> None:
    assert task(output_config={"effort": effort}).chat_template_kwargs == {"reasoning_effort": expected}
    own = task(output_config={"effort": effort}, chat_template_kwargs={"reasoning_effort": "x"})
    assert own.chat_template_kwargs == {"reasoning_effort": "x"}


def test_only_fields_that_ask_for_something_are_in_the_warnings(client: httpx.Client) -> None:
    budget = {"type": "tokens", "total": 50_000}
    body: Object = {"messages": user(text("Hi")), "max_tokens": 1}
    asked = {
        "speed": "fast",
        "inference_geo": "us",
        "output_config": {"effort": "high", "task_budget": budget},
    }
    warnings = client.post("/v1/messages", json={**body, **asked}).json()["warnings"]
    assert {warning.partition(" ")[0] for warning in warnings} == {
        "speed",
        "inference_geo",
        "output_config.effort",
        "output_config.task_budget",
    }
    own = ("billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "fallbacks", "metadata")
    harmless = {name: {} for name in own} | {"service_tier": "auto", "speed": "standard", "mcp_servers": []}
    assert "warnings" not in client.post("/v1/messages", json={**body, **harmless}).json()
