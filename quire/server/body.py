"""Parsing of request bodies: untrusted bytes to a msgspec Struct, or an error that names the field."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from typing import Any, TypeVar

import msgspec

from quire.errors import RequestError
from quire.server.errors import HTTPRefusal

MAX_BODY_BYTES = 32 << 20  # more is refused while it arrives
MAX_DEPTH = 64  # of nested lists and objects
# Decoding holds the interpreter's lock in any thread, and no stream advances meanwhile: these bounds limit it
# to tenths of a second.
MAX_CONTAINERS = 400_000  # lists and objects
MAX_VALUES = 1_000_000  # of any type, and names in objects
LARGE_BYTES = 1 << 16  # a body from this size on is parsed in a thread
SEARCHED_BYTES = 1 << 20  # larger bodies are not searched for a lone surrogate
_SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

T = TypeVar("T", bound=msgspec.Struct)


def _float(digits: str) -> float:
    """Read a number of no declared type. msgspec itself takes 10 µs for a subnormal number, Python 0.5 µs."""
    if math.isinf(value := float(digits)):
        raise ValueError("number out of range")
    return value


_ANY = msgspec.json.Decoder(float_hook=_float)


def parse(body: bytes | bytearray, type_: type[T]) -> tuple[T, list[str]]:
    """Decode JSON as a `type_`; also return the names of its unknown fields."""
    if len(body) > MAX_CONTAINERS:
        _check_counts(body)
    decoder, known = _decoder(type_)
    try:
        fields = _FIELDS.decode(body)
        value = decoder.decode(body)  # refuses NaN, Infinity and lone surrogates
        unknown = {name: _ANY.decode(raw) for name, raw in fields.items() if name not in known}
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise malformed(body, error) from None
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and any(
        _depth_exceeds(one, MAX_DEPTH) for one in (value, unknown)
    ):
        raise _too_deep()
    return value, [*unknown]


@cache
def _decoder(type_: type[T]) -> tuple[msgspec.json.Decoder[T], frozenset[str]]:
    """Return the decoder of a type, and the names of its fields."""
    return msgspec.json.Decoder(type_, float_hook=_float), frozenset(
        f.encode_name for f in msgspec.structs.fields(type_)
    )


def _check_counts(body: bytes | bytearray) -> None:
    """Raise RequestError for more values, or lists and objects, than are decoded."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    too_many = RequestError(f"the body contains more than {MAX_VALUES:,} values and names")
    if unescaped.count(b'"') > 2 * MAX_VALUES:
        raise too_many
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    num_containers = outside_strings.count(b"{") + outside_strings.count(b"[")
    if num_containers > MAX_CONTAINERS:
        raise RequestError(f"the body contains more than {MAX_CONTAINERS:,} lists and objects")
    if num_containers + outside_strings.count(b",") + outside_strings.count(b":") > MAX_VALUES:
        raise too_many


def nested(value: dict[str, Any], type_: type[T], where: str) -> tuple[T, list[str]]:
    """Convert an object in the field `where` to a `type_`; also return the names of its unknown fields."""
    try:
        found = msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}.{_field_error(str(error)).message}", None, where) from None
    known = {field.encode_name for field in msgspec.structs.fields(type_)}
    return found, [f"{where}.{name}" for name in value if name not in known]


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Return True if a value is nested deeper. Goes level by level, so that no value exhausts the stack."""
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for one in level:
            items = one.values() if isinstance(one, dict) else one
            items = msgspec.structs.astuple(one) if isinstance(one, msgspec.Struct) else items
            inner += [item for item in items if isinstance(item, dict | list | msgspec.Struct)]
        if not inner:
            return False
        level = inner
    return True


def malformed(body: bytes | bytearray, error: Exception) -> RequestError:
    """Return the error for a body that is not UTF-8, contains a lone surrogate, or is not JSON."""
    try:
        text = str(body, "utf-8")
    except UnicodeDecodeError as wrong:
        return RequestError(f"the body is not valid UTF-8 at byte {wrong.start}", "send JSON in UTF-8")
    if len(body) <= SEARCHED_BYTES:
        try:
            found = _lone_surrogate(json.loads(text))  # which accepts them
        except (ValueError, RecursionError):
            found = None
        if found is not None:
            where, half = found[0][1:], ascii(found[1])[1:-1]
            field = _NAME.match(where)
            problem = f"{where[:80] or 'the body'} contains a lone surrogate {half}, which is not a character"
            return RequestError(problem, "send both halves of the pair", field and field[0])
    return RequestError(f"the body is not JSON: {error}")


def _lone_surrogate(value: Any, depth: int = 0) -> tuple[str, str] | None:
    """Return the place of the first lone surrogate in a value, and the surrogate."""
    if isinstance(value, str):
        half = _SURROGATE.search(value)
        return half and ("", half[0])
    if depth == MAX_DEPTH or not isinstance(value, dict | list):
        return None
    items = value.items() if isinstance(value, dict) else ((f"[{i}]", one) for i, one in enumerate(value))
    for key, inner in items:
        if found := _lone_surrogate(inner, depth + 1):
            return (key if isinstance(value, list) else f".{key}") + found[0], found[1]
        if found := _lone_surrogate(key):
            return found
    return None


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _field_error(message: str) -> RequestError:
    """Return an error that names the field, for msgspec's: Expected `int`, got `str` - at `$.seed`."""
    what, _, where = message.partition(" - at `$")
    where = where.removesuffix("`").removeprefix(".")
    field = _NAME.match(where)
    if missing := re.search(r"missing required field `(\w+)`", what):
        where = f"{where}.{missing[1]}" if where else missing[1]
        return RequestError(f"{where[:80]} is missing", None, field[0] if field else missing[1])
    what = what[:200].replace("`", "")
    return RequestError(f"{where[:80] or 'the body'}: {what[:1].lower()}{what[1:]}", None, field and field[0])


def too_large() -> HTTPRefusal:
    """Return the error for a body of more bytes than the limit."""
    return HTTPRefusal(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
