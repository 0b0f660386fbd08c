"""Parsing of answers: events do not depend on the chunks, and no character is lost."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.answer import AnswerParser, CallArguments, CallStart, Content, Event, Reasoning
from quire.text.reasoning import find_reasoning
from quire.text.tools import FORMATS
from quire.text.tools.format import ToolFormat
from quire.text.tools.functions import Function
from quire.text.tools.phi4 import Phi4Mini
from quire.text.tools.pythonic import LlamaPythonic

THINK, COHERE = find_reasoning("", "think"), find_reasoning("", "cohere")
FORMAT = {known.name: known("") for known in FORMATS}
HERMES, MISTRAL, LLAMA = FORMAT["hermes"], FORMAT["mistral"], FORMAT["llama3_json"]
LLAMA_4 = LlamaPythonic("<|header_start|>")
MISTRAL_ARGS, QWEN_XML = FORMAT["mistral_args"], FORMAT["qwen_xml"]
FUNCTIONS = [Function("f", {}), Function("get_weather", {})]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'

Story = list[tuple[str, ...]]


def parser(tools: ToolFormat | None = HERMES, think: bool = False, inside: bool = False) -> AnswerParser:
    reader = tools.reader(FUNCTIONS) if tools else None
    return AnswerParser(THINK if think or inside else None, inside, reader)


def read(parser: AnswerParser, pieces: Iterable[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def story(events: Sequence[Event]) -> Story:
    """Return events without ids, with adjacent ones of a kind joined."""
    joined: Story = []
    for event in events:
        kind = type(event).__name__
        match event:
            case CallStart(index, _, name):
                joined.append((kind, str(index), name))
            case CallArguments(index, text) if joined[-1][:2] == (kind, str(index)):
                joined[-1] = (kind, str(index), joined[-1][2] + text)
            case CallArguments(index, text):
                joined.append((kind, str(index), text))
            case _ if joined and joined[-1][0] == kind:
                joined[-1] = (kind, joined[-1][1] + event.text)
            case _:
                joined.append((kind, event.text))
    return joined


def told(text: str, *arguments: object, **more: bool) -> Story:
    return story(read(parser(*arguments, **more), [text]))  # type: ignore[arg-type]


def called(index: int, name: str, arguments: str) -> Story:
    return [("CallStart", str(index), name), ("CallArguments", str(index), arguments)]


PIECES = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"),
            *("<think", "</", "<tool", "_call>", "[TOOL", "<|py", "thon_tag|>", "<", "[", "]", "{", "}", ";"),
            *('"', "\\", ",", ":", '"name"', '"arguments"', '"parameters"', '"id"', '"f"', '"get_weather"'),
            *('{"name": "f", "arguments": {"a": 1}}', '{"a": "}"}', '{"parameters": {}, "name": "f"}', CALL),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"),
            *("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}"),
            *("<|tool_call_end|>", "<|START_ACTION|>[", "]<|END_ACTION|>", "Action:\n```json", "```"),
            *("<tool_call>f<arg_key>a</arg_key>", "<arg_value>1</arg_value>", "<minimax:tool_call>"),
            *(
                "<|tool_call_start|>[",
                "f(a='x', b=[True])",
                "]<|tool_call_end|>",
                "<|tool_call>call:",
                "f{a:1}",
            ),
            *('<|tool_call>call:f{a:<|"|>x<|"|>', "}<tool_call|>", "(", ")", "=", "'"),
            *('<invoke name="f">', '<parameter name="a">1</parameter>', "</invoke>", "<TOOLCALL>["),
            *("functools[", "<|tool_call|>", "<|/tool_call|>"),
            *("<tool_calls>", "<tool_call>f\n```json\n{}\n```</tool_call>", "</tool_calls>", "</answer>"),
            *("f", "[ARGS]", "[CALL_ID]", "word", " ", "\n", "\t", "é"),
        ]
    ),
    max_size=14,
).map("".join)


@given(PIECES, st.lists(st.integers(0, 80)), st.sampled_from([*FORMAT.values(), None]), st.integers(0, 2))
def test_events_do_not_depend_on_chunks(
    text: str, cuts: list[int], tools: ToolFormat | None, reasoning: int
) -> None:
    how = {"think": reasoning == 1, "inside": reasoning == 2}
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    whole = told(text, tools, **how)
    assert story(read(parser(tools, **how), pieces)) == whole
    assert story(read(parser(tools, **how), text)) == whole  # character by character


@given(PIECES)
def test_without_marks_nothing_is_changed(text: str) -> None:
    assert "".join(event.text for event in read(parser(None), text) if isinstance(event, Content)) == text


@given(
    PIECES.map(lambda text: re.sub(r"f[({]|\[ARGS\]", "", text.replace('"name"', '"nom"').replace(CALL, ""))),
    st.sampled_from([*FORMAT.values()]),
)
def test_what_is_not_a_call_is_content_character_for_character(text: str, tools: ToolFormat) -> None:
    assert told(text, tools) == ([("Content", text)] if text else [])


def test_reasoning_content_and_calls() -> None:
    text = f"<think>\nHm, so.\n</think>\n\nLet me see.\n{CALL}\n{CALL}\n"
    expected = [("Reasoning", "Hm, so."), ("Content", "Let me see.")]
    expected += called(0, "f", '{"a": "x"}') + called(1, "f", '{"a": "x"}')  # type: ignore[arg-type]
    assert told(text, HERMES, think=True) == expected


@pytest.mark.parametrize("opening", ["", "\n", "<think>", "<think>\n"])
def test_a_prompt_that_opens_the_reasoning(opening: str) -> None:
    assert told(f"{opening}Hm.</think>Yes", inside=True) == [("Reasoning", "Hm."), ("Content", "Yes")]


@pytest.mark.parametrize("step", [1, 7, 100])
@pytest.mark.parametrize("mark", ["RESPONSE", "TEXT"])
def test_marks_around_the_text_are_left_out(mark: str, step: int) -> None:
    written = f"<|START_THINKING|>Hm.<|END_THINKING|><|START_{mark}|>Yes <|START<|END_{mark}|>"
    assert COHERE is not None
    reading = AnswerParser(COHERE, False, None, COHERE.wrapping)
    told = story(read(reading, (written[at : at + step] for at in range(0, len(written), step))))
    assert told == [("Reasoning", "Hm."), ("Content", "Yes <|START")]


@pytest.mark.parametrize("step", [1, 7, 100])
@pytest.mark.parametrize("tools", ["hunyuan_a13b", None])
def test_white_space_around_the_marks_of_an_answer_is_left_out(tools: str | None, step: int) -> None:
    hunyuan = find_reasoning("", "hunyuan_a13b")
    assert hunyuan is not None
    written = "<think>\nHm.\n</think>\n<answer>\n Yes.\n\nNo. \n</answer>\n"
    reader = FORMAT[tools].reader(FUNCTIONS) if tools else None
    reading = AnswerParser(hunyuan, False, reader, hunyuan.wrapping)
    told = story(read(reading, (written[at : at + step] for at in range(0, len(written), step))))
    assert told == [("Reasoning", "Hm."), ("Content", "Yes.\n\nNo.")]


@pytest.mark.parametrize("step", [1, 7, 100])
def test_calls_between_the_marks_of_an_answer(step: int) -> None:
    hunyuan = find_reasoning("", "hunyuan_a13b")
    assert hunyuan is not None
    written = '<answer>\n<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>\n</answer>'
    reading = AnswerParser(hunyuan, False, FORMAT["hunyuan_a13b"].reader(FUNCTIONS), hunyuan.wrapping)
    told = story(read(reading, (written[at : at + step] for at in range(0, len(written), step))))
    assert told == called(0, "f", "{}")


def test_reasoning_that_never_ends() -> None:
    assert told("<think>So </thi", think=True) == [("Reasoning", "So </thi")]
    assert told("<thi", think=True) == [("Content", "<thi")]
    assert told("<thi", inside=True) == [("Reasoning", "<thi")]


def test_reasoning_is_only_at_the_beginning() -> None:
    assert told("a <think>b</think>", think=True) == [("Content", "a <think>b</think>")]


def test_calls_within_reasoning_are_thoughts() -> None:
    assert told(f"<think>{CALL}</think>", think=True) == [("Reasoning", CALL)]


@pytest.mark.parametrize(
    ("tools", "first", "second"),
    [
        (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool_call>', CALL),
        (HERMES, '<tool_call>\n{ "arguments": {}, "name": "f"}\n</tool_call> ', CALL),
        (HERMES, '<tool_call>{"parameters": {},"name":"f"}</tool_call>', CALL[:-1]),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "ab"}, ',
            '{"name": "f", "arguments": %s}]',
        ),
        (MISTRAL, '[TOOL_CALLS][{"name":"f"},', '{"id": "x", "arguments": %s, "name": "f"}]'),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f[ARGS]%s"),
        (MISTRAL_ARGS, "[TOOL_CALLS] f[CALL_ID]abc[ARGS] {}\n", "[TOOL_CALLS]f[ARGS]%s\n"),
        (LLAMA, '{"name": "f", "parameters": {}}; ', '{"name": "f", "parameters": %s}'),
        (LLAMA, '<|python_tag|>{"type": "function", "name": "f"};', '{"name": "f", "parameters": %s}'),
        (
            FORMAT["deepseek_v3"],
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\n",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n%s\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            FORMAT["deepseek_v31"],
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            FORMAT["kimi_k2"],
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
            "<|tool_call_end|><|tool_call_begin|>f:1 <|tool_call_argument_begin|> %s<|tool_call_end|>",
        ),
        (
            FORMAT["cohere_command3"],
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {}},',
            '{"tool_name": "f", "parameters": %s}\n]<|END_ACTION|>',
        ),
        (
            FORMAT["command_r"],
            'Action:\n```json\n[\n    {\n        "tool_name": "f",\n        "parameters": {}\n    },',
            '{"tool_name": "f", "parameters": %s}]```',
        ),
        (
            FORMAT["seed_oss"],
            "<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>\n",
            "<seed:tool_call><function=f><parameter=a>x</parameter></function></seed:tool_call>",
        ),
        (
            FORMAT["glm45"],
            "<tool_call>f</tool_call>",
            "\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        ),
        (
            FORMAT["minimax_m2"],
            '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n',
            '<invoke name="f">\n<parameter name="a">x</parameter>\n</invoke>\n</minimax:tool_call>',
        ),
        (
            FORMAT["hunyuan_a13b"],
            '<tool_calls>[{"name": "f", "arguments": {}},\n',
            '{"name": "f", "arguments": %s}]</tool_calls>',
        ),
        (
            FORMAT["hunyuan"],
            "<tool_calls>\n<tool_call>f\n```json\n{}\n```</tool_call>",
            "\n<tool_call>f \n```json\n%s\n```\n</tool_call>\n</tool_calls>",
        ),
        (FORMAT["lfm2"], "<|tool_call_start|>[f(), ", "f( a = 'x' )]<|tool_call_end|>"),
        (
            FORMAT["phi4_mini"],
            '<|tool_call|>[{"name": "f", "arguments": {}},',
            '{"name": "f", "arguments": %s}]<|/tool_call|>',
        ),
        (
            Phi4Mini("<|tool_call|>{"),
            '<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>',
            '<|tool_call|>{"name": "f", "arguments": %s} <|/tool_call|>',
        ),
        (
            FORMAT["phi4_mini_json"],
            'functools[{"name": "f", "arguments": {}}, ',
            '{"name": "f", "arguments": %s}]',
        ),
        (
            FORMAT["granite"],
            '<|tool_call|> [{"name": "f", "arguments": {}},\n',
            '{"arguments": %s, "name": "f"}]',
        ),
        (FORMAT["pythonic"], "[f(),", " f(a='x')]"),
        (FORMAT["pythonic"], "<|python_tag|>[f(),", 'f(a="x")]'),
        (LLAMA_4, "<|python_start|>[f(), ", "f(a='x') ] <|python_end|>"),
        (LLAMA_4, "[f(), ", "f(a='x')]"),
        (
            FORMAT["gemma4"],
            "<|tool_call>call:f{}<tool_call|>",
            '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>',
        ),
        (
            FORMAT["nemotron_json"],
            '<TOOLCALL>[{"name": "f", "arguments": {}}, ',
            '{"name": "f", "arguments": %s}]</TOOLCALL>',
        ),
    ],
)
def test_each_format_with_two_calls(tools: ToolFormat, first: str, second: str) -> None:
    arguments = '{"a": "x"}'
    expected = called(0, "f", "{}") + called(1, "f", arguments)
    assert told(first + second.replace("%s", arguments), tools) == expected


@pytest.mark.parametrize("tools", [FORMAT["pythonic"], LLAMA_4])
@pytest.mark.parametrize("text", ["[1] of 2", "[a](b)", "[]", "[g(a=1)]", "[f"])
def test_text_that_begins_as_pythonic_calls_do(tools: ToolFormat, text: str) -> None:
    assert told(text, tools) == [("Content", text)]


@pytest.mark.parametrize("step", [1, 100])
def test_text_after_calls_without_a_mark_at_their_end(step: int) -> None:
    written = "[f()] There.<|python_end"
    pieces = (written[at : at + step] for at in range(0, len(written), step))
    assert story(read(parser(LLAMA_4), pieces)) == [*called(0, "f", "{}"), ("Content", "There.<|python_end")]


def test_arguments_are_streamed_as_they_come() -> None:
    reading = parser()
    assert reading.push('<tool_call>\n{"name": "f", "arguments": ') == []
    start, *first = reading.push('{"a": [1')
    assert isinstance(start, CallStart)
    assert first == [CallArguments(0, '{"a": [1')]
    assert reading.push(", 2") == [CallArguments(0, ", 2")]
    assert reading.has_calls
    assert reading.is_within_call
    reading.push("]}")
    assert not reading.is_within_call


def test_only_what_may_be_a_marker_is_held_back() -> None:
    reading = parser()
    assert reading.push("a <b> <tool") == [Content("a <b>")]
    assert reading.push(" box\n\n") == [Content(" <tool box")]
    assert reading.push("x") == [Content("\n\nx")]


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>",
        "<tool_call>\nf(x)</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "more": {}}</tool_call>',
        '<tool_call>{"name": __import__("os").system("x")}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        f'<tool_call>{{"name": "{"f" * 1000}", "arguments": {{}}}}</tool_call>',
        f'<tool_call>{{"arguments": {"[" * 10}, "name": "f"}}',
    ],
)
def test_a_malformed_call_is_content(broken: str) -> None:
    assert told(f"So: \n{broken} and on") == [("Content", f"So: \n{broken} and on")]
    assert told(f"{broken}{CALL}")[0] == ("Content", broken)
    assert told(f"{broken}{CALL}")[1:] == called(0, "f", '{"a": "x"}')


PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "array"},
    "any": {},
    "named": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "choice": {"enum": ["1", 2]},
    "code": {"$ref": "#/$defs/code"},
}
PLACE = Function("f", {"properties": PROPERTIES, "$defs": {"code": {"type": "string"}}})
XML = "<tool_call>\n<function=f>\n%s</function>\n</tool_call>"


def told_xml(text: str, step: int) -> Story:
    pieces = (text[at : at + step] for at in range(0, len(text), step))
    return story(read(AnswerParser(None, False, QWEN_XML.reader([PLACE])), pieces))


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", {}),
        ("<parameter=city>\nOslo\n</parameter>\n", {"city": "Oslo"}),
        ("<parameter=city>\n\n</parameter>\n", {"city": ""}),
        ("<parameter=city>\n1\n</parameter>\n", {"city": "1"}),
        (
            '<parameter=city>\n"a"\\\n\n</p>\n</parameter\n</parameter>\n',
            {"city": '"a"\\\n\n</p>\n</parameter'},
        ),
        (
            "<parameter=days>\n[1, {}]\n</parameter>\n<parameter=city>\nŁódź\n</parameter>\n",
            {"days": [1, {}], "city": "Łódź"},
        ),
        ("<parameter=any>\nTrue\n</parameter>\n", {"any": True}),
        ("<parameter=any>\n NaN\n</parameter>\n", {"any": " NaN"}),
        ("<parameter=any>\n[Oslo]\n</parameter>\n", {"any": "[Oslo]"}),
        ("<parameter=more>\n1.5\n</parameter>\n", {"more": 1.5}),
        ("<parameter=named>\n123\n</parameter>\n", {"named": "123"}),
        ("<parameter=named>\nnull\n</parameter>\n", {"named": None}),
        ("<parameter=either>\n123\n</parameter>\n", {"either": 123}),
        ("<parameter=either>\n1 2\n</parameter>\n", {"either": "1 2"}),
        ("<parameter=choice>\n2\n</parameter>\n", {"choice": 2}),
        ("<parameter=choice>\n1\n</parameter>\n", {"choice": "1"}),
        ("<parameter=code>\ntrue\n</parameter>\n", {"code": "true"}),
    ],
)
def test_parameters_in_tags_become_json(written: str, arguments: dict[str, object], step: int) -> None:
    whole = f"So.\n{XML % written}\n{XML % ''}"
    content, start, found, *second = told_xml(whole, step)
    assert (content, start) == (("Content", "So."), ("CallStart", "0", "f"))
    assert json.loads(found[2]) == arguments
    assert second == called(1, "f", "{}")


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize(
    ("name", "written", "arguments"),
    [
        (
            "lfm2",
            """a='it\\'s', b="say "hi" x", c=None""",
            {"a": "it's", "b": 'say "hi" x', "c": None},
        ),
        (
            "lfm2",
            """a={"b": [True, 'c'], 'd': (1, 2.5e3)}, e=''""",
            {"a": {"b": [True, "c"], "d": [1, 2500]}, "e": ""},
        ),
        ("lfm2", r"a='\u0041\n\q', b=Oslo, c=1e999", {"a": "A\n\\q", "b": "Oslo", "c": float("inf")}),
        (
            "gemma4",
            'a:<|"|>"x"\\, {<|"|>,b:[true,<|"|><|"|>],c:{d:null}',
            {"a": '"x"\\, {', "b": [True, ""], "c": {"d": None}},
        ),
        ("gemma4", 'a: "x\\n", <|"|>b c<|"|>: 1 ,d:Oslo', {"a": "x\n", "b c": 1, "d": "Oslo"}),
    ],
)
def test_values_in_other_notations_become_json(name: str, written: str, arguments: object, step: int) -> None:
    begin, end = {"lfm2": ("<|tool_call_start|>[f(", ")]"), "gemma4": ("<|tool_call>call:f{", "}")}[name]
    whole = begin + written + end + FORMAT[name].closing  # type: ignore[attr-defined]
    start, found = story(
        read(parser(FORMAT[name]), (whole[at : at + step] for at in range(0, len(whole), step)))
    )
    assert start == ("CallStart", "0", "f")
    assert json.loads(found[2]) == arguments


