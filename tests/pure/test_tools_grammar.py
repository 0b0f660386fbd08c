"""Grammars of answers: after a marker, only valid calls are allowed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from answer_grammars import Bytes

from quire.errors import RequestError
from quire.text.answer import AnswerParser, CallArguments, CallStart, Content
from quire.text.reasoning import find_reasoning
from quire.text.tools import FORMATS, OutputFormat
from quire.text.tools.functions import Function, read_functions, warnings_of, widened

FORMAT = {known.name: known("") for known in FORMATS if not known("").whole}
NAMES = list(FORMAT)
MARKS = tuple(
    dict.fromkeys(
        ("<think>", "</think>", *(mark for known in FORMAT.values() for mark in known.tokens if mark))
    )
)
THINK = find_reasoning("", "think")
TEXT, TOKENS = Bytes(), Bytes(MARKS)


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **({} if parameters is None else {"parameters": parameters}), **more}
    return {"type": "function", "function": function}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SUM = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["a", "b"]},
        "numbers": {"type": "array", "items": {"$ref": "#/$defs/number"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["numbers", "unit"],
    "$defs": {"number": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS = [tool("now"), tool("get_weather", CITY), tool("sum.up-2", SUM)]

DEEPSEEK = "<｜tool▁call▁begin｜>%s<｜tool▁call▁end｜>"
IN_BLOCK = DEEPSEEK % "function<｜tool▁sep｜>%s\n```json\n%s\n```"
AFTER_NAME = DEEPSEEK % "%s<｜tool▁sep｜>%s"
KIMI = "<|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s<|tool_call_end|>"
COHERE = '{"tool_call_id": "0", "tool_name": "%s", "parameters": %s}'
COMMAND_R = '{\n"tool_name": "%s",\n"parameters": %s\n}'
# name -> the beginning of calls, a call with %s for its name and arguments, what is between calls, the end
SYNTAX = {
    "hermes": ("", '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "\n", ""),
    "mistral": ("[TOOL_CALLS][", '{"name": "%s", "arguments": %s}', ", ", "]"),
    "mistral_args": ("", "[TOOL_CALLS]%s[ARGS]%s", "", ""),
    "qwen_xml": ("", "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>", "\n", ""),
    "seed_oss": ("", "<seed:tool_call>\n<function=%s>\n%s</function>\n</seed:tool_call>", "\n", ""),
    "llama3_json": ("<|python_tag|>", '{"name": "%s", "parameters": %s}', "; ", ""),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", IN_BLOCK, "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", AFTER_NAME, "", "<｜tool▁calls▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", KIMI, "", "<|tool_calls_section_end|>"),
    "cohere_command3": ("<|START_ACTION|>[\n    ", COHERE, ",\n    ", "\n]<|END_ACTION|>"),
    "command_r": ("Action:\n```json\n[\n", COMMAND_R, ",\n", "\n]```"),
    "glm45": ("", "<tool_call>%s%s</tool_call>", "", ""),
    "minimax_m2": ("<minimax:tool_call>\n", '<invoke name="%s">\n%s</invoke>\n', "", "</minimax:tool_call>"),
    "lfm2": ("<|tool_call_start|>[", "%s(%s)", ", ", "]<|tool_call_end|>"),
    "phi4_mini": ("<|tool_call|>[", '{"name": "%s", "arguments": %s}', ", ", "]<|/tool_call|>"),
    "phi4_mini_json": ("functools[", '{"name": "%s", "arguments": %s}', ", ", "]"),
    "granite": ("<|tool_call|>[", '{"name": "%s", "arguments": %s}', ", ", "]"),
    "pythonic": ("<|python_tag|>[", "%s(%s)", ", ", "]"),
    "gemma4": ("", "<|tool_call>call:%s%s<tool_call|>", "", ""),
    "hunyuan_a13b": ("<tool_calls>[", '{"name": "%s", "arguments": %s}', ", ", "]</tool_calls>"),
    "hunyuan": ("<tool_calls>", "<tool_call>%s\n```json\n%s\n```</tool_call>", "\n", "</tool_calls>"),
    "nemotron_json": ("<TOOLCALL>[", '{"name": "%s", "arguments": %s}', ", ", "]</TOOLCALL>"),
}
PARAMETERS = {  # of the formats that write each by itself
    "qwen_xml": ("<parameter=%s>\n%s", "\n</parameter>", "\n"),
    "seed_oss": ("<parameter=%s>%s", "</parameter>", "\n"),
    "glm45": ("<arg_key>%s</arg_key><arg_value>%s", "</arg_value>", ""),
    "minimax_m2": ('<parameter name="%s">%s', "</parameter>", "\n"),
}
END_OF_TEXT = {name: end for name, (_, end, _) in PARAMETERS.items()} | {
    "lfm2": "'",
    "pythonic": "'",
    "gemma4": '<|"|>',
}


def as_python(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())


def as_gemma(value: Any) -> str:
    """Write a value as Gemma 4 does."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(as_gemma, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_gemma(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


