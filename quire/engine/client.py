"""The client side of an engine: the EngineClient protocol, the streams of outputs, a client on an event loop.

The engine may run in this process (in_process.py), in another one (server/remote.py), or be several engines
with a router. The server depends only on EngineClient.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from quire.engine.open_request import OpenRequest, OpenRequests, RequestObserver
from quire.engine.status import EngineStatus, StepReport
from quire.errors import EngineDead, RequestError
from quire.types import NewRequest, Output

_LOG = logging.getLogger(__name__)


class EngineClient(Protocol):
    """An engine, as used by the tasks of one event loop. Only `close` waits.

    `on_record` is called with the report of each step.
    """

    on_record: Callable[[StepReport], None] | None

    @property
    def status(self) -> EngineStatus:
        """The state, facts and limits of the engine, of several together; updated in place."""

    @property
    def statuses(self) -> Mapping[int, EngineStatus]:
        """The status of each engine by its number: of one engine, which is 0, or of several replicas."""

    def submit(self, request: NewRequest) -> Stream:
        """Send a request; return the stream of its outputs.

        Raises EngineDead if there is no engine, RequestError for an id in use or a request too long to be
        sent. Any other error of a request is raised by its stream.
        """

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """End a request, or one sequence of it. Final outputs follow as usual; unknown ids are ignored."""

    def watch(self, on: bool) -> None:
        """Ask for a view with each report, also after a restart; or for no more of them."""

    def healthy(self, now: float) -> str | None:
        """Return None, or the reason requests cannot be served now. `now` is time.monotonic()."""

    async def close(self) -> None:
        """Stop the engine. Open streams raise EngineDead."""


class Stream:
    """The outputs of one request, whichever engines run it. Dropping it before its end aborts the request."""

    def __init__(self, own: OpenRequest) -> None:
        self._own = own

    @property
    def replica(self) -> int:
        """The number of the engine that has the request, or had it last."""
        return self._own.replica

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its outputs so far: those of engines that differ are joined by "+"."""
        return self._own.fingerprint

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
            self._own.owner.abort(self._own.request.request_id, sequence)

    def __del__(self) -> None:
        if not self._own.ended:
            self._own.owner.abort_later(self._own)


class LoopClient:
    """Open requests, status and reports of a client on an event loop."""

    def __init__(self) -> None:
        self.replica = 0  # its number among several
        self.status = EngineStatus()
        self.on_record: Callable[[StepReport], None] | None = None
        self._requests = OpenRequests()

    @property
    def statuses(self) -> Mapping[int, EngineStatus]:
        return {0: self.status}

    @property
    def num_open(self) -> int:
        """The number of open requests."""
        return len(self._requests)

    def observe(self, observer: RequestObserver) -> None:
        """Tell this observer of the outputs and the ends of requests."""
        self._requests.observer = observer

    def _take_step(self, outputs: list[Output], report: StepReport | None) -> None:
        """Process the outputs of a step, whole or in parts, of which the last has the report."""
        self._requests.deliver(outputs)
        if report is None:
            return
        if self.replica:
            report = report._replace(replica=self.replica)
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
