"""Answers with reasoning in the terminal: what is shown where, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli.terminal_chat import TerminalChat
from quire.frontend import Encoded
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams

THINK = "{{ '<think>' }}{{ content.split('</think>')[-1] }}"
HARMONY = "{{ '<|channel|>analysis<|message|>' }}{{ '<|end|>' }}"


class Thinking:
    """An LLM that answers with these pieces of text, and the messages that it was asked."""

    def __init__(self, template: str, pieces: Sequence[str], opening: str = "") -> None:
        self.chosen: Mapping[str, str] = {"model": "m"}
        self.pieces, self.opening, self.asked = pieces, opening, list[Any]()
        self.end: BaseException | None = None
        tokens = SimpleNamespace(token_id=MARKS.get, control_ids=set(MARKS.values()), special_ids={1, 2, 3})
        self.frontend = SimpleNamespace(
            chat_template=SimpleNamespace(templates={"default": template}),
            tokenizer=tokens,
            max_model_len=100,
            encode_chat=self.encode,
        )

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> Encoded:
        self.asked = list(messages)
        return Encoded((1, 2), f"user: hi assistant: {self.opening}")

    def stream(self, prompt: Encoded, params: SamplingParams) -> Iterator[RequestOutput]:
        choice = CompletionOutput(0)
        for piece in self.pieces:
            choice.delta, choice.text = piece, choice.text + piece
            yield RequestOutput("0", None, [1, 2], [choice])
        if self.end is not None:
            raise self.end


MARKS = {"<|channel|>": 1, "<|end|>": 2, "<|message|>": 3, "<think>": 4, "</think>": 5}


def chat(llm: Any, **how: Any) -> TerminalChat:
    return TerminalChat(
        llm, SamplingParams(max_tokens=8), **{"raw": False, "system": None, "as_json": False, **how}
    )


@pytest.mark.parametrize(
    ("template", "opening", "answer"),
    [
        (THINK, "", "<think>\nHm, so.\n</think>\n\nYes."),
        (THINK, "<think>\n", "Hm, so.\n</think>\n\nYes."),
        (
            HARMONY,
            "",
            "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_reasoning_is_shown_apart_and_not_kept(
    template: str, opening: str, answer: str, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = Thinking(template, [answer[at : at + step] for at in range(0, len(answer), step)], opening)
    held = chat(llm)
    assert held.answer("hi") == 0
    out, err = capsys.readouterr()
    assert out == "Yes.\n"
    assert err.startswith("Hm, so.\n\n")
    held.answer("And?")
    assert [message["content"] for message in llm.asked] == ["hi", "Yes.", "And?"]
    capsys.readouterr()
    chat(llm, as_json=True).answer("hi")
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["text"], report["reasoning"], err) == ("Yes.", "Hm, so.", "")


def test_marks_that_are_special_tokens_are_in_the_text() -> None:
    assert not chat(Thinking(HARMONY, [])).params.skip_special_tokens
    assert chat(Thinking(THINK, [])).params.skip_special_tokens
    assert chat(Thinking(HARMONY, []), raw=True).params.skip_special_tokens


def test_an_answer_that_ends_within_its_reasoning(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Thinking(THINK, ["<think>Hm"])
    llm.end = KeyboardInterrupt()
    held = chat(llm)
    assert held.answer("hi") == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("\n", "Hm\nstopped\n")
    assert held.messages[-1]["content"] == ""


def test_an_answer_without_reasoning_is_all_text(capsys: pytest.CaptureFixture[str]) -> None:
    held = chat(Thinking("{{ messages }}", ["<think>", "a</think>"]), as_json=True)
    held.answer("hi")
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == "<think>a</think>"
    assert "reasoning" not in report


def test_what_might_have_become_a_mark_is_shown_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(Thinking(THINK, ["<thi"])).answer("hi") == 0
    assert capsys.readouterr().out == "<thi\n"