def test_a_parameter_given_twice_breaks_the_call_off() -> None:
    written = "<parameter=city>\nA\n</parameter>\n"
    *_, arguments, rest = told_xml(XML % (written + written), 5)
    assert arguments == ("CallArguments", "0", '{"city": "A"')
    assert rest == ("Content", "A\n</parameter>\n</function>\n</tool_call>")


def test_the_beginning_of_a_mark_before_a_call_is_text() -> None:
    assert COHERE is not None
    reader = FORMAT["cohere_command3"].reader(FUNCTIONS)
    written = 'Yes <|START<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>'
    events = read(AnswerParser(COHERE, False, reader, COHERE.wrapping), written)
    assert story(events) == [("Content", "Yes <|START"), *called(0, "f", "{}")]


@pytest.mark.parametrize("broken", ["<function=g>", "<f", "<function=f", "{}", "<parameter=city>"])
def test_tags_that_are_no_call_are_content(broken: str) -> None:
    assert told_xml(f"<tool_call>\n{broken}", 2) == [("Content", f"<tool_call>\n{broken}")]


def test_a_text_in_tags_is_streamed_as_it_comes() -> None:
    reading = AnswerParser(None, False, QWEN_XML.reader([PLACE]))
    reading.push("<tool_call>\n<function=f>\n<parameter=city>\n")
    assert reading.push('Os"lo\n</par') == [CallArguments(0, 'Os\\"lo')]
    assert reading.push("k") == [CallArguments(0, "\\n</park")]


