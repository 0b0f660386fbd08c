"""Values that requests from outside may hold, as JSON text: writers of JSON refuse half of them."""

from __future__ import annotations

import json

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
