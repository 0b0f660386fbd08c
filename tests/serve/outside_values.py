"""Values that requests from outside may hold, as JSON text: writers of JSON refuse half of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from typing import Any

MANY = 1_000_000
NESTED = "[" * 10_000 + "]" * 10_000
VALUES = {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "minus zero": "-0.0",
    "1e309": "1e309",
    "2^63": str(1 << 63),
    "2^64": str(1 << 64),
    "10^400": "1" + "0" * 400,
    "-1": "-1",
    "0": "0",
    "true": "true",
    "empty text": '""',
    "empty list": "[]",
    "empty object": "{}",
    "nested": NESTED,
    "long list": json.dumps([1] * MANY),
    "long text": json.dumps("x" * MANY),
    "list of long texts": json.dumps(["x" * 1000] * 2000),
    "half a surrogate": '"\\ud800"',
    "NUL": '"a\\u0000/@\\\\"',
}


def replaced(base: dict[str, object], field: str, value: str) -> bytes:
    """A body with one field replaced by a value that is JSON text."""
    kept = {name: v for name, v in base.items() if name != field}
    return f'{json.dumps(kept)[:-1]}{", " if kept else ""}"{field}": {value}}}'.encode()


ODD: tuple[Any, ...] = (None, True, -1, 1e308, "", "\x00", [], [[]], {}, {"type": "x"}, [{"type": "text"}])


def places(body: Any) -> Iterator[tuple[Any, ...]]:
    """Where a body holds values, however deep: the keys that lead there."""
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in inner:
        yield (key,)
        yield from ((key, *rest) for rest in places(value))


def altered(body: Any) -> Iterator[Any]:
    """The body with an odd value in one place, for every place and value."""
    for *path, last in places(body):
        for value in ODD:
            copied = deepcopy(body)
            reduce(lambda inner, key: inner[key], path, copied)[last] = value
            yield copied
