"""The client side of an engine: the EngineClient protocol, and the bookkeeping of open requests.

The engine may run in this process (in_process.py), in another one (server/remote.py), or be several engines
with a router. The server depends only on EngineClient.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from quire.engine.status import EngineStatus, StepReport
from quire.errors import EngineDead, QuireError, RequestError
from quire.types import NewRequest, Output

_LOG = logging.getLogger(__name__)


class EngineClient(Protocol):
    """An engine, as used by the tasks of one event loop. Only `close` waits.

    `on_record` is called with the report of each step.
    """

    on_record: Callable[[StepReport], None] | None

    @property
    def status(self) -> EngineStatus:
        """The state, facts and limits of the engine; updated in place."""

    def submit(self, request: NewRequest) -> Stream:
        """Send a request; return the stream of its outputs.

        Raises EngineDead if there is no engine, RequestError for an id in use or a request too long to be
        sent. Any other error of a request is raised by its stream.
        """

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """End a request, or one sequence of it. Final outputs follow as usual; unknown ids are ignored."""

    def healthy(self, now: float) -> str | None:
        """Return None, or the reason requests cannot be served now. `now` is time.monotonic()."""

    async def close(self) -> None:
        """Stop the engine. Open streams raise EngineDead."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """An open request of an engine, and its outputs that were not fetched yet.

    The buffer is bounded by the request's maximum number of tokens, however slow its reader is.
    """

    request: NewRequest
    num_open: int  # sequences without a final output yet
    outputs: list[Output] = field(default_factory=list)
    error: QuireError | None = None  # that ended it
    wake: Callable[[OpenRequest], None] | None = None  # called when there is something to fetch
    sent: bool = False  # to the current engine
    final: bool = False  # outputs were fetched, or it was aborted: it cannot be restarted
    num_deaths: int = 0  # of engines it was sent to

    @property
    def ended(self) -> bool:
        return not self.num_open or self.error is not None

    def take(self) -> list[Output]:
        """Return the outputs since the last call, possibly none. After the last, raise the error, if any."""
        if not self.outputs:
            if self.error is not None:
                raise self.error
            return []
        outputs, self.outputs = self.outputs, []
        self.final = True
        return outputs

    def restart(self) -> None:
        """Discard its outputs: another engine runs it from the start."""
        self.sent = False
        self.outputs, self.num_open = [], self.request.params.num_sequences


class OpenRequests:
    """All open requests of one engine, by id, in order of arrival.

    Each ends once: by the final output of its last sequence, or by an error. Not thread-safe; wake callbacks
    run in the calling thread.
    """

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        """Iterate over a copy: requests may end meanwhile."""
        return iter(list(self._open.values()))

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def open(self, request: NewRequest, wake: Callable[[OpenRequest], None] | None = None) -> OpenRequest:
        """Add a request. Raises RequestError for an id in use."""
        if request.request_id in self._open:
            hint = "give every open request its own id"
            raise RequestError(f"request id {request.request_id!r} is in use", hint, "request_id")
        own = OpenRequest(request, request.params.num_sequences, wake=wake)
        self._open[request.request_id] = own
        return own

    def deliver(self, outputs: list[Output]) -> None:
        """Distribute outputs to their requests. Runs once a step: keep the work per token small."""
        opened = self._open
        for output in outputs:
            own = opened.get(output.request_id)
            if own is None:
                continue
            own.outputs.append(output)
            if output.finish_reason is not None:
                own.num_open -= 1
            if own.wake is not None:
                own.wake(own)
            if not own.num_open:
                del opened[output.request_id]
                own.wake = None  # it may hold the reader, which holds this request

    def fail(self, request_id: str, error: QuireError) -> None:
        """End a request with an error."""
        if (own := self._open.pop(request_id, None)) is not None:
            own.error = error
            if own.wake is not None:
                own.wake(own)
                own.wake = None

    def fail_all(self, error: EngineDead) -> None:
        """End all requests with an error, each with its own exception."""
        for own in self:
            self.fail(own.request.request_id, another(error))


def another(error: EngineDead) -> EngineDead:
    """Copy an error: one exception raised several times would accumulate all tracebacks."""
    one = EngineDead(error.message, error.hint, error.retry)
    one.__cause__ = error.__cause__
    return one


class StreamOwner(Protocol):
    """The part of a client that its streams call."""

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """End a request, or one sequence of it."""

    def abort_later(self, own: OpenRequest) -> None:
        """Abort a request without readers, from any thread that the garbage collector may run in."""


class Stream:
    """The outputs of one request. Dropping it before its end aborts the request."""

    def __init__(self, owner: StreamOwner, own: OpenRequest) -> None:
        self._owner = owner
        self._own = own

    async def get(self) -> list[Output]:
        """Wait for the next outputs; return all since the last call, at least one.

        Raises RequestError if the engine refused the request, EngineDead if the engine died and the request
        cannot be restarted. There are no outputs after the final one of every sequence.
        """
        own = self._own
        if own.wake is not None:
            raise RuntimeError("another task waits for this stream")
        while not (outputs := own.take()):
            if not own.num_open:
                raise RuntimeError("the request has ended")
            waiter = asyncio.get_running_loop().create_future()
            own.wake = lambda _, waiter=waiter: waiter.done() or waiter.set_result(None)
            try:
                await waiter
            finally:
                own.wake = None
        return outputs

    def abort(self, sequence: int | None = None) -> None:
        """End the request, or one sequence of it. Final outputs follow as usual, with the next step."""
        if not self._own.ended:
            self._owner.abort(self._own.request.request_id, sequence)

    def __del__(self) -> None:
        if not self._own.ended:
            self._owner.abort_later(self._own)


class LoopClient:
    """Open requests, status and reports of a client on an event loop."""

    def __init__(self) -> None:
        self.status = EngineStatus()
        self.on_record: Callable[[StepReport], None] | None = None
        self._requests = OpenRequests()

    def _take_step(self, outputs: list[Output], report: StepReport | None) -> None:
        """Process the outputs of a step, whole or in parts, of which the last has the report."""
        self._requests.deliver(outputs)
        if report is None:
            return
        self.status.take_report(report)
        self.status.has_work = bool(self._requests)
        if self.on_record is not None:
            try:
                self.on_record(report)
            except Exception:  # an error in metrics must not stop the engine
                _LOG.exception("a report of the engine was not taken")

    def _refuse(self, request_id: str, error: RequestError) -> None:
        """End a request that the engine refused."""
        self._requests.fail(request_id, error)
        self.status.has_work = bool(self._requests)

    def _fail_all(self, error: EngineDead) -> None:
        self._requests.fail_all(error)
        self.status.take_death()
