"""Blocks of an answer: the changes that events make, in whatever batches they arrive."""

from __future__ import annotations

import pytest

from quire.server.answer_blocks import CALL, REASONING, TEXT, AnswerBlocks, BlockChange
from quire.server.chat_task import ChatEvent, Finish
from quire.text.answer import CallArguments, CallStart, Content, Reasoning

EVENTS: list[ChatEvent] = [
    Reasoning("Let me"),
    Reasoning(" see."),
    Content("I "),
    Content("ask."),
    CallStart(0, "call_a", "f"),
    CallArguments(0, '{"a":'),
    CallArguments(0, " 1}"),
    CallStart(1, "call_b", "g"),
    CallArguments(1, "{}"),
    Finish("tool_calls", None),
]
POSITION = (b"{}",)


@pytest.mark.parametrize("size", range(1, len(EVENTS) + 1))
def test_changes_do_not_depend_on_batches(size: int) -> None:
    blocks, changes = AnswerBlocks(), []
    for at in range(0, len(EVENTS), size):
        changes += [(change, change.block.index) for change in blocks.add(EVENTS[at : at + size])]
    assert [(block.kind, block.name, block.text) for block in blocks.all] == [
        (REASONING, "", "Let me see."),
        (TEXT, "", "I ask."),
        (CALL, "f", '{"a": 1}'),
        (CALL, "g", "{}"),
    ]
    for block in blocks.all:
        first, *deltas, last = [change for change, index in changes if index == block.index]
        assert (first.kind, {change.kind for change in deltas}, last.kind) == ("start", {"delta"}, "stop")
        assert "".join(change.text for change in deltas) == block.text
    assert [index for _, index in changes] == sorted(index for _, index in changes)
    assert blocks.finish == Finish("tool_calls", None)


def test_an_empty_answer_has_an_empty_text() -> None:
    blocks = AnswerBlocks()
    assert [change.kind for change in blocks.add([Finish("stop", None)])] == ["start", "stop"]
    assert [(block.kind, block.text, block.cut) for block in blocks.all] == [(TEXT, "", False)]


@pytest.mark.parametrize("finish", [Finish("length", None), Finish("stop", "}")])
def test_only_the_last_block_is_cut(finish: Finish) -> None:
    blocks = AnswerBlocks()
    blocks.add([*EVENTS[:-1], finish])
    assert [block.cut for block in blocks.all] == [False, False, False, True]


def with_logprobs(changes: list[BlockChange]) -> list[str]:
    return [change.kind for change in changes if change.logprobs]


def test_logprobs_belong_to_the_text_that_arrives_with_them() -> None:
    blocks = AnswerBlocks()
    assert with_logprobs(blocks.add(EVENTS[:1], [POSITION])) == []  # reasoning has none
    assert with_logprobs(blocks.add(EVENTS[1:4], [POSITION])) == ["delta"]
    assert with_logprobs(blocks.add(EVENTS[4:6], [POSITION])) == ["stop"]  # of tokens that made no text
    assert [len(block.logprobs) for block in blocks.all] == [0, 2, 0]
