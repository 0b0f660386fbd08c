"""Bodies of requests: bytes from a stranger to a msgspec Struct, or an error that names the field."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from quire.errors import RequestError

MAX_BODY_BYTES = 32 << 20  # more is refused while it comes
MAX_DEPTH = 64  # of lists and objects in each other
MAX_CONTAINERS = 1_000_000  # lists and objects; each takes some 60 bytes, however short it is written
LARGE_BYTES = 1 << 18  # a body from this size on is parsed in a thread
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")

T = TypeVar("T", bound=msgspec.Struct)


async def read(request: Request, type_: type[T]) -> tuple[T, list[str]]:
    """The body as a `type_`, and the names in it that the type does not know.

    Raises RequestError, with `param`, for what is not JSON, not an object, or does not match the type. Size
    and content type were looked at before it comes here.
    """
    body = await request.body()
    if len(body) < LARGE_BYTES:
        return parse(body, type_)
    parsed: tuple[T, list[str]] = await request.app.state.serving.in_thread(parse, body, type_)
    return parsed


def parse(body: bytes | bytearray, type_: type[T]) -> tuple[T, list[str]]:
    """Bytes as a `type_`, and the names that it does not know."""
    if body.count(b"{") + body.count(b"[") > MAX_CONTAINERS:
        raise RequestError(f"the body holds more than {MAX_CONTAINERS:,} lists and objects")
    try:
        raw = msgspec.json.decode(body)  # takes no NaN, no Infinity, no half surrogates
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise RequestError("the body must be a JSON object")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and _depth_exceeds(raw, MAX_DEPTH):
        raise _too_deep()
    decoder, known = _decoder(type_)
    try:
        return decoder.decode(body), [name for name in raw if name not in known]
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None


@cache
def _decoder(type_: type[T]) -> tuple[msgspec.json.Decoder[T], frozenset[str]]:
    names = frozenset(field.encode_name for field in msgspec.structs.fields(type_))
    return msgspec.json.Decoder(type_), names


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Level by level, so that no depth of the value becomes one of the interpreter."""
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for one in level:
            items = one.values() if isinstance(one, dict) else one
            inner += [item for item in items if isinstance(item, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _named(message: str) -> RequestError:
    """msgspec's words, with the field that they are about: Expected `int`, got `str` - at `$.seed`."""
    match = _PLACE.match(message)
    what, where = (match["what"], match["where"] or "") if match else (message, "")
    field = _NAME.match(where)
    if missing := re.search(r"missing required field `(\w+)`", what):
        where = f"{where}.{missing[1]}" if where else missing[1]
        return RequestError(f"{where[:80]} is missing", None, field[0] if field else missing[1])
    what = what.replace("`", "")
    return RequestError(
        f"{where[:80]}: {what[:1].lower()}{what[1:]}" if where else what, None, field and field[0]
    )
