"""The essence of an answer: what must not depend on when, where and in how many pieces it was made."""

from __future__ import annotations

import json
from typing import Any

from endurance.answers import Answer

# Names and times of one answer, and what depends on what was cached, drafted or measured.
OF_THE_MOMENT = frozenset(
    ("id", "item_id", "call_id", "request_id", "created", "created_at", "completed_at", "timings", "warnings")
) | {
    "sequence_number",
    "input_tokens",
    "prompt_tokens_details",
    "input_tokens_details",
    "completion_tokens_details",
}
ANSWER_EVENTS = ("delta", "response.created", "response.in_progress", "ping")


def essence(answer: Answer) -> Any:
    """Return what two answers to one request have in common, to the bit, whole or as streams."""
    if not answer.events:
        return stripped(answer.body)
    if "choices" in answer.events[0]:
        return _of_chunks(answer.events)
    return _of_events(answer.events)


def stripped(value: Any) -> Any:
    """Return a JSON value without the fields that are of the moment."""
    if isinstance(value, dict):
        kept = {name: stripped(one) for name, one in value.items() if name not in OF_THE_MOMENT}
        return {name: one for name, one in kept.items() if not name.startswith("cache_")}
    return [stripped(one) for one in value] if isinstance(value, list) else value


def _of_chunks(events: list[dict[str, Any]]) -> Any:
    """Join the chunks of chat and text completions, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    others: dict[str, Any] = {}
    for event in events:
        others |= {name: one for name, one in stripped(event).items() if name != "choices"}
        for choice in stripped(event)["choices"]:
            _join(choices.setdefault(choice.pop("index"), {}), choice)
    return {"choices": choices, **others}


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Append texts and lists; calls are joined by their index."""
    for name, value in part.items():
        if value is None:
            continue
        if name == "tool_calls":
            calls = whole.setdefault(name, {})
            for call in value:
                _join(calls.setdefault(call.pop("index"), {}), call)
        elif isinstance(value, dict):
            _join(whole.setdefault(name, {}), value)
        elif isinstance(value, str) and name not in ("finish_reason", "role", "type"):
            whole[name] = whole.get(name, "") + value
        elif isinstance(value, list):
            whole[name] = whole.get(name, []) + value
        else:
            whole[name] = value


def _of_events(events: list[dict[str, Any]]) -> Any:
    """Join the deltas of typed events, by type and place; all else in its order."""
    found: list[Any] = []
    deltas: dict[str, dict[str, Any]] = {}
    for event in map(stripped, events):
        kind, delta = event["type"], event.get("delta")
        if kind in ANSWER_EVENTS or kind == "message_start":
            continue
        if delta is None or kind == "message_delta":
            found.append(event)
            continue
        own = delta if isinstance(delta, dict) else {"delta": delta, "logprobs": event.get("logprobs")}
        place = {name: event[name] for name in ("index", "output_index", "content_index") if name in event}
        key = json.dumps([kind, own.get("type"), place])
        if key not in deltas:
            deltas[key] = {}
            found.append((key, deltas[key]))
        _join(deltas[key], own)
    return found
