"""Structured outputs become grammars, or are refused by name; compiling costs no more than its process."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answer_grammars import Bytes

from quire.errors import RequestError
from quire.grammar.compile_job import llguidance_text
from quire.grammar.compiler import FAILURE_S, MAX_CACHED, GrammarCompiler
from quire.grammar.matcher import fault, make_matcher, make_vocabulary
from quire.sampling_params import SamplingParams, StructuredOutputsParams

SPECIAL = {0: "<|endoftext|>", 2: "<|im_end|>", 7: "<tool_call>"}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(1000, SPECIAL)
    yield made
    made.close()


def refusal(compiler: GrammarCompiler, **structure: Any) -> RequestError:
    """Return the error of a structure, checked for its form and its time."""
    begin = time.monotonic()
    with pytest.raises(RequestError) as caught:
        compiler.compile(StructuredOutputsParams(**structure))
    assert time.monotonic() - begin < 7  # 5 s, and what a busy machine adds
    (name,) = structure
    assert caught.value.param == "structured_outputs"
    assert caught.value.message.startswith(f"structured_outputs.{name}: ")
    assert len(caught.value.message) < 700
    return caught.value


@pytest.mark.parametrize(
    "structure",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "string"}}}},
        {"json": '{"type": "integer"}'},
        {"json": True},
        {"json": {}},
        {"json": {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}},
        {"json_object": True},
        {"regex": r"\d{3}-[a-z]+"},
        {"regex": "(a+)+"},
        {"choice": ["yes", "no", 'a "quoted"\n one', "漢字 😀"]},
        {"choice": ["only"]},
        {"grammar": 'start: "a" | start "b"'},
        {"grammar": '?start: "a" | start "b"'},
        {"grammar": "!start[max_tokens=9]: /a+/"},
        {"grammar": 'root ::= "a" | "(" root ")"'},
        {"grammar": '{"grammars": [{"json_schema": {"type": "integer"}}]}'},
        {"grammar": 'start: <tool_call> "x" <[2]>'},
    ],
)
def test_structures_compile(compiler: GrammarCompiler, structure: dict[str, Any]) -> None:
    grammar = compiler.compile(StructuredOutputsParams(**structure))
    assert grammar
    assert compiler.compile(StructuredOutputsParams(**structure)) is grammar


@pytest.mark.parametrize(
    ("structure", "named"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"json": {"type": "string", "format": "nope"}}, "nope"),
        ({"json": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, "oneOf"),
        ({"json": {"$ref": "https://example.org/schema"}}, "example.org"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength"),
        ({"json": {"$ref": "#"}}, "matches no text"),
        ({"json": "{"}, "line 1"),
        ({"json": "[]"}, "schema must be an object"),
        ({"json": "false"}, "false"),
        ({"json": {"const": float("nan")}}, "JSON"),
        ({"json": {"const": object()}}, "JSON"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "\ud800"}, "surrogates"),
        ({"choice": ["\ud800"]}, "hex escape"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "start: start"}, "matches no text"),
        ({"grammar": "start: <nope>"}, "<nope>"),
        ({"grammar": "start: <[99999]>"}, "99999"),
        ({"grammar": 'root ::= "a'}, "end of input"),
        ({"grammar": "prose"}, "::="),
        ({"grammar": 'root ::= start "x"\nstart ::= "a"'}, "'start' already exists"),
        ({"grammar": "{}"}, "grammars"),
    ],
)
def test_a_wrong_structure_is_refused_by_name(
    compiler: GrammarCompiler, structure: dict[str, Any], named: str
) -> None:
    assert named in refusal(compiler, **structure).message


def chain(count: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": links | {f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


REFUSED = {
    "parentheses in a regex": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "parentheses in Lark": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "parentheses in GBNF": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "tokens": {"grammar": "start: " + " ".join(f'"w{i}"' for i in range(70_000))},
    "alternatives in GBNF": {"grammar": "root ::= " + " | ".join(f'"w{i}"' for i in range(70_000))},
    "rules that call one another": {
        "grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(30_000)) + '\nr30000: "a"'
    },
    "references": {"json": chain(20_000)},
    "nested schemas": {"json": nested(900)},
    "nested schemas as text": {"json": '{"items":' * 9_000 + "{}" + "}" * 9_000},
    "enum": {"json": {"enum": [f"value {i}" for i in range(100_000)]}},
    "choices": {"choice": [f"a longer value {i}" for i in range(100_000)]},
    "a power of two": {
        "grammar": "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)) + '\nR60: "a"'
    },
    "a large count": {"regex": "a{1000000000}"},
    "optional properties": {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(9_000)}}},
    "products of alternatives": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for i in range(10)]}
                for j in range(12)
            ]
        }
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_structure_costs_one_request(compiler: GrammarCompiler, name: str) -> None:
    refusal(compiler, **REFUSED[name])
    assert compiler.compile(StructuredOutputsParams(json={"type": "null"}))


@pytest.mark.parametrize("structure", [{"regex": "a" * 300_000}, {"json": {"const": "x" * 900_000}}])
def test_a_slow_grammar_is_refused(
    compiler: GrammarCompiler, structure: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiled in the sandbox, but would take as long in the engine, within a step."""
    monkeypatch.setattr("quire.grammar.compiler.CPU_LIMIT_S", 0.05)
    assert "takes more than" in refusal(compiler, **structure).message
    assert compiler.compile(StructuredOutputsParams(json={"type": "null"}))


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "(a+)+$"},
        {"regex": "(.{1,1000}){1,1000}"},
        {"regex": "(.*a.{20})|(.*b.{30}c)"},
        {"grammar": 'start: s\ns: s s | s s s | "a" | '},
        {"grammar": 'start: ("a" | "b"){1,1000000}'},
        {"json": {"type": "string", "maxLength": 1_000_000}},
        {"json": {"type": "array", "minItems": 10_000_000}},
    ],
)
def test_a_grammar_that_compiles_cheaply_is_accepted(
    compiler: GrammarCompiler, structure: dict[str, Any]
) -> None:
    """It may fail at run time, within llguidance's limits for a step."""
    begin = time.monotonic()
    assert compiler.compile(StructuredOutputsParams(**structure))
    assert time.monotonic() - begin < 3


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_thousand_schemas_keep_bounds(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutputsParams(json={}))
    process = compiler._sandbox._process
    assert process is not None
    before = resident_bytes(process.pid)
    begin = time.monotonic()
    for i in range(1000):
        compiler.compile(StructuredOutputsParams(json={"properties": {f"p{i}": {"type": "string"}}}))
    assert time.monotonic() - begin < 30  # a second when the machine is idle
    assert compiler._sandbox._process is process
    assert resident_bytes(process.pid) - before < 32 << 20
    assert len(compiler._answers) <= MAX_CACHED
    for i in range(20):
        compiler.compile(StructuredOutputsParams(json={"description": "x" * 900_000 + str(i)}))
    assert sum(map(len, compiler._answers)) == compiler._num_cached_characters <= 8 << 20


