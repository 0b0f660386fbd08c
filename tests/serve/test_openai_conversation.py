"""A ChatRun over a script in place of an engine: reasoning, and what is counted of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_folders import tokenizer_of
from msgspec.json import decode

from quire.outputs import CompletionOutput, RequestOutput
from quire.server.chat_task import ChatRun, Finish
from quire.server.openai.chat import stream, whole
from quire.server.openai.protocol import ChatCompletion, ChatRequest
from quire.text.answer import Content, Reasoning
from quire.text.reasoning import find_reasoning
from quire.text.tokenizer import Tokenizer
from quire.text.tools import OutputFormat

SCRIPT = ["<think>", "Let me", " see. ", "</th", "ink>", "\n\nA dragon", " came", "."]
HEAD = {"id": "a", "created": 1, "model": "demo", "system_fingerprint": "f"}


class Script:
    """Stands for a ServerRequest of one prompt and one sequence: a token for each text."""

    def __init__(self, texts: list[str], finish_reason: str = "stop") -> None:
        self.output = RequestOutput("1", "p", [1, 2], [CompletionOutput(0)])
        request = SimpleNamespace(params=None, predicted_token_ids=())
        self.prompts = [SimpleNamespace(output=self.output, request=request)]
        self.service: Any = None
        self.fingerprint = "f"
        self._texts, self._finish_reason = texts, finish_reason

    def timings(self) -> dict[str, float]:
        return {}

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        (choice,) = self.output.outputs
        for number, text in enumerate(self._texts):
            choice.delta = text
            choice.text += text
            choice.token_ids.append(100 + number)
            if number == len(self._texts) - 1:
                choice.finish_reason = self._finish_reason  # type: ignore[assignment]
            yield 0, self.output


def run_of(script: Script, tokenizer: Tokenizer, marks: dict[str, int], **task: Any) -> ChatRun:
    output_format = OutputFormat(None, find_reasoning((), "think"), marks)
    frontend = SimpleNamespace(need_tokenizer=lambda: tokenizer)
    script.service = SimpleNamespace(output_format=output_format, frontend=frontend)
    return ChatRun(script, [output_format.answer_parser(None)], **task)  # type: ignore[arg-type]


@pytest.fixture
def tokenizer(demo_folder: Path) -> Tokenizer:
    return tokenizer_of(demo_folder)


def test_reasoning_is_told_apart(tokenizer: Tokenizer) -> None:
    run = run_of(Script(SCRIPT), tokenizer, {"</think>": 104})

    async def events() -> list[Any]:
        return [event async for batch in run.batches() for _, event in batch]

    found = asyncio.run(events())
    assert "".join(event.text for event in found if isinstance(event, Reasoning)).strip() == "Let me see."
    assert "".join(event.text for event in found if isinstance(event, Content)) == "A dragon came."
    assert found[-1] == Finish("stop", None)
    assert run.usage().reasoning_tokens == 5  # up to the mark, which is one
    assert run.usage().completion_tokens == 8


def test_a_mark_that_is_no_token_is_counted_by_text(tokenizer: Tokenizer) -> None:
    run = run_of(Script(SCRIPT), tokenizer, {})
    found = decode(asyncio.run(whole(ChatRequest(messages=[]), run, HEAD, [])), type=ChatCompletion)
    thoughts = found.choices[0].message.reasoning_content
    assert found.usage.completion_tokens_details.reasoning_tokens == len(tokenizer.encode(str(thoughts)))


@pytest.mark.parametrize("included", [True, False])
def test_a_stream_of_reasoning(tokenizer: Tokenizer, included: bool) -> None:
    async def events() -> bytes:
        run = run_of(Script(SCRIPT), tokenizer, {}, include_reasoning=included)
        asked = ChatRequest(messages=[], stream=True)
        return b"".join([piece async for piece in stream(asked, run, HEAD, [])])

    found = [
        json.loads(line.removeprefix("data: ")) for line in asyncio.run(events()).decode().split("\n\n")[:-1]
    ]
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thoughts.strip() == ("Let me see." if included else "")
    assert "".join(delta.get("content", "") for delta in deltas) == "A dragon came."


def test_an_answer_that_is_all_reasoning(tokenizer: Tokenizer) -> None:
    run = run_of(Script(SCRIPT[:3], "length"), tokenizer, {"</think>": 104})
    found = decode(asyncio.run(whole(ChatRequest(messages=[]), run, HEAD, [])), type=ChatCompletion)
    (choice,) = found.choices
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert str(choice.message.reasoning_content).strip() == "Let me see."
