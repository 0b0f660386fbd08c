"""context_management of /v1/messages: the blocks that each edit clears, and its trigger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anthropic
import httpx
import pytest
from msgspec import convert, to_builtins
from named_events import Object, events
from server import Server

from quire.errors import RequestError
from quire.server.anthropic.edits import CLEARED, AppliedEdit, ContextManagement, apply_edits, edits_of
from quire.server.anthropic.turns import Turn, blocks_of

TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
Edited = tuple[Sequence[Turn], list[AppliedEdit]]
LONG = "a long result " * 10


def called(number: int, name: str = "read", thought: str = "") -> list[Object]:
    """Return a call of the model and its result."""
    call = {"type": "tool_use", "id": f"id{number}", "name": name, "input": {"path": "a" * 40}}
    thinking = [{"type": "thinking", "thinking": thought, "signature": "x"}] if thought else []
    result = {"type": "tool_result", "tool_use_id": f"id{number}", "content": f"{number} {LONG}"}
    return [{"role": "assistant", "content": [*thinking, call]}, {"role": "user", "content": [result]}]


def said(text: str) -> Object:
    return {"role": "user", "content": text}


def conversation(*names: str) -> list[Object]:
    turns = [said("Read them.")]
    for number, name in enumerate(names):
        turns += called(number, name)
    return turns


def made(messages: Sequence[Object], *asked: Object) -> tuple[Edited, list[int]]:
    """Apply edits to a conversation of one token a character; also return the numbers of tokens counted."""
    counted: list[int] = []

    def count(turns: Sequence[Turn]) -> int:
        counted.append(sum(len(str(to_builtins(block))) for turn in turns for block in blocks_of(turn)))
        return counted[-1]

    edits, warnings = edits_of(ContextManagement([*asked]))
    assert warnings == []
    return apply_edits(convert(messages, list[Turn]), edits, count), counted


def cleared(found: Edited) -> list[str | None]:
    """Return the ids of the results that are cleared."""
    blocks = [block for turn in found[0] for block in blocks_of(turn)]
    return [block.tool_use_id for block in blocks if block.content == CLEARED]


def uses(value: int, **more: Any) -> Object:
    return {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": value}, **more}


def kept(value: int) -> Object:
    return {"type": "tool_uses", "value": value}


FIVE = conversation(*["read"] * 5)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (uses(5), []),
        (uses(4), ["id0", "id1"]),
        (uses(4, keep=kept(1)), ["id0", "id1", "id2", "id3"]),
        (uses(4, keep=kept(0)), ["id0", "id1", "id2", "id3", "id4"]),
        (uses(4, keep=kept(9)), []),
        (uses(4, exclude_tools=["read"]), []),
        (uses(4, clear_at_least={"type": "input_tokens", "value": 100}), ["id0", "id1"]),
        (uses(4, clear_at_least={"type": "input_tokens", "value": 10_000}), []),
        ({"type": TOOL_USES}, []),  # at 100,000 tokens
        ({"type": TOOL_USES, "trigger": {"type": "input_tokens", "value": 500}}, ["id0", "id1"]),
    ],
)
def test_old_results_are_cleared_when_the_trigger_is_met(asked: Object, expected: list[str]) -> None:
    found, counted = made(FIVE, asked)
    assert cleared(found) == expected
    if not expected:
        assert (found[1], to_builtins(found[0])) == ([], to_builtins(convert(FIVE, list[Turn])))
    else:
        (outcome,) = to_builtins(found[1])
        saved = counted[0] - counted[-1]
        assert outcome == {
            "type": TOOL_USES,
            "cleared_tool_uses": len(expected),
            "cleared_input_tokens": saved,
        }


def test_tokens_are_counted_only_where_they_matter() -> None:
    assert made(FIVE, uses(5))[1] == []
    assert made(FIVE, {"type": THINKING})[1] == []
    assert made(FIVE, {"type": THINKING, "keep": "all"})[1] == []
    assert len(made(FIVE, {"type": TOOL_USES})[1]) == 1
    assert len(made(FIVE, uses(4))[1]) == 2
    assert len(made(FIVE, uses(4), {"type": TOOL_USES})[1]) == 2


def test_tools_can_be_excluded_and_inputs_cleared() -> None:
    messages = conversation("read", "search", "read", "read", "read")
    for asked, inputs in ((None, []), (False, []), (True, ["id0"]), (["search"], []), (["read"], ["id0"])):
        found, _ = made(messages, uses(3, exclude_tools=["search"], clear_tool_inputs=asked))
        assert cleared(found) == ["id0"]
        blocks = [block for turn in found[0] for block in blocks_of(turn)]
        assert [block.id for block in blocks if block.input == {}] == inputs


def test_calls_without_results_and_repeated_ids_are_not_cleared() -> None:
    unanswered = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "x", "name": "read", "input": {}}],
    }
    found, _ = made([said("Hi"), unanswered, *FIVE[1:]], uses(4))
    assert cleared(found) == ["id0", "id1"]
    found, _ = made([*FIVE, *called(0)], uses(4, keep=kept(1)))  # an id twice, once among the latest
    assert cleared(found) == ["id1", "id2", "id3", "id4"]


def test_a_cleared_result_is_no_failure() -> None:
    messages = conversation(*["read"] * 4)
    messages[2]["content"][0]["is_error"] = True
    found, _ = made(messages, uses(3))
    (block,) = blocks_of(found[0][2])
    assert (block.content, block.is_error) == (CLEARED, None)


def thoughts(found: Edited) -> list[str | None]:
    blocks = [block for turn in found[0] for block in blocks_of(turn)]
    return [block.thinking for block in blocks if block.type == "thinking"]


THOUGHTFUL = [
    said("One"),
    *called(0, thought="a"),
    *called(1, thought="b"),
    said("Two"),
    *called(2),
    said("Three"),
    *called(3, thought="c"),
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "id3"}, {"type": "text", "text": "On"}],
    },
    {"role": "system", "content": "Be brief."},
    *called(4, thought="d"),
]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (None, ["c", "d"]),
        ({"type": "thinking_turns", "value": 1}, ["c", "d"]),
        ({"type": "thinking_turns", "value": 2}, ["a", "b", "c", "d"]),
        ("all", ["a", "b", "c", "d"]),
        ({"type": "all"}, ["a", "b", "c", "d"]),
    ],
)
def test_reasoning_of_old_turns_is_cleared(keep: Any, expected: list[str]) -> None:
    found, counted = made(THOUGHTFUL, {"type": THINKING} | ({} if keep is None else {"keep": keep}))
    assert thoughts(found) == expected
    assert len(found[0]) == len(THOUGHTFUL)
    if expected == ["c", "d"]:
        saved = counted[0] - counted[1]
        assert to_builtins(found[1]) == [
            {"type": THINKING, "cleared_thinking_turns": 1, "cleared_input_tokens": saved}
        ]
    else:
        assert (found[1], counted) == ([], [])


def test_edits_are_applied_in_order() -> None:
    _, (whole, without_thoughts) = made(THOUGHTFUL, {"type": THINKING})
    trigger = {"type": "input_tokens", "value": without_thoughts}
    found, _ = made(THOUGHTFUL, {"type": THINKING}, {"type": TOOL_USES, "trigger": trigger})
    assert [type(outcome).__name__ for outcome in found[1]] == ["ClearedThinking"]
    trigger["value"] -= 1
    found, counted = made(THOUGHTFUL, {"type": THINKING}, {"type": TOOL_USES, "trigger": trigger})
    assert [type(outcome).__name__ for outcome in found[1]] == ["ClearedThinking", "ClearedToolUses"]
    assert sum(outcome.cleared_input_tokens for outcome in found[1]) == whole - counted[-1]


def test_an_unknown_edit_is_warned_about() -> None:
    asked = [
        {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 1}},
        {"type": THINKING},
    ]
    edits, (warning,) = edits_of(ContextManagement(asked))
    assert len(edits) == 1
    assert "edits[0]" in warning
    assert "compact_20260112" in warning


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("edits[0]: type is missing", {}),
        ("edits[0]: type is missing", {"type": 3}),
        ("trigger.type", uses(3) | {"trigger": {"type": "characters", "value": 3}}),
        ("trigger.value", uses(-1)),
        ("keep", uses(3, keep=3)),
        ("keep.type", uses(3, keep={"type": "input_tokens", "value": 3})),
        ("keep", {"type": THINKING, "keep": "some"}),
        ("keep.value", {"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}),
        ("clear_at_least", uses(3, clear_at_least=5)),
    ],
)
def test_a_malformed_edit_is_refused_with_its_place(words: str, asked: Object) -> None:
    with pytest.raises(RequestError) as caught:
        edits_of(ContextManagement([asked]))
    assert words in caught.value.message
    assert caught.value.param == "context_management"


# Over real sockets

TOOLS: list[Any] = [{"name": "read", "input_schema": {"type": "object", "properties": {}}}]
EDITS: Object = {"edits": [uses(3, keep=kept(1)), {"type": "compact_20260112"}]}
BODY: Object = {"model": "demo", "messages": conversation(*["read"] * 4), "tools": TOOLS}


def test_the_response_reports_the_edits(client: httpx.Client) -> None:
    whole = client.post("/v1/messages/count_tokens", json=BODY).json()["input_tokens"]
    asked = {**BODY, "context_management": EDITS}
    counted = client.post("/v1/messages/count_tokens", json=asked).json()
    left = counted["input_tokens"]
    assert counted["context_management"] == {"original_input_tokens": whole}
    outcome = {"type": TOOL_USES, "cleared_tool_uses": 3, "cleared_input_tokens": whole - left}
    assert 0 < left < whole
    reply = client.post("/v1/messages", json={**asked, "max_tokens": 1}).json()
    assert reply["context_management"] == {"applied_edits": [outcome]}
    assert reply["timings"]["prompt_tokens"] == left
    assert any("compact_20260112" in warning for warning in reply["warnings"])
    found = events(client, "/v1/messages", **asked, max_tokens=1)
    delta = next(event for event in found if event["type"] == "message_delta")
    assert delta["context_management"] == {"applied_edits": [outcome]}


def test_edits_without_effect_are_not_reported(client: httpx.Client) -> None:
    asked = {**BODY, "max_tokens": 1, "context_management": {"edits": [{"type": THINKING, "keep": "all"}]}}
    assert client.post("/v1/messages", json=asked).json()["context_management"] == {"applied_edits": []}
    assert "context_management" not in client.post("/v1/messages", json={**BODY, "max_tokens": 1}).json()
    refused = client.post("/v1/messages", json={**asked, "context_management": {"edits": [{}]}})
    assert (refused.status_code, "edits[0]" in refused.json()["error"]["message"]) == (400, True)


def test_edits_make_a_long_conversation_fit(client: httpx.Client) -> None:
    messages = conversation(*["read"] * 8)
    for message in messages[2::2]:
        message["content"][0]["content"] = LONG * 20
    asked: Object = {**BODY, "messages": messages, "max_tokens": 1}
    assert client.post("/v1/messages", json=asked).status_code == 400
    trigger = {"type": "input_tokens", "value": 600}
    edits = [{"type": TOOL_USES, "trigger": trigger, "keep": kept(0)}]
    reply = client.post("/v1/messages", json={**asked, "context_management": {"edits": edits}})
    assert reply.status_code == 200, reply.text


def test_sdk_reads_the_edits(server: Server) -> None:
    betas = ["context-management-2025-06-27"]
    asked: Object = {**BODY, "max_tokens": 5, "context_management": EDITS, "betas": betas}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        whole = sdk.beta.messages.create(**asked)
        with sdk.beta.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        del asked["max_tokens"]
        count = sdk.beta.messages.count_tokens(**asked)
    assert whole.context_management is not None
    (outcome,) = whole.context_management.applied_edits
    assert outcome.type == TOOL_USES
    assert outcome.cleared_tool_uses == 3
    assert final.context_management == whole.context_management
    assert count.context_management is not None
    assert count.context_management.original_input_tokens > count.input_tokens