LITERALS: dict[str, Callable[[Any], str]] = {"lfm2": as_python, "pythonic": as_python, "gemma4": as_gemma}


def output_format(name: str, vocabulary: Bytes, think: bool = False) -> OutputFormat:
    return OutputFormat(FORMAT[name], THINK if think else None, vocabulary.ids)


def call(name: str, function: str = "get_weather", arguments: str = '{"city": "Oslo"}') -> str:
    begin, each, _, end = SYNTAX[name]
    return begin + each % (function, spelled(name, arguments)) + end


def spelled(name: str, arguments: str) -> str:
    """Write arguments, given as JSON, in a format."""
    if name in LITERALS:
        return LITERALS[name](json.loads(arguments))
    if name not in PARAMETERS:
        return arguments
    values = json.loads(arguments).items()
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values}
    begin, end, after = PARAMETERS[name]
    return "".join(f"{begin % (key, text)}{end}{after}" for key, text in texts.items())


def calls(name: str, count: int) -> str:
    """Write `count` calls of now()."""
    begin, each, between, end = SYNTAX[name]
    return begin + between.join([each % ("now", spelled(name, "{}"))] * count) + end


both = pytest.mark.parametrize("vocabulary", [TEXT, TOKENS], ids=["text", "tokens"])
each = pytest.mark.parametrize("name", NAMES)


def grammar(name: str, vocabulary: Bytes, *arguments: Any, think: bool = False, **more: Any) -> str:
    made = output_format(name, vocabulary, think).grammar(TOOLS, *arguments, **more)
    assert made is not None
    return made


@both
@each
def test_free_text_then_nothing_but_calls(name: str, vocabulary: Bytes) -> None:
    auto = grammar(name, vocabulary)
    assert vocabulary.allows(auto, "")
    assert vocabulary.allows(auto, "Just words, {and} <tags> [lists].")
    assert vocabulary.allows(auto, call(name))
    assert vocabulary.allows(auto, f"Let me see.\n{call(name)}")
    assert vocabulary.allows(auto, call(name, "now", "{}"))
    assert vocabulary.allows(auto, call(name, "sum.up-2", '{"unit":"a","numbers":[1, 99]}'))
    assert vocabulary.allows(auto, call(name, "sum.up-2", '{"unit": "a", "numbers": [1,99]}'))
    assert not vocabulary.begins(auto, call(name) + "and more")
    marker = call(name).split("{")[0]
    for wrong in ("x", '{"name": "other"', '{"name": "get_weather", "arguments": []', '{"arg'):
        assert not vocabulary.begins(auto, f"So {marker}{wrong}")


