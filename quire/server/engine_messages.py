"""What the server and the engine's process say to each other, and how it is written on their socket.

A frame is the length of a message in four bytes and the message in msgpack. Reading builds the types
below and nothing else; a frame that is too long or holds anything else ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, TypeVar

import msgspec

from quire.config import EngineConfig
from quire.engine.status import Facts, StepReport
from quire.errors import RequestError
from quire.types import NewRequest, Output

MAX_FRAME_BYTES = 256 << 20  # twice the largest output: logprobs of the whole vocabulary at each position
_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()


class BadFrame(Exception):
    """What came over the socket is no message, or a message is too long for a frame."""


class EngineMessage(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Base of all messages; arrays that begin with the name of their type."""


class Start(EngineMessage):
    """The first message: what to load."""

    config: EngineConfig


class Submit(EngineMessage):
    """Run a request. Answered by outputs, or by RequestRefused."""

    request: NewRequest

    def checked(self) -> NewRequest:
        """The request, its parameters checked again: decoding fills fields without looking at ranges."""
        return replace(self.request, params=self.request.params.clone())


class Abort(EngineMessage):
    """End a request, or one sequence of it."""

    request_id: str
    sequence: int | None = None


class Announced(EngineMessage):
    """The memory plan in words, and bytes of weights to be loaded."""

    line: str
    nbytes: int


class Loading(EngineMessage):
    """Bytes of weights loaded so far."""

    done: int
    total: int


class Ready(EngineMessage):
    """The engine waits for requests."""

    facts: Facts


class RequestRefused(EngineMessage):
    """A request that cannot run: the fields of a RequestError."""

    request_id: str
    message: str
    hint: str | None
    param: str | None
    code: str | None

    @classmethod
    def of(cls, request_id: str, error: RequestError) -> RequestRefused:
        return cls(request_id, error.message, error.hint, error.param, error.code)

    def error(self) -> RequestError:
        return RequestError(self.message, self.hint, self.param, self.code)


class Stepped(EngineMessage):
    """All that came of a step. One of many outputs may take several frames; the last has the report."""

    outputs: list[Output]
    report: StepReport | None


class Failed(EngineMessage):
    """The engine cannot start or go on, and ends. `config`: because of what it was told to load."""

    message: str
    hint: str | None = None
    config: bool = False


ToEngine = Start | Submit | Abort
FromEngine = Announced | Loading | Ready | RequestRefused | Stepped | Failed
M = TypeVar("M")


def encode(message: EngineMessage) -> bytearray:
    """A message as a frame. Raises BadFrame when it is too long for one."""
    frame = bytearray(_LENGTH.size)
    _ENCODER.encode_into(message, frame, _LENGTH.size)
    length = len(frame) - _LENGTH.size
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"a message of {length:,} bytes; at most {MAX_FRAME_BYTES:,} are sent")
    _LENGTH.pack_into(frame, 0, length)
    return frame


def encode_step(outputs: list[Output], report: StepReport) -> Iterator[bytearray]:
    """A step as one frame or, where it is too long, as several."""
    try:
        yield encode(Stepped(outputs, report))
    except BadFrame:
        if len(outputs) < 2:
            raise
        for output in outputs[:-1]:
            yield encode(Stepped([output], None))
        yield encode(Stepped(outputs[-1:], report))


class FrameReader(Generic[M]):
    """Bytes in, messages out."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that are complete with `data`. Raises BadFrame for what is none."""
        buffer, messages, begin = self._buffer, [], 0
        buffer += data
        while len(buffer) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, begin)
            if length > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of {length:,} bytes; at most {MAX_FRAME_BYTES:,} are read")
            end = begin + _LENGTH.size + length
            if len(buffer) < end:
                break
            messages.append(self._decode(buffer[begin + _LENGTH.size : end]))
            begin = end
        del buffer[:begin]
        return messages

    def _decode(self, payload: bytearray) -> M:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
            raise BadFrame(f"a frame that holds no message ({error})") from None


def engine_reader() -> FrameReader[ToEngine]:
    """What the engine's process reads with."""
    return FrameReader(msgspec.msgpack.Decoder(ToEngine))


def server_reader() -> FrameReader[FromEngine]:
    """What the server reads with."""
    return FrameReader(msgspec.msgpack.Decoder(FromEngine))
