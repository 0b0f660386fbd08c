"""What a stream tells its own client of the drafts of its answer, and nobody else."""

from __future__ import annotations

import json
from typing import Any, get_args

import httpx
import pytest
from model_folders import tokenizer_of
from openai_client import CHAT, COMPLETIONS, MAX_LINE_BYTES, MESSAGES, chunks, joined_chat
from server import Server

from quire.outputs import CompletionOutput
from quire.program.caches import MAX_DRAFTED
from quire.server.openai.chunks import ChatChunk, ChatChunkChoice, Delta, event_of, take_drafting
from quire.types import Draft, Drafting, DraftSource

ASKED = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "Once upon a time"}}
TOLD = {"include_drafting": True}
TOLD_CHAT: dict[str, Any] = {
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 100,
    "stream_options": TOLD | {"include_usage": True},
}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "animal": {"enum": ["fox", "dog"]}}}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {**SCHEMA, "required": ["name", "animal"]}},
}


def text_of(found: list[dict[str, Any]]) -> str:
    """The text of the first choice of a stream."""
    text: str = joined_chat(found)[0]["message"]["content"]
    return text


def told(found: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """What a stream says of the steps of a choice."""
    of_choice = [one for chunk in found for one in chunk["choices"] if one["index"] == index]
    return [one["drafting"] for one in of_choice if "drafting" in one]


def test_words_of_others_are_not_told(demo_folder: Any) -> None:
    """What the store proposed was somebody's answer: of it, only what the own answer has as well is told."""
    tokenizer = tokenizer_of(demo_folder)
    ids = tuple(tokenizer.encode("Once upon a time"))
    for source in get_args(DraftSource):
        told = Drafting(Draft(ids, source, 7), 1)
        output = CompletionOutput(0, drafting=[(ids[:1] + ids[:1], told)])
        (entry,) = take_drafting(output, tokenizer)
        assert entry.tokens == [tokenizer.token_text(ids[0])] * 2
        texts = [tokenizer.token_text(one) for one in ids]
        assert entry.drafted == (texts[:1] + [""] * (len(ids) - 1) if source == "store" else texts)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_steps_of_an_answer_give_its_tokens(client: httpx.Client, path: str) -> None:
    sampled = {"n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    plain = chunks(client, path, **ASKED[path], **sampled)
    found = chunks(client, path, **ASKED[path], **sampled, stream_options=TOLD)
    for index in range(2):
        assert told(plain, index) == []
        steps = told(found, index)
        assert sum(len(step["tokens"]) for step in steps) == 24
        own = [one for chunk in found for one in chunk["choices"] if one["index"] == index]
        text = "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in own)
        assert "".join(token for step in steps for token in step["tokens"]) == text
        for step in steps:
            drafted, accepted = step.get("drafted", []), step.get("num_accepted", 0)
            assert step["tokens"][:accepted] == drafted[:accepted]
            assert len(step["tokens"]) <= accepted + 1
    if path == CHAT:
        assert joined_chat(found) == joined_chat(plain)


def test_steps_are_told_in_chunks_of_their_own(demo_folder: Any) -> None:
    """The longest tokens of a vocabulary make no long line."""
    tokenizer = tokenizer_of(demo_folder)
    longest = max(range(tokenizer.vocab_size), key=lambda one: len(tokenizer.token_text(one)))
    ids = (longest,) * MAX_DRAFTED
    told = Drafting(Draft(ids, "text", 7), 30, 12.3456, 0.00456789, 0.001)
    output = CompletionOutput(0, drafting=[((1, 2), Drafting(why_none="off")), (ids[:31], told)])
    chunk = ChatChunk(id="x" * 40, created=1, model="demo", system_fingerprint="f")
    lines = [
        event_of(chunk, [ChatChunkChoice(0, Delta(), drafting=entry)])
        for entry in take_drafting(output, tokenizer)
    ]
    assert max(map(len, lines)) < MAX_LINE_BYTES
    assert output.drafting == []
    first, second = [json.loads(line.removeprefix(b"data: "))["choices"][0]["drafting"] for line in lines]
    assert first == {"tokens": [tokenizer.token_text(1), tokenizer.token_text(2)], "why_none": "off"}
    text = tokenizer.token_text(longest)
    assert second == {
        "tokens": [text] * 31,
        "drafted": [text] * 32,
        "num_accepted": 30,
        "source": "text",
        "match": 7,
        "expected_tokens": 12.346,
        "predicted_ms": 4.568,
        "plain_ms": 1.0,
    }


@pytest.mark.parametrize("source", ["text", "store", "grammar"])
def test_drafts_come_with_their_reasons(unmeasured: Server, source: str) -> None:
    with unmeasured.client() as client:
        asked = {**TOLD_CHAT, "cache_salt": source}
        if source == "grammar":
            asked["response_format"] = FORM
        first = chunks(client, CHAT, **asked)
        if source == "text":
            asked |= {"prediction": {"type": "content", "content": text_of(first)}, "cache_salt": "another"}
        check_reasons(first if source == "grammar" else chunks(client, CHAT, **asked), source)


def test_drafts_come_with_what_was_expected(client: httpx.Client) -> None:
    """This server has a law of steps. How many it verifies depends on the speed of the machine."""
    asked = {**TOLD_CHAT, "cache_salt": "no earlier answers", "response_format": FORM}
    steps = told(chunks(client, CHAT, **asked))
    for step in steps:
        if "drafted" in step:
            assert 1 < step["expected_tokens"] <= 1 + len(step["drafted"])
            assert 0 < step["plain_ms"] <= step["predicted_ms"]
        else:
            assert step["why_none"]


def check_reasons(found: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Check the steps of a stream that verified drafts of this source, of which most were right."""
    steps = [step for step in told(found) if step.get("source") == source]
    assert steps, told(found)
    assert sum(step.get("num_accepted", 0) for step in steps) > 4
    for step in steps:
        assert step.get("match", 0) > 0 or source == "grammar"
    timings = found[-1]["timings"]
    assert timings["drafted_tokens"] == sum(len(step.get("drafted", [])) for step in told(found))
    return steps