@both
def test_a_day_among_arguments_is_one_of_the_calendar(vocabulary: Bytes) -> None:
    parameters = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    tools = [{"type": "function", "function": {"name": "book", "parameters": parameters}}]
    made = output_format("hermes", vocabulary).grammar(tools)
    assert made is not None
    assert vocabulary.allows(made, call("hermes", "book", '{"day": "2024-02-29"}'))
    assert not vocabulary.begins(made, call("hermes", "book", '{"day": "2023-02-29"}'))


@both
@pytest.mark.parametrize("name", ["hermes", *PARAMETERS, *LITERALS])
@pytest.mark.parametrize(
    ("schema", "allowed", "barred"),
    [
        ({"pattern": "^[ab]+$"}, "abba", "abc"),
        ({"pattern": "[0-9]"}, "a 1\n", "a"),
        ({"pattern": "^/(?:\\\\|x\\/)"}, "/\\y", "x/"),
        ({"pattern": "\\\\\\$$"}, "1 \\$", "1$"),
        ({"pattern": "^(?:a\nb)+\\n?$"}, "a\nba\nb\n", "a\nb\na"),
        ({"pattern": r"^(?:[\s\S]+)$"}, "anything <b>\n", ""),
        ({"minLength": 2, "maxLength": 3}, "123", "1"),
        ({"format": "date"}, "2024-02-28", "2024-2-28"),
        ({"enum": ["12", "<b>"]}, "12", "1"),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "12", "123"),
    ],
)
def test_texts_follow_their_schemas(
    name: str, vocabulary: Bytes, schema: Mapping[str, Any], allowed: str, barred: str
) -> None:
    text = schema if "anyOf" in schema else {"type": "string", **schema}
    parameters = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    made = output_format(name, vocabulary).grammar([tool("say", parameters)], "required")
    assert made is not None
    written, other = (call(name, "say", json.dumps({"text": one})) for one in (allowed, barred))
    assert vocabulary.allows(made, written)
    assert not vocabulary.allows(made, other)


@both
@each
def test_arguments_follow_the_schema(name: str, vocabulary: Bytes) -> None:
    made = grammar(name, vocabulary)
    for function, arguments in (
        ("now", '{"a": 1}'),
        ("get_weather", "{}"),
        ("get_weather", '{"city": "Oslo", "more": 1}'),
        ("sum.up-2", '{"unit": "a", "numbers": [100]}'),
        ("sum.up-2", '{"unit": "c", "numbers": [1]}'),
        ("sum.up-2", '{"unit": "a", "numbers": []}'),
    ):
        assert not vocabulary.begins(made, call(name, function, arguments))
    is_text = name in PARAMETERS  # where texts are written as they are
    assert vocabulary.begins(made, call(name, "get_weather", '{"city": 1}')) == is_text


NESTED = {
    "kind": {"enum": ["a", None, True, 2]},
    "at": {"$ref": "#/$defs/place"},
    "tags": {"type": "array", "items": {"type": ["string", "boolean"]}, "minItems": 1, "maxItems": 2},
    "more": {"type": "object", "additionalProperties": {"type": "number"}},
    "any": {},
}
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 9}, "near": {"$ref": "#/$defs/place"}},
}
DEEP = {
    "type": "object",
    "properties": NESTED,
    "required": ["at"],
    "$defs": {"place": PLACE | {"required": ["x"]}},
}


