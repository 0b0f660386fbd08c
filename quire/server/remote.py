"""RemoteEngine: the engine in a process of its own, seen from the event loop.

HTTP, text and computing do not share an interpreter, and a crash of one is seen by the other. A request
that had given nothing when the engine died is sent again, once; the others end with EngineDead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from quire.config import EngineConfig
from quire.errors import ConfigError, EngineDead, QuireError, RequestError
from quire.progress import announce, loading_bar
from quire.server import messages
from quire.server.child import COMMAND, EngineChild, reason
from quire.server.engine_status import EngineStatus, Patience
from quire.server.stream import Inbox, Stream
from quire.types import NewRequest

MAX_DEATHS = 2  # that one request may be in
NUM_TICKS = 20  # that the watchdog sees no step end before it kills
AUTOPSY_S = 0.3  # a process whose socket is closed has so long to say its exit status
_LOG = logging.getLogger(__name__)


class RemoteEngine:
    """Starts the engine's process, follows it, and starts it again when it dies.

    To be used from the event loop that ran `start`. `on_record` is called for each step. `command` starts
    the process; the number of its socket is appended.
    """

    def __init__(
        self, config: EngineConfig, *, patience: Patience | None = None, command: Sequence[str] = COMMAND
    ) -> None:
        self.config = config
        self.status = EngineStatus()
        self.on_record: Callable[[messages.StepReport], None] | None = None
        self._patience = patience or Patience()
        self._command = command
        self._open: dict[str, Inbox] = {}  # by request id, in order of arrival
        self._child: EngineChild | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._show: Callable[[int, int], None] = lambda done, total: None
        self._failed: messages.Failed | None = None
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and wait until the model is loaded. Raises ConfigError or EngineDead."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._launch()
        except BaseException:
            self.status.state = "stopped"
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")

    def submit(self, request: NewRequest) -> Stream:
        """Send a request. Raises EngineDead when no engine is ready, RequestError for an id in use."""
        if (problem := self._absent()) is not None:
            raise EngineDead(problem, "send the request again in a moment")
        if request.request_id in self._open:
            hint = "give every open request its own id"
            raise RequestError(f"request id {request.request_id!r} is in use", hint, "request_id")
        inbox = Inbox(request, num_open=request.params.num_sequences)
        self._send(inbox)
        return Stream(self, inbox)

    async def stop(self) -> None:
        """End the process. Open streams raise EngineDead."""
        self.status.state = "stopped"
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        self._fail_all("the engine was stopped")
        if self._child is not None:
            await self._child.end(self._patience.stop_s)

    def healthy(self, now: float) -> str | None:
        """None, or why requests cannot be served now. `now` is of time.monotonic."""
        if (problem := self._absent()) is not None:
            return problem
        still_s = now - self.status.last_progress_s
        if self.status.has_work and still_s > self._patience.stall_s:
            return f"no step of the engine has ended for {still_s:.0f} s"
        return None

    def _absent(self) -> str | None:
        if self.status.state != "ready":
            return f"the engine is {self.status.state}"
        if self._child is None or self._child.ended.done():
            return "the engine died"
        return None

    # One process

    async def _launch(self) -> None:
        """Start a process and wait until it is ready. Raises ConfigError or EngineDead."""
        self._failed, self._loaded = None, asyncio.get_running_loop().create_future()
        try:
            child = self._child = await EngineChild.spawn(self._command, self._receive)
        except OSError as error:
            raise EngineDead(f"the engine's process could not be started: {error}") from None
        self.status.pid = child.process.pid
        try:
            child.send(messages.Start(self.config))
            with loading_bar(self.config.model) as self._show:
                await asyncio.wait((self._loaded, child.ended), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await child.end(0)
            raise
        if not self._loaded.done():
            raise await self._autopsy(child)
        for inbox in [one for one in self._open.values() if not one.sent]:
            self._send(inbox)

    async def _autopsy(self, child: EngineChild) -> QuireError:
        """The error that says why the process ended; it is gone then."""
        status = await child.end(AUTOPSY_S)
        if child.bad_frame is not None:
            self.status.num_bad_frames += 1
            return EngineDead(f"the engine sent {child.bad_frame}")
        if self._failed is None:
            return EngineDead(f"the engine died: {reason(status)}")
        error = ConfigError if self._failed.config else EngineDead
        return error(self._failed.message, self._failed.hint)

    async def _supervise(self) -> None:
        """Follow one process after the other. Whatever goes wrong here, no stream is left waiting."""
        try:
            await self._follow()
        except Exception:
            _LOG.critical("the engine is no longer followed", exc_info=True)
            self._give_up("the engine is no longer followed")

    def _give_up(self, cause: str) -> None:
        self.status.state = "stopped"
        self._fail_all(cause)

    async def _follow(self) -> None:
        patience, deaths = self._patience, deque[float](maxlen=self._patience.max_deaths)
        death = await self._death()
        while True:
            now = time.monotonic()
            deaths.append(now)
            num_deaths = sum(now - death_s < patience.window_s for death_s in deaths)
            _LOG.error("%s", death.message)
            self.status.state = "restarting"
            self._bury(death.message)
            if num_deaths >= patience.max_deaths:
                return self._give_up(f"given up after {num_deaths} deaths: {death.message}")
            await asyncio.sleep(patience.delay_s(num_deaths))
            self.status.num_restarts += 1
            try:
                await self._launch()
                death = await self._death()
            except QuireError as failure:
                death = failure

    async def _death(self) -> QuireError:
        """Wait until the process has ended; why it did."""
        if self._child is None:
            return EngineDead("the engine was not started")
        await self._until_end(self._child)
        return await self._autopsy(self._child)

    async def _until_end(self, child: EngineChild) -> None:
        """Wait for the end of a process, or kill it when no step has ended for `hang_s`.

        Ticks are counted and not the clock asked: this process may itself have stood still.
        """
        steps, num_still, tick_s = -1, 0, self._patience.hang_s / NUM_TICKS
        while not child.ended.done():
            await asyncio.wait((child.ended,), timeout=tick_s)
            still = self.status.has_work and self.status.steps == steps
            num_still = num_still + 1 if still else 0
            steps = self.status.steps
            if num_still >= NUM_TICKS:
                self._failed = messages.Failed(f"no step of the engine ended for {self._patience.hang_s:g} s")
                child.process.kill()
                return

    # What it says

    def _receive(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Stepped():
                self._take_step(message)
            case messages.Refused(request_id):
                if (inbox := self._open.pop(request_id, None)) is not None:
                    inbox.fail(message.error())
                self.status.has_work = bool(self._open)
            case messages.Loading(done, total):
                self._show(done, total)
            case messages.Announced(line, nbytes):
                announce(line, nbytes)
            case messages.Ready():
                self.status.take_ready(message)
                if self._loaded is not None:
                    self._loaded.set_result(None)
            case messages.Failed():
                self._failed = message

    def _take_step(self, step: messages.Stepped) -> None:
        """Hand outputs to their streams: runs once a step, so little is done for each token."""
        opened = self._open
        for output in step.outputs:
            inbox = opened.get(output.request_id)
            if inbox is None:
                continue
            inbox.outputs.append(output)
            if output.finish_reason is not None:
                inbox.num_open -= 1
                if not inbox.num_open:
                    del opened[output.request_id]
            inbox.wake()
        if (report := step.report) is not None:
            self.status.take_report(report)
            self.status.has_work = bool(opened)
            self._tell(report)

    def _tell(self, report: messages.StepReport) -> None:
        if self.on_record is None:
            return
        try:
            self.on_record(report)
        except Exception:  # whoever counts must not end whoever computes
            _LOG.exception("a report of the engine was not taken")

    # Requests

    def _send(self, inbox: Inbox) -> None:
        if self._child is None:
            return
        try:
            self._child.send(messages.Submit(inbox.request))
        except messages.BadFrame as error:
            raise RequestError(f"the request is {error}", "shorten the prompt", "prompt") from None
        if not self.status.has_work:
            self.status.has_work, self.status.last_progress_s = True, time.monotonic()
        self._open[inbox.request.request_id] = inbox
        inbox.sent = True

    def abort(self, inbox: Inbox, choice: int | None) -> None:
        """End a request, or one choice of it; one that has ended is passed over."""
        request_id = inbox.request.request_id
        if self._open.get(request_id) is not inbox:
            return
        inbox.final = True
        if inbox.sent and self._child is not None:
            self._child.send(messages.Abort(request_id, choice))
        else:
            self._drop(inbox, EngineDead("aborted while the engine was restarting"))

    def abort_dropped(self, inbox: Inbox) -> None:
        """Abort from wherever the garbage collector runs."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.abort, inbox, None)

    def _drop(self, inbox: Inbox, error: QuireError) -> None:
        self._open.pop(inbox.request.request_id, None)
        inbox.fail(error)

    def _bury(self, cause: str) -> None:
        """After a death: end what cannot be run again, keep the rest for the next process."""
        for inbox in list(self._open.values()):
            inbox.num_deaths += inbox.sent
            if inbox.num_deaths >= MAX_DEATHS:
                hint = "it died before with this request in it: do not send it again"
                self._drop(inbox, EngineDead(cause, hint, retry=False))
            elif inbox.final:
                self._drop(inbox, EngineDead(cause, "the engine is started again: send the request again"))
            else:
                inbox.sent = False
                inbox.outputs, inbox.num_open = [], inbox.request.params.num_sequences
        self.status.take_death()

    def _fail_all(self, cause: str) -> None:
        for inbox in list(self._open.values()):
            self._drop(inbox, EngineDead(cause))
        self.status.take_death()
