"""Clients of an engine in this process, which is stepped by the waiting threads or by its own."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType

from quire.engine.client import LoopClient, Stream
from quire.engine.engine import Engine, step
from quire.engine.open_request import OpenRequest, OpenRequests, another
from quire.engine.status import Facts
from quire.errors import EngineDead, RequestError
from quire.types import NewRequest

STALL_S = 10.0  # unhealthy after so long with work and no finished step


class SharedEngine:
    """An engine shared by any number of threads: a thread that waits for outputs steps it for all."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._requests = OpenRequests()
        self._lock = threading.Lock()  # the engine is used by one thread at a time
        self._aborts: deque[tuple[str, int | None]] = deque()

    def submit(self, request: NewRequest, wake: Callable[[OpenRequest], None]) -> Stream:
        """Submit a request. Raises RequestError if it can never run, EngineDead after a failure.

        `wake` is called, in the thread that ran the step, whenever there is output to take.
        """
        with self._lock, _interrupts_deferred():
            self._send_aborts()
            own = self._requests.open(OpenRequest(request, self, wake))
            try:
                self.engine.add(request)
            except BaseException:
                self._requests.take(request.request_id)
                raise
            return Stream(own)

    def step(self, wanted: Callable[[], bool]) -> None:
        """Run one step, if it is still wanted once no other thread is stepping the engine.

        A failure of the engine ends all open requests.
        """
        with self._lock, _interrupts_deferred():
            if not wanted():
                return
            self._send_aborts()
            if not self.engine.has_work:
                hint = "this is a bug: please report it"
                self._requests.fail_all(EngineDead("requests wait and the engine has no work", hint))
                return
            try:
                outputs = self.engine.step()
            except EngineDead as error:
                self._requests.fail_all(error)
            except BaseException as failure:
                self._requests.fail_all(_death(failure))
                raise
            else:
                self._requests.deliver(outputs)

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """Abort a request, or one sequence of it, now or, during a step, before the next one.

        Never blocks: the garbage collector may finalize a dropped stream in the middle of a step.
        """
        self._aborts.append((request_id, sequence))
        if self._lock.acquire(blocking=False):
            try:
                self._send_aborts()
            finally:
                self._lock.release()

    def abort_later(self, own: OpenRequest) -> None:
        """Abort a request without readers."""
        self.abort(own.request.request_id)

    def _send_aborts(self) -> None:
        while self._aborts:
            self.engine.abort(*self._aborts.popleft())


class EngineThread(LoopClient):
    """An EngineClient whose engine runs in this process, stepped by its own thread.

    The thread passes all outputs of a step to the event loop in one call. Open requests belong to one event
    loop; when it is closed, or no request is open, another loop may use the engine.
    """

    def __init__(self, engine: Engine, facts: Facts) -> None:
        super().__init__()
        self.status.take_facts(facts)
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop whose requests are open
        self._served: asyncio.AbstractEventLoop | None = None  # the loop whose requests the thread computes
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: stop
        self._failure: EngineDead | None = None  # that ended the thread
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    def submit(self, request: NewRequest) -> Stream:
        """See EngineClient."""
        self.check_alive()
        self._enter_loop()
        own = self._requests.open(OpenRequest(request, self))
        own.take_fingerprint(self.status.facts.fingerprint)
        self._commands.put(partial(self._add, request))
        self.check_alive()  # again: from here on, a failure is reported to this loop
        self.status.take_work()
        return Stream(own)

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """See EngineClient."""
        self._commands.put(partial(self._engine.abort, request_id, sequence))

    def abort_later(self, own: OpenRequest) -> None:
        """Abort from any thread that the garbage collector may run in: the queue is thread-safe."""
        self.abort(own.request.request_id)

    def watch(self, on: bool) -> None:
        """See EngineClient."""
        self._commands.put(partial(self._engine.watch, on))

    def follow_cache(self, on: bool) -> None:
        """Ask for changes of what is cached with the reports, first for all of it; or for no more."""
        self._commands.put(partial(self._engine.follow_cache, on))

    def check_alive(self) -> None:
        """Raise EngineDead if requests are no longer accepted."""
        if self._failure is not None:
            raise another(self._failure)
        if self.status.state != "ready":
            raise EngineDead(f"the engine is {self.status.state}")

    def healthy(self, now: float) -> str | None:
        """See EngineClient."""
        try:
            self.check_alive()
        except EngineDead as error:
            return error.message
        return self.status.stalled(now, STALL_S)

    async def close(self) -> None:
        """See EngineClient. The current step is completed first."""
        self.status.state = "stopped"
        self._fail_all(EngineDead("the engine was stopped"))
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Stop the thread and wait for it; callable from any thread."""
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._requests and not self._loop.is_closed():
            raise RuntimeError("requests are open in another event loop")
        left = list(self._requests)
        for own in left:
            own.wake = None  # its task will never run
        self._requests.fail_all(EngineDead("the request's event loop was closed"))
        self._loop = loop
        self._commands.put(partial(self._serve, loop, [own.request.request_id for own in left]))

    # In the engine thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self._engine.wait_s == 0.0:
                    outputs, report = step(self._engine)
                    if report is not None:
                        self._post(self._served, self._take_step, outputs, report)
        except BaseException as failure:
            self._failure = failure if isinstance(failure, EngineDead) else _death(failure)
            self._post(self._loop, self._end, self._failure)
        finally:
            self._engine.close()

    def _run_commands(self) -> bool:
        """Run pending commands, waiting for one while there is no work. Return False to stop."""
        wait_s = self._engine.wait_s
        with suppress(Empty):
            while (command := self._commands.get(wait_s != 0.0, wait_s)) is not None:
                command()
                wait_s = 0.0
            return False
        return True

    def _serve(self, loop: asyncio.AbstractEventLoop, left: list[str]) -> None:
        """Serve this event loop from now on, and abort what the previous one left."""
        for request_id in left:
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._engine.step()
        self._served = loop

    def _add(self, request: NewRequest) -> None:
        try:
            self._engine.add(request)
        except RequestError as error:
            self._post(self._served, self._refuse, request.request_id, error)

    def _post(
        self, loop: asyncio.AbstractEventLoop | None, function: Callable[..., None], *args: object
    ) -> None:
        """Schedule a call on an event loop; a closed loop is ignored, since nothing waits there."""
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(function, *args)

    def _end(self, error: EngineDead) -> None:
        self.status.state = "stopped"
        self._fail_all(error)


def _death(failure: BaseException) -> EngineDead:
    error = EngineDead(f"a step failed ({type(failure).__name__}: {failure})", "load the model again")
    error.__cause__ = failure
    return error


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C to the end of a step: an interrupted step leaves the engine in an unknown state."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # Ctrl-C is ignored or kills the process: nothing to defer
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught:
            previous(*caught[0])
