"""The embedded demo model does what its card says: a story about what was asked, the right tool, a format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=256)


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("get_weather", "Get the weather in a city", city="string"),
    tool("set_timer", "Set a timer", minutes="integer"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("demo")
    yield made
    made.close()


def answer(llm: LLM, text: str, tools: list[dict[str, Any]] | None = None) -> str:
    messages = [{"role": "user", "content": text}]
    choice = llm.chat(messages, GREEDY, use_tqdm=False, tools=tools)[0].outputs[0]
    assert choice.finish_reason == "stop"
    return choice.text


def test_a_story_about_what_was_asked(llm: LLM) -> None:
    story = answer(llm, "Tell me a story about a fox and a lantern")
    assert "fox" in story.lower()
    assert "lantern" in story.lower()
    assert len(story.split()) > 40
    assert story.rstrip()[-1] in '.!?"'


def test_the_right_tool_with_the_right_argument(llm: LLM) -> None:
    call = answer(llm, "How is the weather in Oslo right now?", TOOLS)
    found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", call.strip())
    assert found, call
    assert json.loads(found[1]) == {"name": "get_weather", "arguments": {"city": "Oslo"}}


def test_a_tools_result_is_used(llm: LLM) -> None:
    call = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    messages = [
        {"role": "user", "content": "How is the weather in Oslo right now?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": json.dumps({"city": "Oslo", "temperature": 7, "sky": "cloudy"})},
    ]
    text = llm.chat(messages, GREEDY, use_tqdm=False, tools=TOOLS)[0].outputs[0].text
    assert "Oslo" in text or "7" in text


def test_facts_and_manners(llm: LLM) -> None:
    assert "Paris" in answer(llm, "What is the capital of France?")
    assert "Quire" in answer(llm, "Hi! Who are you?")


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_it_is_small_and_complete(name: str, demo_folder: Path) -> None:
    folder = demo_folder.parent / name
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(files) >= {"config.json", "generation_config.json", "tokenizer.json", "README.md"}
    assert sum(files.values()) <= (10e6 if name == "demo" else 3e6)


def test_the_draft_shares_the_vocabulary(demo_folder: Path) -> None:
    draft = demo_folder.parent / "demo-draft"
    assert (draft / "tokenizer.json").read_bytes() == (demo_folder / "tokenizer.json").read_bytes()
    llm = LLM(str(draft))
    assert len(answer(llm, "Hello!")) > 3
    llm.close()
