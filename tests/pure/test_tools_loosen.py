"""Schemas of tools that no grammar can enforce are loosened minimally, and always with a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.errors import RequestError
from quire.grammar.compiler import GrammarCompiler
from quire.sampling_params import StructuredOutputsParams
from quire.text.tools import OutputFormat
from quire.text.tools.functions import MAX_WARNINGS, Function, read_functions, warnings_of, widened
from quire.text.tools.loosen import FORMATS, UNENFORCED, loosened
from quire.text.tools.qwen_xml import QwenXml

TEXT = {"type": "string"}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(100, {})
    yield made
    made.close()


def compiles(compiler: GrammarCompiler, schema: dict[str, Any]) -> bool:
    try:
        compiler.compile(StructuredOutputsParams(json=schema))
    except RequestError:
        return False
    return True


def alone(compiler: GrammarCompiler) -> Callable[[Function], object]:
    """Compile the schema of a function, and its grammar in a format that writes parameters separately."""

    def check(function: Function) -> None:
        compiler.compile(StructuredOutputsParams(json=function.schema))
        grammar = OutputFormat(QwenXml(""), None, {}).grammar((function,), "required")
        compiler.compile(StructuredOutputsParams(grammar=grammar))

    return check


def of(schema: Any, **more: Any) -> dict[str, Any]:
    """Make parameters with one property `x`."""
    return {"type": "object", "properties": {"x": schema}, **more}


LOOSENED = [  # a schema, what becomes of it, what is said
    (of({"type": "int"}), of({"type": "integer"}), "type of 'x' is 'int', which is taken as integer"),
    (of({"type": "float"}), of({"type": "number"}), "'float', which is taken as number"),
    (of({"type": "dict"}), of({"type": "object"}), "'dict', which is taken as object"),
    (of({"type": "str"}), of(TEXT), "'str', which is taken as string"),
    (of({"type": "STRING"}), of(TEXT), "'STRING', which is taken as string"),
    (of({"type": "bool"}), of({"type": "boolean"}), "'bool', which is taken as boolean"),
    (of({"type": "tuple"}), of({"type": "array"}), "'tuple', which is taken as array"),
    (of({"type": ["list", "None"]}), of({"type": ["array", "null"]}), "which is taken as array or null"),
    (of({"type": "any"}), of({}), "type of 'x' is 'any', which is taken as any type"),
    (of({"type": "str | None"}), of({}), "'str | None', which is taken as any type"),
    (of({"type": 5}), of({}), "is 5, which is taken as any type"),
    ({"type": "dict", "properties": {}}, {"type": "object", "properties": {}}, "type of the parameters"),
    (of("string"), of({}), "'x' is not a schema, so any value is allowed"),
    ({"properties": ["x"]}, {}, "properties of the parameters is not an object"),
    (of(TEXT | {"pattern": "^(?!x)"}), of(TEXT), "pattern of 'x' is not enforced: it is more than a regular"),
    (of(TEXT | {"pattern": r"\bx\b"}), of(TEXT), "pattern of 'x'"),
    (of(TEXT | {"pattern": r"(a)\1"}), of(TEXT), "pattern of 'x'"),
    (of(TEXT | {"pattern": 5}), of(TEXT), "pattern of 'x' is not text"),
    (of({"patternProperties": {"(?=a)": TEXT}}), of({"patternProperties": {}}), "is not enforced"),
    (of(TEXT | {"format": "color"}), of(TEXT), "format of 'x' is 'color', which is not enforced"),
    (of({"type": "integer", "maximum": 2**63}), of({"type": "integer"}), "maximum of 'x' is not enforced"),
    (of({"type": "number", "minimum": -(10**400)}), of({"type": "number"}), "minimum of 'x' is not enforced"),
    (of({"type": "number", "minimum": 1e-300}), of({"type": "number"}), "minimum of 'x' is not enforced"),
    (of({"type": "number", "maximum": "5"}), of({"type": "number"}), "maximum of 'x' is not a number"),
    (of({"type": "number", "multipleOf": 0}), of({"type": "number"}), "multipleOf of 'x'"),
    (of(TEXT | {"maxLength": "5"}), of(TEXT), "maxLength of 'x' is not a whole number of 0 or more"),
    (of(of(TEXT) | {"minProperties": 1}), of(of(TEXT)), "minProperties of 'x' is not enforced"),
    (of(TEXT, required=["x", "y"]), of(TEXT, required=["x"]), "required of the parameters names 'y'"),
    (of(TEXT, required="x"), of(TEXT), "required of the parameters is not a list"),
    (of({"enum": {"a": 1}}), of({}), "enum of 'x' is not a list"),
    (of({"anyOf": TEXT}), of({}), "anyOf of 'x' is not a list"),
    (of({"$ref": "#/$defs/Lost"}), of({}), "$ref of 'x' is '#/$defs/Lost', which does not exist"),
    (of({"$ref": "Other.json"}), of({}), "$ref of 'x' is 'Other.json', outside this schema"),
    (of({"type": "array", "uniqueItems": True}), of({"type": "array"}), "uniqueItems of 'x' is not enforced"),
    (
        of({"items": {"items": {"type": "int"}}}),
        of({"items": {"items": {"type": "integer"}}}),
        "'x.items.items'",
    ),
]


@pytest.mark.parametrize(("schema", "becomes", "said"), LOOSENED)
def test_an_unenforceable_keyword_is_dropped_with_a_warning(
    compiler: GrammarCompiler, schema: dict[str, Any], becomes: dict[str, Any], said: str
) -> None:
    found, warnings = loosened(schema)
    assert found == becomes
    (warning,) = warnings
    assert said in warning
    assert compiles(compiler, read_functions([tool(schema)])[0].schema)


def tool(schema: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


FINE = [
    of(TEXT | {"pattern": r"^[\w\-]+(\.\d{2,3})?$"}),
    of(TEXT | {"format": "date-time", "minLength": 1, "maxLength": 2**31}),
    of({"type": "integer", "format": "int64", "minimum": -(2**53), "maximum": 2**53}),
    of({"type": ["integer", "null"], "exclusiveMinimum": 0}, required=["x"], additionalProperties=False),
    of({"$ref": "#/$defs/a~1b"}, **{"$defs": {"a/b": {"$ref": "#/properties/y"}}}) | {"title": "T"},
    of({"$ref": "#"}, required=["x", "elsewhere"], additionalProperties=TEXT),
    of({"const": None, "default": None, "examples": [{"type": "int"}]}),
    of({"enum": [{"type": "int"}], "uniqueItems": False, "minContains": 0}),
    {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"type": TEXT, "pattern": TEXT}},
]


@pytest.mark.parametrize("schema", FINE)
def test_an_enforceable_schema_is_unchanged(schema: dict[str, Any]) -> None:
    silent = {"uniqueItems", "minContains"}
    schema["properties"].setdefault("y", {})
    found, warnings = loosened(schema)
    assert not warnings
    for name, part in schema["properties"].items():
        assert found["properties"][name] == {k: v for k, v in part.items() if k not in silent}
    assert {k: v for k, v in found.items() if k != "properties"} == {
        k: v for k, v in schema.items() if k != "properties"
    }


def test_null_keywords_are_dropped() -> None:
    assert loosened(of({"type": "string", "enum": None, "items": None}, required=None)) == (of(TEXT), [])


def test_the_keywords_and_formats_are_those_that_the_matcher_lacks(compiler: GrammarCompiler) -> None:
    values: dict[str, Any] = {name: {"a": ["b"]} for name in UNENFORCED} | {
        "minContains": 1,
        "maxContains": 1,
    }
    values |= {"uniqueItems": True, "$dynamicRef": "#x", "$recursiveRef": "#"}
    for name in UNENFORCED:
        assert not compiles(compiler, of({name: values[name]}))
    for name in FORMATS:
        assert compiles(compiler, of(TEXT | {"format": name}))
    others = {"contentEncoding": "base64", "contentSchema": {}, "deprecated": True, "readOnly": True}
    assert compiles(compiler, of(others | {"$comment": "", "$anchor": "a", "nullable": True, "xml": {}}))


WIDENED = [
    (
        {"oneOf": [of(TEXT), of({"type": "integer"})]},
        {"oneOf": [TEXT, {"minLength": 2}]},
        "oneOf is taken as anyOf",
    ),
    ({"pattern": "a^b"}, {"pattern": "["}, "patterns, formats and bounds of numbers are not enforced"),
    ({"$ref": "#anchor"}, {"allOf": [{"$ref": "#anchor"}]}, "only the names and types"),
]


@pytest.mark.parametrize(("schemas"), WIDENED)
def test_a_schema_that_does_not_compile_is_widened(
    compiler: GrammarCompiler, schemas: tuple[Any, Any, str]
) -> None:
    *odd, said = schemas
    for schema in odd:
        functions = read_functions([tool(of(TEXT)), tool(of(schema, required=["x"]), "g")])
        first, second = widened(functions, alone(compiler))
        assert first == functions[0]
        assert said in second.warnings[-1]
        assert compiles(compiler, second.schema)
        assert second.schema["required"] == ["x"]


def test_a_schema_is_widened_for_one_format_of_calls(compiler: GrammarCompiler) -> None:
    """Parameters that are written separately cannot refer to each other."""
    lists = {"type": "array", "items": {"$ref": "#/properties/y"}}
    schema = {"properties": {"x": lists, "y": {"type": "integer"}}}
    (function,) = widened(read_functions([tool(schema)]), alone(compiler))
    assert function.schema["properties"] == {"x": {"type": "array"}, "y": {"type": "integer"}}
    warning = "only the names and types of its parameters are enforced"
    assert function.warnings == (f"{warning}: $ref: /properties/y does not exist in this schema",)


def test_when_nothing_else_helps_any_object_is_taken() -> None:
    def check(function: Function) -> None:
        if "properties" in function.schema:
            raise RequestError("structured_outputs.json: it takes more than 1 s to compile")

    (function,) = widened(read_functions([tool(of(TEXT))]), check)
    assert function.schema.keys() == {"type", "x-guidance"}
    assert function.warnings == ("its parameters may be any object: it takes more than 1 s to compile",)


def test_arguments_are_an_object_whatever_else_their_schema_allows() -> None:
    (function,) = read_functions([tool({"type": ["dict", "null"], "properties": {"x": TEXT}})])
    assert (function.schema["type"], function.schema["additionalProperties"]) == ("object", False)


def test_a_strict_schema_is_unchanged(compiler: GrammarCompiler) -> None:
    for schema, named in ((of({"type": "int"}), "type: int"), (of({"oneOf": [TEXT, {}]}), "oneOf")):
        functions = read_functions([tool(schema, strict=True)])
        assert not functions[0].warnings
        with pytest.raises(RequestError, match=named) as caught:
            widened(functions, alone(compiler))
        assert caught.value.param == "tools[0].function.parameters"


def test_the_number_of_warnings_is_bounded() -> None:
    many = {f"p{i}": {"type": "int"} for i in range(MAX_WARNINGS + 5)}
    told = list(warnings_of(read_functions([tool({"properties": many})])))
    assert len(told) == MAX_WARNINGS + 1
    assert told[0] == "tool f: type of 'p0' is 'int', which is taken as integer"
    assert told[-1].startswith("5 more")
    name = "x" * 10_000
    assert all(
        len(one) < 500 for one in loosened({"properties": {name: {"type": name, "required": name}}})[1]
    )
