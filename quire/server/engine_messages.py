"""Messages between the server and the engine's process, and their encoding on the socket.

A frame is the length of a message in four bytes, then the message in msgpack. Only the types below are
decoded; a frame that is too long or contains anything else ends the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, TypeVar

import msgspec

from quire.config import EngineConfig
from quire.engine.status import AdapterFacts, Facts, StepReport
from quire.errors import RequestError
from quire.recording.chunks import ChunkKind, JournalLimits
from quire.transfer.parcels import AnyParcel
from quire.types import NewRequest, Output

MAX_FRAME_BYTES = 256 << 20  # twice the largest output: logprobs of the whole vocabulary at each position
_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()


class BadFrame(Exception):
    """The bytes received are not a message, or a message is too long for a frame."""


class EngineMessage(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Base class of all messages. They are encoded as arrays that begin with the name of their type."""


class Start(EngineMessage):
    """Load a model. Always the first message.

    `measure`: measure the machine if its ceilings are unknown. With limits, a journal is sent.
    `available_bytes`: the memory that it may plan with, None for all that is free. `num_sharing` engines use
    the same weights. `adapters` are those to be loaded, folders by name, None for all.
    """

    config: EngineConfig
    measure: bool = False
    journal: JournalLimits | None = None
    available_bytes: int | None = None
    num_sharing: int = 1
    adapters: dict[str, str] | None = None


class Submit(EngineMessage):
    """Run a request. The reply is RequestAccepted, RequestsAdmitted and outputs, or RequestRefused."""

    request: NewRequest

    def checked(self) -> NewRequest:
        """Return the request with its parameters checked: decoding does not check ranges."""
        return replace(self.request, params=self.request.params.clone())


class Abort(EngineMessage):
    """End a request, or one sequence of it."""

    request_id: str
    sequence: int | None = None


class Bring(EngineMessage):
    """Blocks for a request that will be submitted next."""

    request_id: str
    parcel: AnyParcel


class ReadBlocks(EngineMessage):
    """Send the leading blocks of this chain that are in the cache, as BlocksRead.

    `shared`: in shared memory.
    """

    request_id: str
    hashes: list[bytes]
    shared: bool


class WatchSteps(EngineMessage):
    """Add views to the reports of steps from now on, or no longer."""

    on: bool


class FollowCache(EngineMessage):
    """Add changes of what is cached to the reports, beginning with all that is; or no longer."""

    on: bool


class ChangeAdapter(EngineMessage):
    """Load an adapter from a folder or, without one, unload it. The reply is AdapterChanged."""

    number: int
    name: str
    path: str | None


class AdapterChanged(EngineMessage):
    """The adapters that are loaded after a ChangeAdapter, or why it failed: the fields of a RequestError."""

    number: int
    adapters: tuple[AdapterFacts, ...]
    error: tuple[str, str | None, str | None] | None = None


class Announced(EngineMessage):
    """Description of the memory plan, and the size of the weights to load."""

    line: str
    nbytes: int


class Measuring(EngineMessage):
    """The ceilings of the machine are being measured."""


class Loading(EngineMessage):
    """Progress of loading, in bytes of weights."""

    done: int
    total: int


class Ready(EngineMessage):
    """The engine accepts requests."""

    facts: Facts


class RequestRefused(EngineMessage):
    """Refusal of a request that cannot run, with the fields of a RequestError."""

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


class RequestAccepted(EngineMessage):
    """A request waits: from now on, it is not what ends the process."""

    request_id: str


class RequestsAdmitted(EngineMessage):
    """These requests are computed from the next step on."""

    request_ids: list[str]


class Stepped(EngineMessage):
    """Outputs of a step. A step of many outputs may take several frames; the last has the report."""

    outputs: list[Output]
    report: StepReport | None


class BlocksRead(EngineMessage):
    """Blocks that were asked for by ReadBlocks; None after the last of them."""

    request_id: str
    parcel: AnyParcel | None


class Journaled(EngineMessage):
    """A chunk of the engine's journal: the plan of a step is sent before the step computes."""

    chunk: bytes
    kind: ChunkKind


class Failed(EngineMessage):
    """The engine cannot start or continue, and exits. `config`: the configuration is the cause."""

    message: str
    hint: str | None = None
    config: bool = False


ToEngine = Start | Submit | Abort | Bring | ReadBlocks | WatchSteps | FollowCache | ChangeAdapter
FromEngine = (
    Announced
    | Measuring
    | Loading
    | Ready
    | RequestRefused
    | RequestAccepted
    | RequestsAdmitted
    | Stepped
    | BlocksRead
    | Journaled
    | AdapterChanged
    | Failed
)
M = TypeVar("M")


def encode(message: EngineMessage) -> bytearray:
    """Encode a message as a frame. Raises BadFrame when it is too long for one."""
    frame = bytearray(_LENGTH.size)
    _ENCODER.encode_into(message, frame, _LENGTH.size)
    length = len(frame) - _LENGTH.size
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"a message of {length:,} bytes; at most {MAX_FRAME_BYTES:,} are sent")
    _LENGTH.pack_into(frame, 0, length)
    return frame


def encode_step(outputs: list[Output], report: StepReport) -> Iterator[bytearray]:
    """Encode a step as one frame or, if that is too long, as several."""
    try:
        yield encode(Stepped(outputs, report))
    except BadFrame:
        if len(outputs) < 2:
            raise
        for output in outputs[:-1]:
            yield encode(Stepped([output], None))
        yield encode(Stepped(outputs[-1:], report))


class FrameReader(Generic[M]):
    """Decode a stream of bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages that `data` completes. Raises BadFrame, after them, for anything else."""
        buffer, begin = self._buffer, 0
        buffer += data
        while len(buffer) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, begin)
            if length > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of {length:,} bytes; at most {MAX_FRAME_BYTES:,} are read")
            end = begin + _LENGTH.size + length
            if len(buffer) < end:
                break
            yield self._decode(buffer[begin + _LENGTH.size : end])
            begin = end
        del buffer[:begin]

    def _decode(self, payload: bytearray) -> M:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
            raise BadFrame(f"a frame that contains no message ({error})") from None


def engine_reader() -> FrameReader[ToEngine]:
    """Return the reader of the engine's process."""
    return FrameReader(msgspec.msgpack.Decoder(ToEngine))


def server_reader() -> FrameReader[FromEngine]:
    """Return the reader of the server."""
    return FrameReader(msgspec.msgpack.Decoder(FromEngine))
