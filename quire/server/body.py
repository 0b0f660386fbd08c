"""Bodies of requests: bytes from a stranger to a msgspec Struct, or an error that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from quire.errors import RequestError
from quire.server.errors import HTTPRefusal

MAX_BODY_BYTES = 32 << 20  # more is refused while it comes
MAX_DEPTH = 64  # of lists and objects in each other
MAX_CONTAINERS = 400_000  # lists and objects; each takes some 60 bytes, however short it is written
LARGE_BYTES = 1 << 16  # a body from this size on is parsed in a thread
# Whatever thread parses, everybody waits: so the long fields are these, and all others together stay short.
OTHER_BYTES = 1 << 18
LONG_FIELDS = {
    **dict.fromkeys(("messages", "prompt", "input", "system", "instructions", "tokens"), MAX_BODY_BYTES),
    "content": MAX_BODY_BYTES,
    **dict.fromkeys(("format", "grammar", "json_schema"), 2 << 20),
    **dict.fromkeys(("tools", "structured_outputs", "response_format", "text", "output_config"), 2 << 20),
    "allowed_token_ids": 2 << 20,
}
MAX_ITEMS = {"messages": 8192, "input": 8192, "tools": 512}  # of those that are counted before they are read
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>[^`]*)`)?$", re.DOTALL)
SEARCHED_BYTES = 1 << 20  # of a body at most, where half a surrogate pair is to be found
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_FIELDS, _ITEMS = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(list[msgspec.Raw])

T = TypeVar("T", bound=msgspec.Struct)


async def read(
    request: Request, type_: type[T], convert: Callable[[T], Any] = lambda asked: None
) -> tuple[T, list[str], Any]:
    """The body as a `type_`, the names in it that the type does not know, and what `convert` makes of it.

    Raises RequestError, with `param`, for what is not JSON, not an object, or does not match the type. Size
    and content type were looked at before it comes here. What is large does not pass through the event loop.
    """
    body = await request.body()

    def whole() -> tuple[T, list[str], Any]:
        asked, unknown = parse(body, type_)
        return asked, unknown, convert(asked)

    return await request.app.state.serving.in_thread(whole) if len(body) >= LARGE_BYTES else whole()


def parse(body: bytes | bytearray, type_: type[T]) -> tuple[T, list[str]]:
    """Bytes as a `type_`, and the names that it does not know."""
    num_containers = body.count(b"{") + body.count(b"[")
    if num_containers > MAX_CONTAINERS:
        raise RequestError(f"the body holds more than {MAX_CONTAINERS:,} lists and objects")
    decoder, shell, known = _decoders(type_)
    try:
        if len(body) > OTHER_BYTES:
            _check_sizes(shell.decode(body), len(body))
        fields = _FIELDS.decode(body)
        value = decoder.decode(body)  # takes no NaN, no Infinity, no half surrogates
        unknown = {name: msgspec.json.decode(raw) for name, raw in fields.items() if name not in known}
    except RequestError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise _malformed(body, error) from None
    if num_containers > MAX_DEPTH and any(_depth_exceeds(one, MAX_DEPTH) for one in (value, unknown)):
        raise _too_deep()
    return value, [*unknown]


@cache
def _decoders(type_: type[T]) -> tuple[msgspec.json.Decoder[T], msgspec.json.Decoder[Any], frozenset[str]]:
    """What reads a `type_`, what finds its fields and leaves them unread, and their names."""
    names = [field.encode_name for field in msgspec.structs.fields(type_)]
    shell = msgspec.defstruct("Shell", [(name, msgspec.Raw, msgspec.Raw()) for name in names])
    return msgspec.json.Decoder(type_), msgspec.json.Decoder(shell), frozenset(names)


def nested(value: dict[str, Any], type_: type[T], where: str) -> tuple[T, list[str]]:
    """An object that the field `where` of a body holds, as a `type_`, and the names that it does not know."""
    try:
        found = msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}.{_named(str(error)).message}", None, where) from None
    known = {field.encode_name for field in msgspec.structs.fields(type_)}
    return found, [f"{where}.{name}" for name in value if name not in known]


def _check_sizes(shell: msgspec.Struct, num_bytes: int) -> None:
    """Raise RequestError unless what is long may be. Finding fields takes a thirtieth of reading them."""
    sizes = {name: len(raw) for name, raw in msgspec.structs.asdict(shell).items()}
    for name, limit in LONG_FIELDS.items():
        num_bytes -= (size := sizes.pop(name, 0))
        if size > limit:
            raise RequestError(f"{name} takes more than {limit:,} bytes", None, name)
    for name, most in MAX_ITEMS.items():
        raw = bytes(getattr(shell, name, b""))
        if len(raw) > OTHER_BYTES and raw[:1] == b"[" and (count := len(_ITEMS.decode(raw))) > most:
            raise RequestError(f"{name} has {count:,} items; at most {most:,} are taken", None, name)
    if num_bytes > OTHER_BYTES:
        longest = max(sizes, key=lambda name: sizes[name])
        param = longest if sizes[longest] * 2 > OTHER_BYTES else None
        what = f"{param or 'what is not the prompt'} may take {OTHER_BYTES:,} bytes"
        raise RequestError(f"the body is too long: {what}", None, param)


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Level by level, so that no depth of the value becomes one of the interpreter."""
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


def _malformed(body: bytes | bytearray, error: Exception) -> RequestError:
    """Why a body cannot be read: its encoding, half a surrogate pair, or what msgspec says of it."""
    try:
        text = str(body, "utf-8")
    except UnicodeDecodeError as wrong:
        return RequestError(f"the body is not valid UTF-8 at byte {wrong.start}", "send JSON in UTF-8")
    if len(body) <= SEARCHED_BYTES:
        try:
            found = _half_pair(json.loads(text))  # which reads what msgspec refuses
        except (ValueError, RecursionError):
            found = None
        if found is not None:
            where, half = found[0][1:], ascii(found[1])[1:-1]
            field = _NAME.match(where)
            problem = f"{where[:80] or 'the body'} contains a lone surrogate {half}, which is no character"
            return RequestError(problem, "send both halves of the pair", field and field[0])
    return RequestError(f"the body is not JSON: {error}")


def _half_pair(value: Any, depth: int = 0) -> tuple[str, str] | None:
    """Return the place of the first lone surrogate in a value, and the surrogate."""
    if isinstance(value, str):
        half = _HALF_PAIR.search(value)
        return half and ("", half[0])
    if depth == MAX_DEPTH or not isinstance(value, dict | list):
        return None
    items = value.items() if isinstance(value, dict) else ((f"[{i}]", one) for i, one in enumerate(value))
    for key, inner in items:
        if found := _half_pair(inner, depth + 1):
            return (key if isinstance(value, list) else f".{key}") + found[0], found[1]
        if found := _half_pair(key):
            return found
    return None


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
    return RequestError(f"{where[:80] or 'the body'}: {what[:1].lower()}{what[1:]}", None, field and field[0])


def too_large() -> HTTPRefusal:
    """The answer to a body beyond the limit."""
    return HTTPRefusal(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
