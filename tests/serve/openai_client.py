"""What tests ask of the two endpoints, and streams put together again by the rules that clients rely on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Tell me a story about a dragon."}]
SAMPLED = {"seed": 5, "temperature": 1.0, "top_p": 1.0}
MAX_LINE_BYTES = 1 << 16

Object = dict[str, Any]


def ask(client: httpx.Client, path: str, **body: Any) -> Object:
    """A response as a whole; AssertionError when it is an error."""
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found: Object = reply.json()
    return found


def chat(client: httpx.Client, **body: Any) -> Object:
    return ask(client, CHAT, **{"messages": MESSAGES, **body})


def refused(client: httpx.Client, path: str, **body: Any) -> Object:
    """The error of a request that is refused with 400, in OpenAI's shape."""
    given = {"messages": MESSAGES} if path == CHAT else {"prompt": "Once"}
    reply = client.post(path, json={**given, **body})
    assert reply.status_code == 400, (reply.status_code, reply.text)
    error: Object = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def chunks(
    client: httpx.Client, path: str, begun: Callable[[], None] | None = None, **body: Any
) -> list[Object]:
    """The chunks of a stream, whose form is checked. `begun` is called when some of it has come."""
    content = b""
    with client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        for piece in reply.iter_raw():
            content += piece
            if begun is not None:
                begun()
    events = content.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert max(len(event.encode()) for event in events) < MAX_LINE_BYTES
    assert events.pop() == "data: [DONE]"
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in found}) == 1
    return found


def choices(found: list[Object]) -> Iterator[Object]:
    """Every choice of every chunk; each ends once, with nothing after it."""
    ended = set()
    for chunk in found:
        for choice in chunk["choices"]:
            assert choice["index"] not in ended
            if choice["finish_reason"] is not None:
                ended.add(choice["index"])
            yield choice


def joined_chat(found: list[Object]) -> list[Object]:
    """The choices of a whole response, made of a stream's chunks."""
    joined: dict[int, Object] = {}
    for choice in choices(found):
        index, delta = choice["index"], choice["delta"]
        if index not in joined:
            assert delta == {"role": "assistant", "content": ""}
            joined[index] = {"index": index, "message": {**delta, "refusal": None}, "logprobs": None}
        else:
            assert "role" not in delta
            _add_delta(joined[index]["message"], delta)
        _add_details(joined[index], choice)
    return [joined[index] for index in sorted(joined)]


def joined_completions(found: list[Object]) -> list[Object]:
    """Likewise, of completions."""
    joined: dict[int, Object] = {}
    for choice in choices(found):
        whole = joined.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None})
        whole["text"] += choice["text"]
        _add_details(whole, choice)
    return [joined[index] for index in sorted(joined)]


def _add_delta(message: Object, delta: Object) -> None:
    for name in ("content", "reasoning_content"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    for part in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if "id" in part:
            assert part.pop("index") == len(calls)
            assert part["function"]["arguments"] == ""
            calls.append(part)
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def _add_details(whole: Object, choice: Object) -> None:
    for name in ("token_ids", "prompt_token_ids"):
        if name in choice:
            whole[name] = whole.get(name, []) + choice[name]
    for name, values in (choice["logprobs"] or {}).items():
        if whole["logprobs"] is None:
            whole["logprobs"] = {}
        if values is not None:
            whole["logprobs"][name] = whole["logprobs"].get(name, []) + values
        else:
            whole["logprobs"][name] = None
    if choice["finish_reason"] is not None:
        whole |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