@both
@pytest.mark.parametrize("name", ["hermes", *LITERALS])
def test_nested_values_in_other_notations(name: str, vocabulary: Bytes) -> None:
    known = output_format(name, vocabulary)
    made = known.grammar([tool("f", DEEP)], "required")
    assert made is not None
    for arguments in (
        {"at": {"x": 1}},
        {"kind": "a", "at": {"x": 1, "near": {"x": 2, "near": {"x": 3}}}},
        {"kind": None, "at": {"x": -1}, "tags": ["b", True], "more": {}},
        {"kind": 2, "at": {"x": 1}, "more": {"a": 1.5, "b": -2}, "any": [1, {"a": ["é", None]}]},
        {"kind": True, "at": {"x": 1}, "any": 'a "b" }'},
    ):
        written = call(name, "f", json.dumps(arguments, ensure_ascii=False))
        assert vocabulary.allows(made, written), written
        parser = known.answer_parser([tool("f", DEEP)], "required")
        events = [event for char in written for event in parser.push(char)] + parser.finish()
        read = "".join(event.text for event in events if isinstance(event, CallArguments))
        assert json.loads(read) == arguments
    for arguments in (
        {},
        {"kind": "a", "any": 1},
        {"at": {}},
        {"at": {"x": 10}},
        {"at": {"x": 1, "near": {"x": "1"}}},
        {"at": {"x": 1}, "tags": []},
        {"at": {"x": 1}, "tags": ["a", "b", "c"]},
        {"at": {"x": 1}, "tags": [1]},
        {"at": {"x": 1}, "more": {"a": "b"}},
        {"kind": "b", "at": {"x": 1}},
    ):
        assert not vocabulary.allows(made, call(name, "f", json.dumps(arguments))), arguments


@both
@each
def test_a_call_that_is_required_comes_at_once(name: str, vocabulary: Bytes) -> None:
    required = grammar(name, vocabulary, "required")
    assert vocabulary.allows(required, call(name))
    assert vocabulary.allows(required, calls(name, 3))
    for wrong in ("", "Well, ", " "):
        assert not vocabulary.allows(required, wrong)


@both
@each
def test_a_call_that_is_named(name: str, vocabulary: Bytes) -> None:
    named = grammar(name, vocabulary, {"type": "function", "function": {"name": "get_weather"}})
    assert vocabulary.allows(named, call(name))
    assert not vocabulary.allows(named, call(name, "now", "{}"))
    assert not vocabulary.allows(named, "")


@both
@each
def test_no_call_where_none_is_to_be(name: str, vocabulary: Bytes) -> None:
    none = grammar(name, vocabulary, "none")
    assert vocabulary.allows(none, "Words, <tags> and {braces}.")
    assert not vocabulary.begins(none, FORMAT[name].marker + "x")


@pytest.mark.parametrize("name", [name for name in NAMES if FORMAT[name].marker in MARKS])
def test_a_marker_that_is_a_token_cannot_be_spelled(name: str) -> None:
    marker = FORMAT[name].marker
    for choice in ("auto", "none", "required"):
        matcher = TOKENS.matcher(grammar(name, TOKENS, choice))
        assert matcher.validate_tokens(list(marker.encode())) < len(marker.encode())


@both
@each
def test_the_number_of_calls(name: str, vocabulary: Bytes) -> None:
    assert vocabulary.allows(grammar(name, vocabulary), calls(name, 128))
    assert not vocabulary.allows(grammar(name, vocabulary), calls(name, 129))
    for choice in ("auto", "required"):
        one = grammar(name, vocabulary, choice, False)
        assert vocabulary.allows(one, calls(name, 1))
        assert not vocabulary.allows(one, calls(name, 2))


@both
def test_llama_needs_no_marker(vocabulary: Bytes) -> None:
    bare = call("llama3_json").removeprefix("<|python_tag|>")
    auto = grammar("llama3_json", vocabulary)
    assert vocabulary.allows(auto, bare)
    assert vocabulary.allows(grammar("llama3_json", vocabulary, "required"), bare)
    for wrong in ("{}", '\n {"a": 1}', '{"name": "x'):
        assert not vocabulary.begins(auto, wrong)
    assert vocabulary.allows(grammar("llama3_json", vocabulary, "none"), '{"a": 1}')


@both
def test_pythonic_calls_need_no_marker(vocabulary: Bytes) -> None:
    bare = call("pythonic").removeprefix("<|python_tag|>")
    auto = grammar("pythonic", vocabulary)
    assert vocabulary.allows(auto, bare)
    assert vocabulary.allows(grammar("pythonic", vocabulary, "required"), bare)
    assert vocabulary.allows(auto, "See [the list](x).")
    for wrong in ("[]", "\n [1, 2]", '[now(), {"name": '):
        assert not vocabulary.begins(auto, wrong)
    assert vocabulary.allows(grammar("pythonic", vocabulary, "none"), "[1, 2]")