def test_an_object_of_many_properties_can_be_followed() -> None:
    """Each property that may follow takes four of the matcher's items."""
    vocabulary = make_vocabulary([bytes((byte,)) for byte in range(256)], {}, lambda text: [*text.encode()])
    properties = {f"p{i}": {"type": "string"} for i in range(1500)}
    matcher = make_matcher(
        vocabulary, llguidance_text({"json": {"type": "object", "properties": properties}})
    )
    for byte in b'{"p7": "a", "p9':
        assert matcher.consume_token(byte)
        matcher.compute_bitmask()
        assert fault(matcher) is None


def test_answers_are_cached(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal(compiler, regex="(a")
    grammar = compiler.compile(StructuredOutputsParams(regex="a"))
    monkeypatch.delattr(compiler._sandbox, "_process")  # any request to the process fails now
    refusal(compiler, regex="(a")
    assert compiler.compile(StructuredOutputsParams(regex="a")) is grammar
    with pytest.raises(AttributeError):
        compiler.compile(StructuredOutputsParams(regex="not asked before"))


@pytest.mark.parametrize("kind", ["time", "memory"])
def test_a_structure_that_met_a_busy_machine_is_tried_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What broke a limit once is refused for a while, and not for ever."""
    replies: list[dict[str, Any]] = [{"kind": kind}, {"kind": kind}, {"grammar": "found"}]
    monkeypatch.setattr(compiler._sandbox, "ask", lambda line: replies.pop(0))
    now_s = time.monotonic()
    monkeypatch.setattr("quire.grammar.compiler.time.monotonic", lambda: now_s)
    structure, tries = StructuredOutputsParams(regex=f"busy {kind}"), []
    for _ in range(3):
        for _ in range(2):
            with contextlib.suppress(RequestError):
                tries.append(compiler.compile(structure))
        tries.append(str(len(replies)))
        now_s += FAILURE_S + 1
    assert tries == ["2", "1", "found", "found", "0"]


def test_a_dead_process_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutputsParams(regex="before"))
    process = compiler._sandbox._process
    assert process is not None
    process.kill()
    process.wait()
    assert compiler.compile(StructuredOutputsParams(regex="after"))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"json": {}, "regex": "a"},
        {"json": 5},
        {"json": False},
        {"regex": ""},
        {"regex": "a" * (1 << 21)},
        {"regex": 5},
        {"choice": []},
        {"choice": "yes"},
        {"choice": ["yes", 5]},
        {"choice": [""]},
        {"grammar": b"start: a"},
        {"json_object": False},
    ],
)
def test_exactly_one_field_of_the_right_type(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        SamplingParams(structured_outputs=values)  # type: ignore[arg-type]
    assert caught.value.param == "structured_outputs"


def test_an_unknown_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'regex'"):
        SamplingParams(structured_outputs={"regexp": "a"})  # type: ignore[arg-type]


def test_a_dictionary_serves_as_well() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})  # type: ignore[arg-type]
    assert params.structured_outputs == StructuredOutputsParams(choice=["a", "b"])


def test_a_structure_has_an_end() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), ignore_eos=True)
    assert caught.value.param == "ignore_eos"


def test_between_two_tokens_of_json_is_a_space_or_a_line(compiler: GrammarCompiler) -> None:
    """Common white space is allowed, unless the schema defines it."""
    value = {"a": 1, "b": [1, {"c": 2}]}
    grammar = compiler.compile(
        StructuredOutputsParams(json={"properties": {"a": {}, "b": {}}, "type": "object"})
    )
    for written in (
        *(json.dumps(value, indent=indent) for indent in (None, 2, 4, "\t")),
        json.dumps(value, separators=(",", ":")),
        '{ "a" : 1, "b" : [ 1, { "c" : 2 } ] }',
    ):
        assert Bytes().allows(grammar, written), written
    for begun in ("{  ", "{ \n", "{\n\n", '{"a":  ', '{"a":\n\n', "{\n" + " " * 17):
        assert not Bytes().begins(grammar, begun), begun
    own = {"x-guidance": {"whitespace_flexible": False}}
    (one,) = json.loads(compiler.compile(StructuredOutputsParams(json=own)))["grammars"]
    assert one["json_schema"] == own


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1995-02-28", "1995-12-31", "2011-10-29"],
            ["2023-02-29", "1900-02-29", "2023-04-31", "2023-02-30", "2023-13-01"],
        ),
        (
            "time",
            ["23:59:59Z", "00:00:00.25+01:00", "12:00:00.123456789Z"],
            ["23:59:60Z", "24:00:00Z", "12:00:00", "12:00:00.1234567890"],
        ),
        (
            "date-time",
            ["2024-02-29T12:00:00Z", "2024-02-29t12:00:00.5-01:00"],
            ["2023-02-29T12:00:00Z", "2024-02-29T12:00:60Z", "2024-02-29", "2024-02-29T12:00:00.1234567890"],
        ),
    ],
)
def test_days_and_times_are_those_of_the_calendar(
    compiler: GrammarCompiler, name: str, right: list[str], wrong: list[str]
) -> None:
    """The format is enforced anywhere in a schema, but not in values that look like it."""
    own = {"type": "string", "format": name, "allOf": [{"minLength": 1}]}
    values = [{"format": name}, "format"]
    properties = {"enum": {"$ref": "#/$defs/own"}, "format": {"enum": values}, "all": {"items": own}}
    schema = {"type": "object", "$defs": {"own": own}, "properties": properties}
    grammar = compiler.compile(StructuredOutputsParams(json=schema))
    for text in right:
        assert Bytes().allows(grammar, json.dumps({"enum": text, "format": values[0], "all": [text]})), text
    for text in wrong:
        assert not Bytes().begins(grammar, json.dumps({"enum": text})), text
        assert not Bytes().begins(grammar, json.dumps({"all": [text]})), text
