"""RemoteEngine: the engine in a process of its own, used from the event loop.

HTTP, text and computation do not share an interpreter, and a crash of the engine does not end the server.
When the engine dies, requests without output so far are sent again, once; the others end with EngineDead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.engine.client import LoopClient, OpenRequest, Stream
from quire.errors import EngineDead, QuireError, RequestError
from quire.progress import announce, loading_bar
from quire.recording.recorder import Recorder
from quire.server import engine_messages as messages
from quire.server.engine_child import COMMAND, EngineChild
from quire.types import NewRequest, Output

MAX_DEATHS = 2  # of engines that one request was sent to
NUM_TICKS = 20  # in `hang_s`: how often the watchdog looks for progress
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Timeouts of the engine's process, in seconds, and the pace of its restarts.

    A step of a large model on a slow machine takes long: after `stall_s` the server only reports itself
    unhealthy, until a step ends; after `hang_s` the process is killed, so that no stream waits forever.
    """

    stall_s: float = 10.0
    hang_s: float = 300.0
    first_delay_s: float = 0.5  # before a restart; doubled with each death within `window_s`
    longest_delay_s: float = 10.0
    window_s: float = 300.0
    max_deaths: int = 10  # within `window_s`; then it is not restarted again
    stop_s: float = 2.0

    def delay_s(self, num_deaths: int) -> float:
        """Return the pause before a restart after this many deaths within the window."""
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** (num_deaths - 1))


