"""RemoteEngine: the engine in a process of its own, used from the event loop.

HTTP, text and computation do not share an interpreter, and a crash of the engine does not end the server.
When the engine dies, its open requests go on in the next one, from the last token that was received. One that
killed several engines ends with EngineDead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.engine.client import LoopClient, Stream
from quire.engine.open_request import MAX_DEATHS, OpenRequest
from quire.errors import EngineDead, QuireError, RequestError
from quire.progress import announce, loading_bar
from quire.recording.recorder import Recorder
from quire.server import engine_messages as messages
from quire.server.adapter_changes import AdapterChanges
from quire.server.engine_child import COMMAND, EngineChild
from quire.transfer.parcels import AnyParcel
from quire.types import NewRequest, Output

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
    engine is recorded, and what led to its death or to a failed request is written to a file. It runs on
    `processors` alone, if any, and plans with `available_bytes` of memory, by default all that is free.
    `num_sharing` engines, this one included, share their weights.

    `on_lost` is called at a death with the requests that can go on, by who gives each to a client by `adopt`,
    this one or another. Without it they go on here, when the engine is ready again, as do requests that may
    be what it died of: they are computed here, each alone, before any other.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        policy: RestartPolicy | None = None,
        command: Sequence[str] = COMMAND,
        measure: bool = False,
        recorder: Recorder | None = None,
        processors: Sequence[int] = (),
        available_bytes: int | None = None,
        num_sharing: int = 1,
    ) -> None:
        super().__init__()
        self._num_sharing = num_sharing
        self._processors = processors
        self._available_bytes = available_bytes
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
        self._watched = self._followed = False
        self._computes_suspect = False  # and holds all other requests meanwhile
        self._reads: dict[str, Callable[[AnyParcel | None], None]] = {}  # who gets blocks that were asked for
        self.on_lost: Callable[[list[OpenRequest]], None] | None = None
        self.adapters = AdapterChanges(lambda: self._child, self._unavailable)
        self.change_adapter = self.adapters.change

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
        own = self._requests.open(OpenRequest(request, self))
        if not self._computes_suspect:
            self._send(own)
        return Stream(own)

    def adopt(self, own: OpenRequest) -> None:
        """Go on with a request of another client: now, or when the engine is ready.

        Raises EngineDead if it never will be, RequestError for an id in use.
        """
        if self.status.state == "stopped":
            raise EngineDead("the engine is stopped")
        self._requests.open(own)
        own.owner = self
        if self._unavailable() is None:
            self._send_waiting()

    def hand_over(self) -> list[OpenRequest]:
        """Return all open requests, for `adopt` by other clients, and end them in this engine.

        It is not used after that.
        """
        for own in self._requests:
            if own.sent and self._child is not None:
                self._child.send(messages.Abort(own.request.request_id))
            own.lose_engine(time.monotonic(), died=False)
            self._requests.deliver(own.aborted_outputs(time.monotonic()))
        self.status.has_work = False
        return self._requests.take_all()

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """End a request, or one sequence of it. One that has ended already is ignored."""
        own = self._requests.get(request_id)
        if own is None:
            return
        own.note_abort(sequence)
        if own.sent and self._child is not None:
            self._child.send(messages.Abort(request_id, sequence))
        else:
            self._requests.deliver(own.aborted_outputs(time.monotonic()))

    def watch(self, on: bool) -> None:
        """Ask for views, or for no more; a process that starts later is asked, too."""
        self._watched = on
        if self._child is not None:
            self._child.send(messages.WatchSteps(on))

    def follow_cache(self, on: bool) -> None:
        """Ask for changes of what is cached with the reports, first for all of it; or for no more.

        A process that starts later is asked, too.
        """
        self._followed = on
        if self._child is not None:
            self._child.send(messages.FollowCache(on))

    def read_blocks(
        self, name: str, hashes: Sequence[bytes], shared: bool, receive: Callable[[AnyParcel | None], None]
    ) -> None:
        """Ask for the leading blocks of a chain that are in the cache; `name` is not that of an open read.

        `receive` is called with parcels of them, in shared memory if asked for, and with None after the last;
        at the latest when the engine dies.
        """
        if self._child is None or self._unavailable() is not None:
            receive(None)
            return
        self._reads[name] = receive
        self._child.send(messages.ReadBlocks(name, list(hashes), shared))

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
            child = self._child = await EngineChild.spawn(self._command, self._receive, self._processors)
        except OSError as error:
            raise EngineDead(f"the engine's process could not be started: {error}") from None
        self.status.pid = child.process.pid
        try:
            limits = self._recorder.limits if self._recorder is not None else None
            memory = self._available_bytes, self._num_sharing
            child.send(messages.Start(self.config, self._measure, limits, *memory, self.adapters.paths))
            if self._watched:
                child.send(messages.WatchSteps(True))
            if self._followed:
                child.send(messages.FollowCache(True))
            with loading_bar(self.config.model) as self._show_progress:
                await asyncio.wait((self._ready, child.ended), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await child.end(0)
            raise
        if not self._ready.done():
            raise await self._cause_of_death(child)
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
            gives_up = num_deaths >= policy.max_deaths
            self.status.state = "stopped" if gives_up else "restarting"
            self._lose_requests(death.message)
            if gives_up:
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

    def _lose_requests(self, cause: str) -> None:
        """After a death, pass on the requests that can go on, and end the others."""
        lost_s = min(time.monotonic(), self.status.last_progress_s)
        self._requests.lose_engine(lost_s)
        for own in self._requests:
            if own.kills:
                hint = f"{MAX_DEATHS} engines died while they computed it alone: do not send it again"
                self._requests.fail(own.request.request_id, EngineDead(cause, hint, retry=False))
        self.status.take_death()
        reads, self._reads = self._reads, {}
        for receive in reads.values():
            receive(None)
        self.adapters.fail(cause)
        if self.on_lost is not None:
            stays = self.status.state == "restarting"
            self.on_lost(self._requests.take_unsuspected() if stays else self._requests.take_all())

    # Messages

    def _receive(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Stepped():
                self._take_step(message.outputs, message.report)
                self._send_held()
                if self._recorder is not None and any(map(_failed, message.outputs)):
                    self._recorder.report("a request failed")
            case messages.BlocksRead(request_id, parcel):
                receive = self._reads.get(request_id)
                if parcel is None:
                    self._reads.pop(request_id, None)
                if receive is not None:
                    receive(parcel)
            case messages.Journaled(chunk, kind):
                if self._recorder is not None:
                    self._recorder.take(chunk, kind)
            case messages.RequestAccepted(request_id):
                self._expose([request_id], False)
            case messages.RequestsAdmitted(request_ids):
                self._expose(request_ids, True)
            case messages.RequestRefused(request_id):
                self._refuse(request_id, message.error())
                self._send_held()
            case messages.Loading(done, total):
                self._show_progress(done, total)
            case messages.Measuring():
                _LOG.info("measuring this machine, once: the ceilings of its memory and arithmetic")
            case messages.Announced(line, nbytes):
                announce(line, nbytes)
            case messages.AdapterChanged(_, adapters):
                self.status.facts = self.status.facts._replace(adapters=adapters)
                self.adapters.take(message)
            case messages.Ready(facts) if self.status.state != "stopped":  # it was not closed meanwhile
                self.status.take_facts(facts)
                if self._ready is not None:
                    self._ready.set_result(None)
                self._send_waiting()  # before anything that comes now

    def _expose(self, request_ids: Iterable[str], exposed: bool) -> None:
        """Note whether the engine's death may be due to these requests: not while they wait."""
        for request_id in request_ids:
            if (own := self._requests.get(request_id)) is not None:
                own.exposed = exposed

    def _send(self, own: OpenRequest) -> None:
        if self._child is None:
            return
        try:
            brought, own.brought = own.brought, ()
            for parcel in brought:
                self._child.send(messages.Bring(own.request.request_id, parcel))
            self._child.send(messages.Submit(own.continued()))
        except messages.BadFrame as bad:
            error = RequestError(f"the request is {bad}", "shorten the prompt, send fewer images", "prompt")
            self._requests.fail(own.request.request_id, error)
            raise error from None
        self.status.take_work()
        own.take_fingerprint(self.status.facts.fingerprint)
        own.sent = own.exposed = True
        own.replica = self.replica

    def _send_held(self) -> None:
        """Send what waits, once the suspect got a token or has ended."""
        if self._computes_suspect:
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send the requests that wait: the next suspect alone, or all if there is none."""
        while sendable := self._requests.sendable():
            for own in sendable:
                with suppress(RequestError):  # too long to be sent: its stream raises the error
                    self._send(own)
        self._computes_suspect = self._requests.has_suspect_sent


def _failed(output: Output) -> bool:
    """Return True if a sequence failed, and not by its own parameters."""
    return output.error is not None and not output.error.by_request