@both
def test_hermes_2_writes_arguments_first(vocabulary: Bytes) -> None:
    hermes = FORMATS[0]('{"arguments": <args-dict>, "name": <function-name>}')
    made = OutputFormat(hermes, None, vocabulary.ids).grammar(TOOLS, "required")
    assert made is not None
    right = '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "get_weather"}\n</tool_call>'
    assert vocabulary.allows(made, right)
    assert not vocabulary.allows(made, right.replace("get_weather", "now"))
    assert not vocabulary.allows(made, call("hermes"))


@both
@each
def test_reasoning_comes_first(name: str, vocabulary: Bytes) -> None:
    thoughts = "<think>\nHm, {so} <tool.\n</think>\n\n"
    for choice in ("auto", "required"):
        made = grammar(name, vocabulary, choice, think=True)
        assert vocabulary.allows(made, thoughts + call(name))
        assert vocabulary.allows(made, call(name))
        assert not vocabulary.begins(made, thoughts + "<think>again")
        assert not vocabulary.allows(made, "<think>without an end")
    assert vocabulary.allows(grammar(name, vocabulary, think=True), thoughts + "Just words.")
    assert vocabulary.allows(grammar(name, vocabulary, "none", think=True), thoughts + "Just words.")


@each
def test_a_mark_of_thought_that_is_a_token_cannot_be_spelled(name: str) -> None:
    matcher = TOKENS.matcher(grammar(name, TOKENS, think=True))
    assert matcher.validate_tokens(list(b"<think>")) < len("<think>")
    assert matcher.consume_tokens(TOKENS.encode("<think>So"))
    assert matcher.validate_tokens(list(b"</think>")) < len("</think>")


@both
@each
def test_reasoning_that_the_prompt_opened(name: str, vocabulary: Bytes) -> None:
    made = grammar(name, vocabulary, "required", think=True, prompt="<|assistant|><think>\n")
    assert vocabulary.allows(made, f"Hm.\n</think>{call(name)}")
    assert not vocabulary.allows(made, call(name))
    closed = grammar(name, vocabulary, "required", think=True, prompt="<think>\n\n</think>\n\n")
    assert vocabulary.allows(closed, call(name))
    assert not vocabulary.begins(closed, "<think>")


@both
@each
def test_content_that_follows_a_grammar(name: str, vocabulary: Bytes) -> None:
    content = 'start: "yes" | "no"'
    schema = " " + json.dumps({"grammars": [{"json_schema": {"enum": ["yes", "no"]}}]})
    made = grammar(name, vocabulary, content=content)
    assert vocabulary.allows(made, "yes")
    assert vocabulary.allows(made, call(name))
    assert not vocabulary.begins(made, "perhaps")
    assert vocabulary.allows(grammar(name, vocabulary, content=schema), '"no"')
    assert vocabulary.allows(grammar(name, vocabulary, "none", content=content), "yes")
    assert not vocabulary.allows(grammar(name, vocabulary, "required", content=content), "yes")
    thinking = output_format(name, vocabulary, think=True).grammar(None, content=content)
    assert thinking is not None
    assert vocabulary.allows(thinking, "<think>Hm.</think>\n\nyes")
    assert vocabulary.allows(thinking, "no")


@both
def test_glm_up_to_4_6_has_a_line_for_each_tag(vocabulary: Bytes) -> None:
    older = FORMATS[NAMES.index("glm45")]("<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>")
    made = OutputFormat(older, None, vocabulary.ids).grammar(TOOLS, "required")
    assert made is not None
    lines = "get_weather", "<arg_key>city</arg_key>", "<arg_value>Oslo</arg_value>", "</tool_call>"
    assert vocabulary.allows(made, "<tool_call>" + "\n".join(lines))
    assert not vocabulary.allows(made, call("glm45"))


