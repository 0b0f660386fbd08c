"""Blocks between the engine's process and the server: those it asks for, and those that requests bring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from quire.block_store import BlockContent
from quire.engine.block_exchange import BlockExchange
from quire.server import engine_messages as messages
from quire.server.engine_messages import EngineMessage
from quire.transfer.brought_blocks import BroughtBlocks
from quire.transfer.parcels import AnyParcel, InlineTransport, SharedTransport

Read = Iterator[AnyParcel]


class BlockTraffic:
    """The engine's side. `identify` returns the fingerprint of contents, `send` sends to the server."""

    def __init__(
        self,
        exchange: BlockExchange | None,
        identify: Callable[[], bytes],
        send: Callable[[EngineMessage], None],
    ) -> None:
        self._exchange = exchange
        self._identify = identify
        self._send = send
        self._reads: deque[tuple[str, Read]] = deque()
        self._brought: dict[str, BroughtBlocks] = {}  # to the next request

    @cached_property
    def _fingerprint(self) -> bytes:
        return self._identify()  # reads samples of the checkpoint: only where blocks come and go

    @property
    def busy(self) -> bool:
        """True while the server waits for blocks."""
        return bool(self._reads)

    def read(self, asked: messages.ReadBlocks) -> None:
        """Begin to send blocks that are in the cache: one parcel with each call of `send_some`."""
        transport = SharedTransport() if asked.shared else InlineTransport()
        packed = transport.pack(self._fingerprint, self._contents(asked.hashes))
        self._reads.append((asked.request_id, iter(packed)))

    def send_some(self) -> None:
        """Send one parcel of the oldest read, or that it has ended."""
        request_id, packed = self._reads[0]
        parcel = next(packed, None)
        if parcel is None:
            self._reads.popleft()
        self._send(messages.BlocksRead(request_id, parcel))

    def bring(self, message: messages.Bring) -> None:
        """Take in blocks for the request that is submitted next."""
        if message.request_id not in self._brought:
            self._brought = {message.request_id: BroughtBlocks(self._fingerprint)}
        self._brought[message.request_id].bring(message.parcel)

    def take(self, request_id: str) -> BroughtBlocks | None:
        """Return the blocks that came with a request, if any."""
        brought, self._brought = self._brought.get(request_id), {}
        return brought

    def _contents(self, hashes: Iterable[bytes]) -> Iterator[tuple[bytes, BlockContent]]:
        """Read block by block, as they are sent: steps go on in between, and may evict the rest."""
        for block_hash in hashes:
            found = self._exchange.read([block_hash]) if self._exchange is not None else []
            if not found:
                return
            yield found[0]