@pytest.mark.parametrize(
    "broken", ["f", "f[ARGS", "g[ARGS]{}", "f[ARGS]x", "f[CALL_ID]x{}", "f[TOOL_CALLS]", '[{"name": "f"}]']
)
def test_a_malformed_call_of_mistral_is_content(broken: str) -> None:
    whole = "[TOOL_CALLS]f[ARGS]{}"
    assert told(f"So: [TOOL_CALLS]{broken}", MISTRAL_ARGS) == [("Content", f"So: [TOOL_CALLS]{broken}")]
    behind = [*called(0, "f", "{}"), ("Content", f"[TOOL_CALLS]{broken}")]
    assert told(f"{whole}[TOOL_CALLS]{broken}", MISTRAL_ARGS) == behind
    assert told(f"{whole}[TOO", MISTRAL_ARGS) == [*called(0, "f", "{}"), ("Content", "[TOO")]


def test_a_call_that_never_began_is_content() -> None:
    assert told('<tool_call>{"name": "f') == [("Content", '<tool_call>{"name": "f')]


def test_a_call_that_breaks_off_stays_as_it_was_streamed() -> None:
    assert told('<tool_call>{"name": "f", "arguments": {"a": "x') == called(0, "f", '{"a": "x')
    broken = told('<tool_call>{"name": "f", "arguments": {"a": ]}}')
    assert broken == [*called(0, "f", '{"a": '), ("Content", "]}}")]
    assert told(CALL[:-4]) == called(0, "f", '{"a": "x"}')


