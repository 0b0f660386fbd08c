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
from quire.engine.client import LoopClient, OpenRequest, Stream
from quire.errors import ConfigError, EngineDead, QuireError, RequestError
from quire.progress import announce, loading_bar
from quire.server import engine_messages as messages
from quire.server.engine_child import COMMAND, EngineChild, reason
from quire.server.restart_policy import RestartPolicy
from quire.types import NewRequest

MAX_DEATHS = 2  # that one request may be in
NUM_TICKS = 20  # that the watchdog sees no step end before it kills
AUTOPSY_S = 0.3  # a process whose socket is closed has so long to say its exit status
_LOG = logging.getLogger(__name__)


class RemoteEngine(LoopClient):
    """The EngineClient that starts the engine's process, follows it, and starts it again when it dies.

    To be used from the event loop that ran `start`. `command` starts the process; the number of its socket
    is appended.
    """

    def __init__(
        self, config: EngineConfig, *, policy: RestartPolicy | None = None, command: Sequence[str] = COMMAND
    ) -> None:
        super().__init__()
        self.config = config
        self._policy = policy or RestartPolicy()
        self._command = command
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
        own = self._requests.open(request)
        self._send(own)
        return Stream(self, own)

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """End a request, or one sequence of it; one that has ended is passed over."""
        own = self._requests.get(request_id)
        if own is None:
            return
        own.final = True
        if own.sent and self._child is not None:
            self._child.send(messages.Abort(request_id, sequence))
        else:
            self._requests.fail(request_id, EngineDead("aborted while the engine was restarting"))

    def abort_later(self, own: OpenRequest) -> None:
        """Abort from wherever the garbage collector runs."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort_dropped, own)

    def _abort_dropped(self, own: OpenRequest) -> None:
        if not own.ended:  # else its id may be another's by now
            self.abort(own.request.request_id)

    async def close(self) -> None:
        """End the process. Open streams raise EngineDead."""
        self.status.state = "stopped"
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        self._fail_all(EngineDead("the engine was stopped"))
        if self._child is not None:
            await self._child.end(self._policy.stop_s)

    def healthy(self, now: float) -> str | None:
        """None, or why requests cannot be served now. `now` is of time.monotonic."""
        if (problem := self._absent()) is not None:
            return problem
        return self.status.stalled(now, self._policy.stall_s)

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
        for own in self._requests:
            if not own.sent:
                self._send(own)

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
        self._fail_all(EngineDead(cause))

    async def _follow(self) -> None:
        policy, deaths = self._policy, deque[float](maxlen=self._policy.max_deaths)
        death = await self._death()
        while True:
            now = time.monotonic()
            deaths.append(now)
            num_deaths = sum(now - death_s < policy.window_s for death_s in deaths)
            _LOG.error("%s", death.message)
            self.status.state = "restarting"
            self._bury(death.message)
            if num_deaths >= policy.max_deaths:
                return self._give_up(f"given up after {num_deaths} deaths: {death.message}")
            await asyncio.sleep(policy.delay_s(num_deaths))
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
        steps, num_still, tick_s = -1, 0, self._policy.hang_s / NUM_TICKS
        while not child.ended.done():
            await asyncio.wait((child.ended,), timeout=tick_s)
            still = self.status.has_work and self.status.steps == steps
            num_still = num_still + 1 if still else 0
            steps = self.status.steps
            if num_still >= NUM_TICKS:
                self._failed = messages.Failed(f"no step of the engine ended for {self._policy.hang_s:g} s")
                child.process.kill()
                return

    # What it says

    def _receive(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Stepped():
                self._take_step(message.outputs, message.report)
            case messages.RequestRefused(request_id):
                self._refuse(request_id, message.error())
            case messages.Loading(done, total):
                self._show(done, total)
            case messages.Announced(line, nbytes):
                announce(line, nbytes)
            case messages.Ready(facts):
                self.status.take_facts(facts)
                if self._loaded is not None:
                    self._loaded.set_result(None)
            case messages.Failed():
                self._failed = message

    def _send(self, own: OpenRequest) -> None:
        if self._child is None:
            return
        try:
            self._child.send(messages.Submit(own.request))
        except messages.BadFrame as bad:
            error = RequestError(f"the request is {bad}", "shorten the prompt", "prompt")
            self._requests.fail(own.request.request_id, error)
            raise error from None
        self.status.take_work()
        own.sent = True

    def _bury(self, cause: str) -> None:
        """After a death: end what cannot be run again, keep the rest for the next process."""
        for own in self._requests:
            own.num_deaths += own.sent
            name = own.request.request_id
            if own.num_deaths >= MAX_DEATHS:
                hint = "it died before with this request in it: do not send it again"
                self._requests.fail(name, EngineDead(cause, hint, retry=False))
            elif own.final:
                hint = "the engine is started again: send the request again"
                self._requests.fail(name, EngineDead(cause, hint))
            else:
                own.restart()
        self.status.take_death()
