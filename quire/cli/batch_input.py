"""The input of a batch: requests read line by line from a file or pipe, and errors for invalid lines."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import threading
from collections.abc import AsyncIterator, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import msgspec

from quire.errors import QuireError, did_you_mean, quoted

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
)
MAX_LINE_BYTES = 33 << 20  # the server's limit for a body, and some space for the other fields
READ_AHEAD = 16  # lines
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A valid line of the input. `body` is sent to `url` byte for byte."""

    line: int
    custom_id: str
    url: str
    body: bytes


class LineError(QuireError):
    """An invalid line. `custom_id` is None if the line has no valid one."""

    def __init__(
        self, line: int, code: str, message: str, param: str | None = None, custom_id: str | None = None
    ) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.code = code
        self.param = param
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Answered:
    """A line whose request an earlier run has answered."""

    line: int


class _Shell(msgspec.Struct):
    stream: Any = None


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SHELL = msgspec.json.Decoder(_Shell)
Item = BatchRequest | LineError | Answered


def digest(custom_id: str) -> bytes:
    """Hash an id to 16 bytes: one is kept in memory for every line."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def items(file: BinaryIO, done: Container[bytes]) -> Iterator[Item]:
    """Yield the lines of a batch. `done` has the digests of the ids that earlier runs have answered."""
    seen: set[bytes] = set()
    for number, raw in enumerate(_lines(file), 1):
        try:
            request = parse(raw, number)
            if (key := digest(request.custom_id)) in seen:
                message = f"custom_id {quoted(request.custom_id)} is already used by an earlier line"
                raise LineError(number, "duplicate_custom_id", message, "custom_id", request.custom_id)
            seen.add(key)
            yield Answered(number) if key in done else request
        except LineError as error:
            yield error


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a file, None for one that is too long."""
    while raw := file.readline(MAX_LINE_BYTES + 1):
        if len(raw) <= MAX_LINE_BYTES:
            yield raw
            continue
        while not raw.endswith(b"\n") and (raw := file.readline(1 << 20)):
            pass
        yield None


def parse(raw: bytes | None, number: int) -> BatchRequest:
    """Parse one line. Raises LineError."""
    if raw is None:
        raise LineError(number, "line_too_long", f"longer than {MAX_LINE_BYTES:,} bytes")
    raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
    if not raw.strip():
        raise LineError(number, "empty_line", "empty; every line must be a JSON object")
    try:
        fields = _FIELDS.decode(raw)
    except msgspec.ValidationError:
        raise LineError(number, "invalid_json_line", "not a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError(number, "invalid_json_line", f"not JSON: {error}") from None
    custom_id = _text(fields, "custom_id", number, None)
    method, url = (_text(fields, name, number, custom_id) for name in ("method", "url"))
    if method != "POST":
        message = f"method {quoted(method)} is not supported; use POST"
        raise LineError(number, "invalid_method", message, "method", custom_id)
    if url not in URLS:
        near = did_you_mean(url[:80], URLS)
        message = f"url {quoted(url)} is not one of {', '.join(URLS)}" + (f" ({near})" if near else "")
        raise LineError(number, "invalid_url", message, "url", custom_id)
    if "body" not in fields:
        raise LineError(number, "missing_field", "body is missing", "body", custom_id)
    body = bytes(fields["body"])
    if _streams(body):
        message = "body.stream is true, but a batch returns complete responses only; leave it out"
        raise LineError(number, "stream_not_supported", message, "body.stream", custom_id)
    return BatchRequest(number, custom_id, url, body)


def _text(fields: dict[str, msgspec.Raw], name: str, number: int, custom_id: str | None) -> str:
    if name not in fields:
        raise LineError(number, "missing_field", f"{name} is missing", name, custom_id)
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        value: str = msgspec.json.decode(fields[name], type=str)
        if value:
            return value
    message = f"{name} must be a non-empty string"
    raise LineError(number, "invalid_field", message, name, custom_id)


def _streams(body: bytes) -> bool:
    """Return True if a body asks for a stream. The server reports all other errors in a body."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _SHELL.decode(body).stream is True
    return False


async def read_ahead(iterator: Iterator[T]) -> AsyncIterator[T]:
    """Iterate in a thread, a few items ahead, since reading from a pipe may block.

    It is a daemon thread, so that an interrupted program can exit while the pipe is still open.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[bool, Any]]()
    room = threading.Semaphore(READ_AHEAD)

    def put(more: bool, item: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(queue.put_nowait, (more, item))

    def run() -> None:
        try:
            for item in iterator:
                room.acquire()
                put(True, item)
            put(False, None)
        except BaseException as error:
            put(False, error)

    threading.Thread(target=run, name="quire-batch-input", daemon=True).start()
    while True:
        more, item = await queue.get()
        room.release()
        if not more:
            break
        yield item
    if item is not None:
        raise item