@pytest.mark.parametrize("spelled", [True, False])
def test_marks_around_the_text_come_in_pairs(spelled: bool) -> None:
    cohere = find_reasoning("", "cohere")
    found = OutputFormat(FORMAT["cohere_command3"], cohere, {})
    vocabulary = Bytes(() if spelled else found.marks)
    made = replace(found, token_ids=vocabulary.ids).grammar(TOOLS)
    assert made is not None
    thought = "<|START_THINKING|>Hm.<|END_THINKING|>"
    for mark in ("RESPONSE", "TEXT"):
        assert vocabulary.allows(made, f"{thought}<|START_{mark}|>Yes.<|END_{mark}|>")
    assert vocabulary.allows(made, f"{thought}Yes.")
    assert vocabulary.allows(made, f"{thought}{call('cohere_command3')}")
    assert spelled or not vocabulary.begins(made, "<|START_TEXT|>Yes.<|END_RESPONSE|>")


def test_without_tools_an_answer_is_free() -> None:
    assert output_format("hermes", TEXT, think=True).grammar(None) is None
    assert OutputFormat(None, None, {}).grammar(TOOLS, "none") is None


@both
@each
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_whatever_is_written_can_be_read(name: str, vocabulary: Bytes, choice: str) -> None:
    made = grammar(name, vocabulary, choice, think=True)
    begin = "<think>Hm.</think>" + (f"So: {FORMAT[name].marker}" if choice == "auto" else "")
    for seed in range(10):
        text = vocabulary.write(made, begin, random.Random(seed), end_of_text=END_OF_TEXT.get(name, ""))
        parser: AnswerParser = output_format(name, vocabulary, think=True).answer_parser(TOOLS, choice)
        events = [event for char in text for event in parser.push(char)] + parser.finish()
        arguments = dict.fromkeys((e.index for e in events if isinstance(e, CallStart)), "")
        for event in events:
            if isinstance(event, CallArguments):
                arguments[event.index] += event.text
        assert all(isinstance(json.loads(text), dict) for text in arguments.values())
        assert arguments
        content = "".join(event.text for event in events if isinstance(event, Content))
        assert content == ("So:" if choice == "auto" else "")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("tools", "tools"),
        ([tool("a")] * 600, "tools"),
        ([tool("a"), "b"], "tools[1]"),
        ([{"type": "web_search"}], "tools[0]"),
        ([{"type": "function", "name": "a"}], "tools[0]"),
        ([tool("a"), tool("a")], "tools[1].function.name"),
        ([tool("with space")], "tools[0].function.name"),
        ([tool("x" * 129)], "tools[0].function.name"),
        ([tool("")], "tools[0].function.name"),
        ([tool("a\n")], "tools[0].function.name"),
        ([tool("a", description=1)], "tools[0].function.description"),
        ([tool("a", [])], "tools[0].function.parameters"),
        ([tool("a", {"type": "array"})], "tools[0].function.parameters"),
    ],
)
def test_malformed_tools_are_named(tools: Any, param: str) -> None:
    for ask in (output_format("hermes", TEXT).grammar, output_format("hermes", TEXT).answer_parser):
        with pytest.raises(RequestError) as error:
            ask(tools)
        assert error.value.param == param


@pytest.mark.parametrize("choice", ["any", 1, {}, {"type": "function"}, {"function": {"name": "other"}}])
def test_an_unknown_choice_is_refused(choice: Any) -> None:
    with pytest.raises(RequestError) as error:
        output_format("hermes", TEXT).grammar(TOOLS, choice)
    assert error.value.param == "tool_choice"


