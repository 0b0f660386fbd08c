"""Tool calls of the demo model: valid whatever it samples, and, left to itself, what it was taught."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from constrained import verify_all

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.outputs import CompletionOutput
from quire.text.answer import CallArguments, CallStart, Content, Event
from quire.text.tools import OutputFormat, output_format_of


def tool(name: str, description: str = "", **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TEXT, NUMBER = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 999}
DAYS = {"type": "array", "items": {"enum": ["Monday", "Friday"]}, "minItems": 1, "maxItems": 2}
PLACE = {"type": "object", "properties": {"lat": NUMBER, "lon": NUMBER}, "required": ["lat", "lon"]}
PLACE |= {"additionalProperties": False}
WEATHER = tool("get_weather", "Tells the weather in a city.", city=TEXT)

TOOL_SETS = {
    "one": [WEATHER],
    "none taken": [{"type": "function", "function": {"name": "stop.now"}}],
    "several": [WEATHER, tool("set_timer", "Sets a timer.", minutes=NUMBER), tool("add", a=NUMBER, b=NUMBER)],
    "nested": [tool("plan", "Plans trips.", days=DAYS, place=PLACE, really={"type": "boolean"})],
}
ASKED = ["What is the weather in Oslo?", "Set a timer for 5 minutes.", "Tell me a story."]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with contextlib.closing(LLM("demo", max_model_len=1024, max_num_seqs=16)) as model:
        yield model


@pytest.fixture(scope="module")
def output_format(llm: LLM) -> OutputFormat:
    return output_format_of(llm.frontend.chat_template.templates, llm.get_tokenizer())


def params(grammar: str | None, **more: Any) -> SamplingParams:
    structured = StructuredOutputsParams(grammar=grammar) if grammar else None
    return SamplingParams(structured_outputs=structured, **({"max_tokens": 400} | more))


def ask(
    llm: LLM, output_format: OutputFormat, tools: Any, text: str, choice: Any, **more: Any
) -> list[CompletionOutput]:
    prompt = llm.frontend.encode_chat([{"role": "user", "content": text}], tools)
    grammar = output_format.grammar(tools, choice, prompt=prompt.text or "")
    return llm.generate([prompt], params(grammar, **more), use_tqdm=False)[0].outputs


def read(output_format: OutputFormat, tools: Any, text: str) -> tuple[list[tuple[str, Any]], list[Event]]:
    """The calls of an answer, read in small pieces: names with arguments; and all events."""
    parser = output_format.answer_parser(tools)
    events = [event for at in range(0, len(text), 3) for event in parser.push(text[at : at + 3])]
    events += parser.finish()
    calls = [[event.name, ""] for event in events if isinstance(event, CallStart)]
    for event in events:
        if isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls], events


def check(value: Any, schema: dict[str, Any]) -> None:
    """The few keywords that these schemas use."""
    kind = {"string": str, "integer": int, "array": list, "object": dict, "boolean": bool}.get(
        schema.get("type", "")
    )
    assert kind is None or type(value) is kind
    assert value in schema.get("enum", [value])
    if kind is int:
        assert 0 <= value <= 999
    if kind is list:
        assert 1 <= len(value) <= 2
        for item in value:
            check(item, schema["items"])
    if kind is dict:
        assert list(value) == list(schema["properties"])
        for name, inner in schema["properties"].items():
            check(value[name], inner)


@pytest.mark.parametrize("name", TOOL_SETS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.8])
def test_a_required_call_is_always_valid(
    llm: LLM, output_format: OutputFormat, name: str, temperature: float
) -> None:
    tools = TOOL_SETS[name]
    schemas = {
        t["function"]["name"]: t["function"].get("parameters", {"type": "object", "properties": {}})
        for t in tools
    }
    for text in ASKED:
        how = {"temperature": temperature, "seed": 7, "n": 1 if temperature == 0 else 6}
        for output in ask(llm, output_format, tools, text, "required", **how):
            assert output.finish_reason == "stop"
            calls, events = read(output_format, tools, output.text)
            assert calls
            assert not any(isinstance(event, Content) for event in events)
            for function, arguments in calls:
                check(arguments, schemas[function])


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with contextlib.closing(LLM("demo", max_model_len=1024, max_num_seqs=16, speculative="off")) as model:
        yield model


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_drafts_change_no_call(
    llm: LLM, plain: LLM, output_format: OutputFormat, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of the grammar nor those of the conversation, which lists the tools."""
    monkeypatch.setattr("quire.engine.speculation.choose_lengths", verify_all)
    prompts, each = [], []
    for (name, tools), text in itertools.product(TOOL_SETS.items(), ASKED[:2]):
        prompts.append(llm.frontend.encode_chat([{"role": "user", "content": text}], tools))
        grammar = output_format.grammar(tools, choice, prompt=prompts[-1].text or "")
        each.append(params(grammar, temperature=0.9, seed=len(name), logprobs=1, max_tokens=100))
    found, expected = (
        [output.outputs[0] for output in model.generate(prompts, each, use_tqdm=False)]
        for model in (llm, plain)
    )
    assert [(one.token_ids, one.logprobs) for one in found] == [
        (one.token_ids, one.logprobs) for one in expected
    ]
    assert sum(one.metrics.num_accepted for one in found if one.metrics is not None) > 50


def test_a_named_call(llm: LLM, output_format: OutputFormat) -> None:
    tools = TOOL_SETS["several"]
    choice = {"type": "function", "function": {"name": "add"}}
    (output,) = ask(llm, output_format, tools, ASKED[0], choice, temperature=0.0)
    calls, _ = read(output_format, tools, output.text)
    assert {name for name, _ in calls} == {"add"}


def test_a_call_of_its_own_accord(llm: LLM, output_format: OutputFormat) -> None:
    """The grammar does not change what the model was trained to write."""
    (output,) = ask(llm, output_format, TOOL_SETS["one"], ASKED[0], "auto", temperature=0.0)
    assert read(output_format, TOOL_SETS["one"], output.text)[0] == [("get_weather", {"city": "Oslo"})]
    prompt = llm.frontend.encode_chat([{"role": "user", "content": ASKED[0]}], TOOL_SETS["one"])
    (free,) = llm.generate([prompt], params(None, temperature=0.0), use_tqdm=False)[0].outputs
    assert free.token_ids == output.token_ids


def test_no_call_where_none_is_to_be(llm: LLM, output_format: OutputFormat) -> None:
    (output,) = ask(llm, output_format, TOOL_SETS["one"], ASKED[0], "none", temperature=0.0, max_tokens=40)
    assert "<tool_call>" not in output.text
    assert not set(output.token_ids) & set(output_format.token_ids.values())


def test_a_call_cut_short_is_streamed_as_far_as_it_came(llm: LLM, output_format: OutputFormat) -> None:
    (output,) = ask(
        llm, output_format, TOOL_SETS["one"], ASKED[0], "required", temperature=0.0, max_tokens=14
    )
    assert output.finish_reason == "length"
    parser = output_format.answer_parser(TOOL_SETS["one"])
    start, arguments = parser.push(output.text) + parser.finish()
    assert isinstance(start, CallStart)
    assert isinstance(arguments, CallArguments)
    assert output.text.endswith(arguments.text)
