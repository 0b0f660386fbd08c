"""Loading and unloading of adapters, as the server asks an engine's process for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from quire.engine.status import AdapterFacts
from quire.errors import EngineDead, RequestError
from quire.server.engine_child import EngineChild
from quire.server.engine_messages import AdapterChanged, ChangeAdapter


@runtime_checkable
class ChangesAdapters(Protocol):
    """An engine, or several, whose adapters can be changed while it serves."""

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Load an adapter from a folder or, without one, unload it; also in processes that start later.

        Raises RequestError if that is not possible, EngineDead if the engine cannot be reached.
        """


class AdapterChanges:
    """The changes that a process was asked for; `paths` are the folders of all adapters by name, once known.

    `child` is the process; `problem` tells why it cannot be asked.
    """

    def __init__(self, child: Callable[[], EngineChild | None], problem: Callable[[], str | None]) -> None:
        self.paths: dict[str, str] | None = None
        self._child = child
        self._problem = problem
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[None]] = {}

    async def change(self, name: str, path: str | None) -> None:
        """See ChangesAdapters."""
        child, problem = self._child(), self._problem()
        if problem is not None or child is None:
            raise EngineDead(problem or "the engine has not started", "send the request again in a moment")
        number, answered = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[number] = answered
        try:
            child.send(ChangeAdapter(number, name, path))
            await answered
        finally:
            del self._open[number]

    def take(self, message: AdapterChanged) -> None:
        """Take the answer of the process."""
        self.paths = paths_of(message.adapters)
        answered = self._open.get(message.number)
        if answered is None or answered.done():
            return
        if message.error is None:
            answered.set_result(None)
        else:
            answered.set_exception(RequestError(*message.error))

    def fail(self, cause: str) -> None:
        """End the open changes: the process has ended."""
        for answered in self._open.values():
            if not answered.done():
                answered.set_exception(EngineDead(cause, "send the request again in a moment"))


def paths_of(adapters: tuple[AdapterFacts, ...]) -> dict[str, str]:
    """Return the folders of adapters by name."""
    return {own.name: own.path for own in adapters}