def test_tools_need_a_format() -> None:
    with pytest.raises(RequestError, match="no known format"):
        OutputFormat(None, None, {}).grammar(TOOLS)
    with pytest.raises(RequestError, match="needs tools"):
        output_format("hermes", TEXT).grammar(None, "required")


def test_tools_that_are_too_much() -> None:
    huge = [tool("a", {"type": "object", "properties": {}, "description": "x" * (1 << 20)})]
    with pytest.raises(RequestError, match="fewer"):
        output_format("hermes", TEXT).grammar(huge)


@pytest.mark.parametrize("strict", [True, False])
def test_keywords_that_no_grammar_knows(strict: bool) -> None:
    """Refused in a strict schema, dropped in others."""
    odd: Mapping[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    made = output_format("hermes", TEXT).grammar([tool("f", odd, strict=strict)], "required")
    assert made is not None
    if strict:
        with pytest.raises(AssertionError, match="uniqueItems"):
            TEXT.matcher(made)
    else:
        assert TEXT.allows(made, call("hermes", "f", '{"a": [1]}'))


def refuse_references(function: Function) -> None:
    if '"$ref"' in json.dumps(function.schema):
        raise RequestError("structured_outputs.json: it refers to nothing", None, "structured_outputs")


def test_the_tool_whose_schema_is_refused_is_named() -> None:
    functions = read_functions([*TOOLS[:2], tool("f", {"$ref": "#/$defs/lost"}, strict=True)])
    with pytest.raises(RequestError) as caught:
        widened(functions, refuse_references)
    assert caught.value.message == "tools[2].function.parameters cannot be enforced: it refers to nothing"
    assert caught.value.param == "tools[2].function.parameters"
    assert widened(functions[:2], refuse_references) == functions[:2]


def test_a_tool_that_is_not_strict_is_widened_instead() -> None:
    lists = {"type": "array", "items": {"$ref": "#/$defs/a"}}
    odd = {"properties": {"a": lists, "b": {"type": "string"}}, "required": ["b"], "$defs": {"a": {}}}
    functions = read_functions([tool("now"), tool("f", odd)])
    first, second = widened(functions, refuse_references)
    assert first == functions[0]
    assert second.schema["properties"] == {"a": {"type": "array"}, "b": {"type": "string"}}
    said = "only the names and types of its parameters are enforced: it refers to nothing"
    assert list(warnings_of((first, second))) == [f"tool f: {said}"]
    made = output_format("hermes", TEXT).grammar((first, second), "required")
    assert made is not None
    assert TEXT.allows(made, call("hermes", "f", '{"b": "x"}'))
    assert not TEXT.allows(made, call("hermes", "f", "{}"))


def test_names_are_as_long_as_the_interfaces_allow() -> None:
    name = "mcp__" + "x" * 123
    for known in NAMES:
        made = output_format(known, TEXT).grammar([tool(name)], "required")
        assert made is not None
        assert TEXT.allows(made, call(known, name, "{}"))
        parser = output_format(known, TEXT).answer_parser([tool(name)], "required")
        events = parser.push(call(known, name, "{}")) + parser.finish()
        assert [event.name for event in events if isinstance(event, CallStart)] == [name]


def test_open_parameters_stay_open() -> None:
    for schema in ({"type": "object"}, {}, {"properties": {}, "additionalProperties": {"type": "integer"}}):
        made = output_format("hermes", TEXT).grammar([tool("f", schema)], "required")
        assert made is not None
        assert TEXT.allows(made, call("hermes", "f", '{"a": 1}'))


def test_properties_that_are_no_object_are_refused_where_the_format_looks_at_them() -> None:
    with pytest.raises(RequestError) as caught:
        output_format("qwen_xml", TEXT).grammar(
            [tool("a", {"type": "object", "properties": []}, strict=True)]
        )
    assert caught.value.param == "tools"
    odd = tool("a", {"properties": {"b": True}, "required": 5}, strict=True)
    assert output_format("qwen_xml", TEXT).grammar([odd])
