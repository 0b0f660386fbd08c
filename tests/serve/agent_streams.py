"""What a stream told a coding agent: one reader for the three endpoints that agents use."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass
class LogprobCursor:
    """The answer of one request: its text, the tools it calls, and how much of its prompt was cached."""

    text: str = ""
    calls: list[tuple[str, Object]] = field(default_factory=list)
    finish: str | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_text_events: int = 0


def told(path: str, stream: str) -> LogprobCursor:
    """Read a whole stream of `path`. AssertionError for one that is malformed, ends early or has an error."""
    reader = {"messages": _messages, "responses": _responses, "completions": _chat}
    found = reader[path.partition("?")[0].rsplit("/", 1)[1]](_events(stream))
    assert found.finish is not None, stream[-500:]
    return found


def _events(stream: str) -> list[tuple[str | None, str]]:
    """(name, data) of each server-sent event; comments are left out."""
    *blocks, rest = stream.split("\n\n")
    assert rest == "", f"the stream ends within an event: {rest[-200:]!r}"
    events = []
    for block in blocks:
        fields = [line.partition(": ")[::2] for line in block.split("\n") if not line.startswith(":")]
        if fields:
            assert [name for name, _ in fields] in (["data"], ["event", "data"]), block
            values = dict(fields)
            events.append((values.get("event"), values["data"]))
    return events


def _objects(events: list[tuple[str | None, str]]) -> list[Object]:
    """The events of a stream that names them: each by its type, and none an error."""
    objects = [json.loads(data) for _, data in events]
    assert [name for name, _ in events] == [one["type"] for one in objects]
    assert not [one for one in objects if one["type"] in ("error", "response.failed")], objects[-1]
    return objects


def _chat(events: list[tuple[str | None, str]]) -> LogprobCursor:
    *chunks, last = events
    assert last == (None, "[DONE]")
    found, calls = LogprobCursor(), []
    for chunk in (json.loads(data) for _, data in chunks):
        assert "error" not in chunk, chunk
        if usage := chunk.get("usage"):
            found.num_prompt_tokens = usage["prompt_tokens"]
            found.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        for choice in chunk["choices"]:
            assert found.finish is None, "a choice goes on behind its end"
            found.finish = choice["finish_reason"]
            delta = choice["delta"]
            if delta.get("content"):
                found.text += delta["content"]
                found.num_text_events += 1
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    calls.append([part["function"]["name"], ""])
                calls[part["index"]][1] += part["function"].get("arguments", "")
    found.calls = [(name, json.loads(arguments)) for name, arguments in calls]
    return found


def _messages(events: list[tuple[str | None, str]]) -> LogprobCursor:
    objects = [one for one in _objects(events) if one["type"] != "ping"]
    assert [objects[0]["type"], objects[-1]["type"]] == ["message_start", "message_stop"]
    found, blocks, texts = LogprobCursor(), [], []
    for one in objects:
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks)
            blocks.append(one["content_block"])
            texts.append("")
        elif one["type"] == "content_block_delta":
            delta = one["delta"]
            texts[one["index"]] += delta.get("text", "") + delta.get("partial_json", "")
            found.num_text_events += "text" in delta
        elif one["type"] == "message_delta":
            found.finish, usage = one["delta"]["stop_reason"], one["usage"]
            found.num_cached_tokens = usage.get("cache_read_input_tokens") or 0
            found.num_prompt_tokens = usage["input_tokens"] + found.num_cached_tokens
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            found.calls.append((block["name"], json.loads(text)))
        elif block["type"] == "text":
            found.text += text
    return found


def _responses(events: list[tuple[str | None, str]]) -> LogprobCursor:
    objects = _objects(events)
    assert [one["sequence_number"] for one in objects] == list(range(len(objects)))
    assert [objects[0]["type"], objects[-1]["type"]] == ["response.created", "response.completed"]
    found = LogprobCursor()
    for one in objects:
        if one["type"] == "response.output_text.delta":
            found.text += one["delta"]
            found.num_text_events += 1
        elif one["type"] == "response.output_item.done" and one["item"]["type"].endswith("_call"):
            item = one["item"]
            arguments = item["input"] if "input" in item else json.loads(item["arguments"])
            found.calls.append((item["name"], arguments))
    response = objects[-1]["response"]
    found.finish, usage = response["status"], response["usage"]
    found.num_prompt_tokens = usage["input_tokens"]
    found.num_cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    return found
