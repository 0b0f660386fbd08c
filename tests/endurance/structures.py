"""JSON schemas by chance, whose instances are short, and functions to call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

NAMES = ["id", "name", "naam", "名", "a b", 'q"', "x-y", "tags", "on", "$", "0"]
CONSTANTS = ["", '"', "\\", "\n", 0, -1, 1.5, True, None, [], {}, {"a": None}, [1, [2]], "\U0001f642", "é"]
PATTERNS = ["^[a-f]{1,4}$", "^(x|yz){2}$", r"^\d{1,3}$", "^[A-Z][a-z]{0,5}$", "^.{2}$", r"^[^\"]{1,3}$"]
SHARE_OF_VALUES = 0.15  # of places where more could be nested
SHARE_OF_REFERENCES = 0.15

WORDS = ["Oslo", "Rome", "Lima", "Kyoto", "Bergen", "Ghent", "Perth", "Quito"]
ASKED = [
    "What is the weather in {}?",
    "Is it going to rain in {} tomorrow?",
    "Set a timer for {n} minutes.",
    "What is {n} plus {m}?",
    "Plan a trip to {} for me.",
    "Tell me a story about a fox in {}.",
    "{}",
    "Please do something with {n} and {m}, and then call {}.",
]


def random_schema(dice: random.Random, size: int) -> Schema:
    """A schema of about `size` values, one within the other."""
    is_shared = size > 2 and dice.random() < SHARE_OF_REFERENCES
    return _reference(dice, size) if is_shared else _nested(dice, size)


def _nested(dice: random.Random, size: int) -> Schema:
    if size <= 1 or dice.random() < SHARE_OF_VALUES:
        return _value(dice)
    makers = [_object, _object, _array, _tuple, _any_of, _all_of]
    return dice.choice(makers)(dice, size)


def schema_size(schema: Any) -> int:
    """Count the values that a schema describes."""
    if not isinstance(schema, dict):
        return 0
    return 1 + sum(schema_size(part) for part in _parts(schema))


def _parts(schema: Schema) -> Iterator[Any]:
    for key in ("properties", "$defs"):
        yield from schema.get(key, {}).values()
    for key in ("prefixItems", "anyOf", "allOf"):
        yield from schema.get(key, [])
    yield schema.get("items")
    yield schema.get("additionalProperties")


def _value(dice: random.Random) -> Schema:
    low = dice.randint(-50, 50)
    shortest = dice.randint(0, 3)
    makers: list[Callable[[], Schema]] = [
        lambda: {"type": "string", "minLength": shortest, "maxLength": shortest + dice.randint(0, 6)},
        lambda: {"type": "string", "pattern": dice.choice(PATTERNS)},
        lambda: {"type": "string", "format": dice.choice(["date", "time", "date-time", "ipv4", "uuid"])},
        lambda: {"type": "integer", "minimum": low, "maximum": low + dice.randint(0, 200)},
        lambda: {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 2},
        lambda: {"type": "number", "minimum": low, "maximum": low + dice.randint(1, 9), "multipleOf": 0.25},
        lambda: {"enum": dice.sample(CONSTANTS, dice.randint(1, 4))},
        lambda: {"const": dice.choice(CONSTANTS)},
        lambda: {"type": "boolean"},
        lambda: {"type": dice.sample(["null", "boolean"], 2)},
    ]
    return dice.choice(makers)()


def _several(dice: random.Random, size: int, most: int) -> list[Schema]:
    """Parts that share the size between them."""
    count = dice.randint(1, min(most, max(size, 1)))
    return [_nested(dice, size // count) for _ in range(count)]


def _object(dice: random.Random, size: int) -> Schema:
    parts = _several(dice, size - 1, 6)
    names = dice.sample(NAMES, len(parts))
    return {
        "type": "object",
        "properties": dict(zip(names, parts, strict=True)),
        "required": dice.sample(names, dice.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(dice: random.Random, size: int) -> Schema:
    most = dice.randint(1, 3)
    items = _nested(dice, size // most)
    return {"type": "array", "items": items, "minItems": dice.randint(0, most), "maxItems": most}


def _tuple(dice: random.Random, size: int) -> Schema:
    parts = _several(dice, size - 1, 4)
    shortest = dice.randint(0, len(parts))
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": shortest}


def _any_of(dice: random.Random, size: int) -> Schema:
    return {"anyOf": _several(dice, size - 1, 3)}


def _all_of(dice: random.Random, size: int) -> Schema:
    return {"allOf": [_object(dice, size - 1)]}


def _reference(dice: random.Random, size: int) -> Schema:
    """A whole schema, whose two properties have one description."""
    shared = _nested(dice, size // 2)
    used = {"$ref": "#/$defs/it"}
    return {
        "type": "object",
        "properties": {"one": used, "two": used},
        "required": ["one"],
        "additionalProperties": False,
        "$defs": {"it": shared},
    }


def tool_sets() -> list[list[dict[str, Any]]]:
    """Functions that may be called, in sets of one to four."""
    text = {"type": "string", "maxLength": 24}
    number = {"type": "integer", "minimum": 0, "maximum": 999}
    days = {"type": "array", "items": {"enum": ["Monday", "Friday"]}, "minItems": 1, "maxItems": 2}
    place = _closed(lat=number, lon=number)
    weather = _tool("get_weather", "Tells the weather in a city.", city=text)
    timer = _tool("set_timer", "Sets a timer.", minutes=number)
    add = _tool("add", "Adds two numbers.", a=number, b=number)
    plan = _tool("plan", "Plans a trip.", days=days, place=place, really={"type": "boolean"})
    return [[weather], [timer, add], [plan], [weather, timer, add, plan]]


def _closed(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _tool(name: str, description: str, **properties: Schema) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": _closed(**properties)}
    return {"type": "function", "function": function}


def tool_prompt(dice: random.Random) -> str:
    """Return a user's message; not all of them need a tool."""
    n, m = dice.randint(1, 99), dice.randint(1, 99)
    return dice.choice(ASKED).format(dice.choice(WORDS), n=n, m=m)
