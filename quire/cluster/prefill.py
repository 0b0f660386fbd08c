"""The prefill engine's side of links: compute prompts for the servers of decode engines."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from quire.cluster.link import LinkAddress, LinkConnection, listen
from quire.cluster.link_messages import Abandon, Alive, Blocks, Prefill, Prefilled, Refused, ToPrefill
from quire.engine.client import EngineClient
from quire.engine.request import prompt_hashes
from quire.errors import EngineDead, RequestError
from quire.transfer.parcels import AnyParcel
from quire.types import NewRequest, Output

MAX_OPEN = 256  # prompts of all links together; more are refused, and computed by who asked
MAX_UNSENT_BYTES = 64 << 20  # of blocks on a connection, until the other side has read some
_POLL_S = 0.002
_LOG = logging.getLogger(__name__)


class PrefillEngine(EngineClient, Protocol):
    """An engine whose cached blocks can be read."""

    def read_blocks(
        self, name: str, hashes: Sequence[bytes], shared: bool, receive: Callable[[AnyParcel | None], None]
    ) -> None:
        """See RemoteEngine."""


class PrefillService:
    """Answers links: computes a prompt and one token of each sequence, and sends both with its blocks."""

    def __init__(self, engine: PrefillEngine, key: bytes) -> None:
        self._engine = engine
        self._key = key
        self._decoder = msgspec.msgpack.Decoder(ToPrefill | Alive)
        self._tasks: dict[tuple[LinkConnection, str], asyncio.Task[None]] = {}
        self._connections: set[LinkConnection] = set()
        self._numbers = itertools.count()
        self._server: asyncio.Server | None = None
        self.num_prompts = 0  # that were computed, since the start

    async def start(self, address: LinkAddress) -> None:
        """Listen. Raises ConfigError if the address cannot be used."""
        self._server = await listen(address, self._make)

    async def close(self) -> None:
        """End all connections, and what they asked for."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        for task in [*self._tasks.values()]:
            task.cancel()

    @property
    def port(self) -> int:
        """The port that it listens at, of a link by host and port."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def _make(self) -> LinkConnection:
        connection = LinkConnection(
            self._key, self._decoder, calling=False, receive=self._receive, lost=self._lost
        )
        self._connections.add(connection)
        return connection

    def _lost(self, connection: LinkConnection, why: str) -> None:
        self._connections.discard(connection)
        _LOG.info("a link to this prefill engine ended: %s", why)
        for (whose, _), task in [*self._tasks.items()]:
            if whose is connection:
                task.cancel()

    def _receive(self, connection: LinkConnection, message: ToPrefill) -> None:
        match message:
            case Prefill(request, shared):
                name = (connection, request.request_id)
                if name in self._tasks or len(self._tasks) >= MAX_OPEN:
                    connection.send(Refused(request.request_id, "the prefill engine has too many prompts"))
                    return
                self._tasks[name] = task = asyncio.create_task(self._prefill(connection, message, shared))
                task.add_done_callback(lambda _: self._tasks.pop(name, None))
            case Abandon(request_id):
                if (own := self._tasks.get((connection, request_id))) is not None:
                    own.cancel()

    async def _prefill(self, connection: LinkConnection, asked: Prefill, shared: bool) -> None:
        """Compute one prompt; whatever happens, the other side gets an answer."""
        name = asked.request.request_id
        try:
            request = replace(asked.checked(), request_id=f"link-{next(self._numbers)}")
            self._engine.status.facts.limits.check(request)
            request = replace(
                request, arrival_s=time.monotonic()
            )  # clocks of two hosts have nothing in common
            outputs = await self._run(request)
            fingerprint = self._engine.status.facts.fingerprint
            answer = [one._replace(request_id=name) for one in outputs]
            connection.send(Prefilled(name, answer, request.arrival_s, fingerprint))
            self.num_prompts += 1
            if all(one.error is None for one in outputs):
                await self._send_blocks(connection, name, _after_prompt(request), shared)
            connection.send(Blocks(name, None))
        except RequestError as error:
            connection.send(Refused(name, error.message, True, error.hint, error.param, error.code))
        except EngineDead as error:
            connection.send(Refused(name, error.message))
        except Exception:
            _LOG.exception("a prompt of a link failed")
            connection.send(Refused(name, "the prefill engine failed"))

    async def _run(self, request: NewRequest) -> list[Output]:
        stream, outputs = self._engine.submit(request), list[Output]()
        num_open = request.params.num_sequences
        while num_open:
            got = await stream.get()
            num_open -= sum(output.finish_reason is not None for output in got)
            outputs += got
        return outputs

    async def _send_blocks(
        self, connection: LinkConnection, name: str, request: NewRequest, shared: bool
    ) -> None:
        """Read the blocks of a prompt and send each parcel as it comes, until cancelled."""
        read = _Read()
        hashes = prompt_hashes(request, self._engine.status.facts.limits.block_size)
        self._engine.read_blocks(request.request_id, hashes, shared, read.receive)
        try:
            while (parcel := await read.arrived.get()) is not None:
                read.held = parcel
                while connection.num_unsent_bytes > MAX_UNSENT_BYTES:
                    await asyncio.sleep(_POLL_S)
                connection.send(Blocks(name, parcel))
                read.held = None
        finally:
            read.end()


class _Read:
    """The parcels of a read; once it has ended, what is left and what still comes is released."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[AnyParcel | None] = asyncio.Queue()
        self.held: AnyParcel | None = None  # that is to be sent
        self._ended = False

    def receive(self, parcel: AnyParcel | None) -> None:
        if not self._ended:
            self.arrived.put_nowait(parcel)
        elif parcel is not None:
            parcel.discard()

    def end(self) -> None:
        self._ended = True
        left = [self.held, *(self.arrived.get_nowait() for _ in range(self.arrived.qsize()))]
        for parcel in left:
            self.receive(parcel)


def _after_prompt(request: NewRequest) -> NewRequest:
    """Return the request as it goes on: the blocks of its whole prompt may be used then."""
    first = ((request.prompt_token_ids[0],),) * request.params.num_sequences  # its value is in no hash
    return replace(request, params=replace(request.params, prompt_logprobs=None), resumed=first)
