"""The outputs of one engine request, from the socket to who awaits them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.errors import QuireError
from quire.types import NewRequest, Output

if TYPE_CHECKING:
    from quire.server.remote import RemoteEngine


@dataclass(slots=True, eq=False)
class Inbox:
    """What has come for one request and was not fetched yet."""

    request: NewRequest
    num_open: int  # choices without a final output
    outputs: list[Output] = field(default_factory=list)
    error: QuireError | None = None
    waiter: asyncio.Future[None] | None = None
    sent: bool = False  # to the process that runs now
    final: bool = False  # outputs were delivered, or it was aborted: it cannot be run again
    num_deaths: int = 0

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def fail(self, error: QuireError) -> None:
        self.error = error
        self.wake()


class Stream:
    """The outputs of one request. Dropping it before its end aborts the request."""

    def __init__(self, engine: RemoteEngine, inbox: Inbox) -> None:
        self._engine = engine
        self._inbox = inbox

    async def get(self) -> list[Output]:
        """The next outputs: all that have come since, at least one.

        Raises RequestError when the engine refused the request, EngineDead when the engine died and the
        request cannot be run again. After the final output of every choice nothing comes any more.
        """
        inbox = self._inbox
        if inbox.waiter is not None:
            raise RuntimeError("another task waits for this stream")
        while not inbox.outputs:
            if inbox.error is not None:
                raise inbox.error
            if not inbox.num_open:
                raise RuntimeError("the request has ended")
            inbox.waiter = asyncio.get_running_loop().create_future()
            try:
                await inbox.waiter
            finally:
                inbox.waiter = None
        outputs, inbox.outputs = inbox.outputs, []
        inbox.final = True
        return outputs

    def abort(self, choice: int | None = None) -> None:
        """End the request, or one choice of it. Final outputs come as usual, with the next step."""
        self._engine.abort(self._inbox, choice)

    def __del__(self) -> None:
        if self._inbox.num_open and self._inbox.error is None:
            self._engine.abort_dropped(self._inbox)