def test_nesting_is_bounded() -> None:
    deep = '{"a": ' + "[" * 100_000
    name, arguments, rest = told(f'<tool_call>{{"name": "f", "arguments": {deep}')
    assert name == ("CallStart", "0", "f")
    assert arguments[2] + rest[1] == deep
    assert len(arguments[2]) < 100


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_a_megabyte_takes_linear_time(piece: int) -> None:
    value = json.dumps({"text": 'quoted " and {nested} \\ ' * 40_000})
    text = f'<tool_call>{{"arguments": {value}, "name": "f"}}</tool_call>{" " * 100_000}{"<" * 100_000}'
    begin = time.perf_counter()
    events = read(parser(), (text[at : at + piece] for at in range(0, len(text), piece)))
    assert time.perf_counter() - begin < 20
    assert story(events)[:2] == called(0, "f", value)


def test_ids_are_fresh() -> None:
    ids = {event.id for event in read(parser(), [CALL * 50]) if isinstance(event, CallStart)}
    assert len(ids) == 50
    assert all(name.startswith("call_") for name in ids)
    mistral = read(parser(MISTRAL), ['[TOOL_CALLS][{"name": "f", "arguments": {}}]'])[0]
    assert isinstance(mistral, CallStart)
    written = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}"
    kimi = read(parser(FORMAT["kimi_k2"]), [written])[0]
    assert isinstance(kimi, CallStart)
    assert kimi.id == "functions.f:7"  # which the model reads again in the next turn
    assert mistral.id.isalnum()
    assert len(mistral.id) == 9


def test_reasoning_events_have_their_type() -> None:
    assert read(parser(think=True), ["<think>a</think>"]) == [Reasoning("a")]