class RemoteEngine(LoopClient):
    """An EngineClient that starts the engine's process, supervises it, and restarts it when it dies.

    Use it from the event loop that ran `start`. `command` starts the process; the number of its socket is
    appended. With `measure` it measures the machine's ceilings if they are unknown. With a `recorder` the
    engine is recorded, and what led to its death or to a failed request is written to a file.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        policy: RestartPolicy | None = None,
        command: Sequence[str] = COMMAND,
        measure: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self.config = config
        self._measure = measure
        self._policy = policy or RestartPolicy()
        self._command = command
        self._child: EngineChild | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[None] | None = None  # done when the child has loaded the model
        self._show_progress: Callable[[int, int], None] = lambda done, total: None
        self._supervisor: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process and wait until the model is loaded. Raises ConfigError or EngineDead."""
        self._loop = asyncio.get_running_loop()
        try:
            child = await self._launch()
        except BaseException:
            self.status.state = "stopped"
            raise
        self._supervisor = asyncio.create_task(self._supervise(child), name="engine supervisor")

    def submit(self, request: NewRequest) -> Stream:
        """Send a request. Raises EngineDead when no engine is ready, RequestError for an id in use."""
        if (problem := self._unavailable()) is not None:
            raise EngineDead(problem, "send the request again in a moment")
        own = self._requests.open(request)
        self._send(own)
        return Stream(self, own)

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """End a request, or one sequence of it. One that has ended already is ignored."""
        own = self._requests.get(request_id)
        if own is None:
            return
        own.final = True
        if own.sent and self._child is not None:
            self._child.send(messages.Abort(request_id, sequence))
        else:
            self._requests.fail(request_id, EngineDead("aborted while the engine was restarting"))

    def abort_later(self, own: OpenRequest) -> None:
        """Abort from any thread, such as that of the garbage collector."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort_dropped, own)

    def _abort_dropped(self, own: OpenRequest) -> None:
        if not own.ended:  # otherwise its id may belong to another request by now
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
        if self._recorder is not None:
            await self._recorder.close()

    def healthy(self, now: float) -> str | None:
        """Return None, or the reason requests cannot be served now. `now` is time.monotonic()."""
        return self._unavailable() or self.status.stalled(now, self._policy.stall_s)

    def _unavailable(self) -> str | None:
        if self.status.state != "ready":
            return f"the engine is {self.status.state}"
        if self._child is None or self._child.ended.done():
            return "the engine died"
        return None

    # Processes, one after the other

    async def _launch(self) -> EngineChild:
        """Start a process and wait until it is ready. Raises ConfigError or EngineDead."""
        self._ready = asyncio.get_running_loop().create_future()
        try:
            child = self._child = await EngineChild.spawn(self._command, self._receive)
        except OSError as error:
            raise EngineDead(f"the engine's process could not be started: {error}") from None
        self.status.pid = child.process.pid
        try:
            limits = self._recorder.limits if self._recorder is not None else None
            child.send(messages.Start(self.config, self._measure, limits))
            with loading_bar(self.config.model) as self._show_progress:
                await asyncio.wait((self._ready, child.ended), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await child.end(0)
            raise
        if not self._ready.done():
            raise await self._cause_of_death(child)
        for own in self._requests:
            if not own.sent:
                self._send(own)
        return child

    async def _supervise(self, child: EngineChild) -> None:
        """Restart the engine whenever it dies. If this fails itself, no stream is left waiting."""
        try:
            await self._restart_after_deaths(child)
        except Exception:
            _LOG.critical("the engine is no longer supervised", exc_info=True)
            self._give_up("the engine is no longer supervised")

    async def _restart_after_deaths(self, child: EngineChild) -> None:
        policy, deaths = self._policy, deque[float](maxlen=self._policy.max_deaths)
        death = await self._wait_for_death(child)
        while True:
            now = time.monotonic()
            deaths.append(now)
            num_deaths = sum(now - death_s < policy.window_s for death_s in deaths)
            _LOG.error("%s", death.message)
            if self._recorder is not None:
                self._recorder.report("the engine died")
            self.status.state = "restarting"
            self._end_or_keep_requests(death.message)
            if num_deaths >= policy.max_deaths:
                return self._give_up(f"not restarted after {num_deaths} deaths: {death.message}")
            await asyncio.sleep(policy.delay_s(num_deaths))
            self.status.num_restarts += 1
            try:
                death = await self._wait_for_death(await self._launch())
            except QuireError as failure:
                death = failure

    def _give_up(self, cause: str) -> None:
        self.status.state = "stopped"
        self._fail_all(EngineDead(cause))

    async def _wait_for_death(self, child: EngineChild) -> QuireError:
        """Wait until a process has ended, or kill it when no step has ended for `hang_s`; return the cause.

        Counts ticks instead of reading the clock: this process may itself have been suspended.
        """
        steps, num_idle_ticks, tick_s = -1, 0, self._policy.hang_s / NUM_TICKS
        while not child.ended.done() and num_idle_ticks < NUM_TICKS:
            await asyncio.wait((child.ended,), timeout=tick_s)
            hangs = self.status.has_work and self.status.steps == steps
            num_idle_ticks = num_idle_ticks + 1 if hangs else 0
            steps = self.status.steps
        if not child.ended.done():
            child.failed = messages.Failed(f"no step of the engine ended for {self._policy.hang_s:g} s")
            child.process.kill()
        return await self._cause_of_death(child)

    async def _cause_of_death(self, child: EngineChild) -> QuireError:
        cause = await child.cause_of_death()
        self.status.num_bad_frames += child.bad_frame is not None
        return cause

    def _end_or_keep_requests(self, cause: str) -> None:
        """After a death, end the requests that cannot be run again; the next process gets the others."""
        for own in self._requests:
            own.num_deaths += own.sent
            request_id = own.request.request_id
            if own.num_deaths >= MAX_DEATHS:
                hint = "it also died the last time it had this request: do not send it again"
                self._requests.fail(request_id, EngineDead(cause, hint, retry=False))
            elif own.final:
                hint = "the engine is being restarted: send the request again"
                self._requests.fail(request_id, EngineDead(cause, hint))
            else:
                own.restart()
        self.status.take_death()

    # Messages

    def _receive(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Stepped():
                self._take_step(message.outputs, message.report)
                if self._recorder is not None and any(map(_failed, message.outputs)):
                    self._recorder.report("a request failed")
            case messages.Journaled(chunk, kind):
                if self._recorder is not None:
                    self._recorder.take(chunk, kind)
            case messages.RequestRefused(request_id):
                self._refuse(request_id, message.error())
            case messages.Loading(done, total):
                self._show_progress(done, total)
            case messages.Measuring():
                _LOG.info("measuring this machine, once: the ceilings of its memory and arithmetic")
            case messages.Announced(line, nbytes):
                announce(line, nbytes)
            case messages.Ready(facts):
                self.status.take_facts(facts)
                if self._ready is not None:
                    self._ready.set_result(None)

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


def _failed(output: Output) -> bool:
    """Return True if a sequence failed, and not by its own parameters."""
    return output.error is not None and not output.error.by_request
