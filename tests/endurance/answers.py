"""The answer to one request, and the checks on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

FINISH_REASONS = ("stop", "length", "tool_calls")
STOP_REASONS = ("end_turn", "max_tokens", "model_context_window_exceeded")  # Anthropic's, of texts


@dataclass(slots=True)
class Answer:
    """The answer to one request."""

    status: int = 0
    body: Any = None  # of an answer that is no stream
    events: list[dict[str, Any]] = field(default_factory=list)  # of one that is
    num_done: int = 0  # how often it said [DONE]
    error: str = ""  # that a stream ended with
    hung_up: bool = False

    @property
    def choices(self) -> list[dict[str, Any]]:
        """Of a whole answer, or of all events."""
        parts = self.events or [self.body]
        return [choice for part in parts for choice in part.get("choices") or ()]

    def text(self, index: int = 0) -> str:
        """Return the text of one choice."""
        pieces = []
        for choice in self.choices:
            if choice["index"] == index:
                message = choice.get("delta") or choice.get("message") or {}
                pieces.append(choice.get("text") or message.get("content") or "")
        return "".join(pieces)

    def calls(self) -> dict[int, tuple[str, str]]:
        """Names and arguments of the calls of the only choice."""
        found: dict[int, tuple[str, str]] = {}
        for choice in self.choices:
            message = choice.get("delta") or choice.get("message") or {}
            for place, call in enumerate(message.get("tool_calls") or ()):
                index, function = call.get("index", place), call["function"]
                name, arguments = found.get(index, ("", ""))
                said = function.get("arguments") or ""
                found[index] = (name + (function.get("name") or ""), arguments + said)
        return found

    def finish_reasons(self) -> Counter[tuple[int, str]]:
        """Count the ends of each choice by reason."""
        ended = ((c["index"], c["finish_reason"]) for c in self.choices if c.get("finish_reason"))
        return Counter(ended)


# Takes an answer with status 200; gives what is wrong with it, or nothing.
Check = Callable[[Answer], str]


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and what its answer must be."""

    kind: str
    path: str
    body: bytes
    check: Check
    statuses: tuple[int, ...] = (200,)
    hang_up_at: int | None = None  # the number of the event at which the client goes; 0: before any

    def problem(self, answer: Answer) -> str:
        """Return the problem of an answer, or an empty string."""
        if answer.hung_up:
            return ""
        if answer.status not in self.statuses:
            return f"HTTP {answer.status} instead of {self.statuses[0]}: {str(answer.body)[:120]}"
        if answer.status != 200:
            return _shape_of_error(answer.body)
        return answer.error or self.check(answer)


def _shape_of_error(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= error.keys():
        return f"an error in another shape: {str(body)[:80]}"
    return "" if error["message"] and isinstance(error["code"], str | None) else "an error without words"


def well_formed(answer: Answer, n: int = 1) -> str:
    """Every choice ends once, by a reason there is; usage adds up; a stream says [DONE] once, at its end."""
    ended = answer.finish_reasons()
    if sorted(index for index, _ in ended.elements()) != list(range(n)):
        return f"choices ended {sorted(ended.elements())} instead of once each of {n}"
    if strange := {reason for _, reason in ended} - set(FINISH_REASONS):
        return f"finish reasons {strange}"
    usage = (answer.events[-1] if answer.events else answer.body).get("usage") or {}
    if usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0) != usage.get("total_tokens"):
        return f"usage does not add up: {usage}"
    if answer.events and answer.num_done != 1:
        return f"[DONE] came {answer.num_done} times"
    return ""


def was_cut(answer: Answer) -> bool:
    """The output was as long as it may be, so what it means need not be whole."""
    return any(reason == "length" for _, reason in answer.finish_reasons())


def response_problem(answer: Answer) -> str:
    """Check an answer of /v1/responses: its end, its numbers, its text against the deltas."""
    events = answer.events
    response = events[-1].get("response") if events else answer.body
    if not isinstance(response, dict) or response.get("status") not in ("completed", "incomplete"):
        return f"it ended with {events[-1].get('type') if events else response}"
    if events and events[-1]["type"] != f"response.{response['status']}":
        return f"it ended with {events[-1]['type']}, which is {response['status']}"
    if [event["sequence_number"] for event in events] != list(range(len(events))):
        return "its events are not numbered one by one"
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    text = "".join(part["text"] for part in parts)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    if events and "".join(deltas) != text:
        return "its deltas are not its text"
    usage = response["usage"]
    adds_up = usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    return "" if adds_up and usage["output_tokens"] > 0 else f"usage does not add up: {usage}"


def message_problem(answer: Answer) -> str:
    """Check an answer of /v1/messages: its beginning, its blocks, its end."""
    if not answer.events:
        whole = answer.body.get("type") == "message" and answer.body.get("stop_reason") in STOP_REASONS
        return "" if whole else f"it ended with {str(answer.body)[-80:]}"
    kinds = [event["type"] for event in answer.events if event["type"] != "ping"]
    if (kinds[0], *kinds[-2:]) != ("message_start", "message_delta", "message_stop"):
        return f"it began with {kinds[0]} and ended with {kinds[-2:]}"
    if kinds.count("content_block_start") != kinds.count("content_block_stop"):
        return "a block did not end"
    (reason,) = (e["delta"]["stop_reason"] for e in answer.events if e["type"] == "message_delta")
    return "" if reason in STOP_REASONS else f"it stopped because of {reason}"
