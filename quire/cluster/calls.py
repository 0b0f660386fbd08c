"""Calls to replicas in other processes or hosts: what carries them, and the ids that requests have there."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from typing import NamedTuple, Protocol

from quire.engine.status import EngineStatus
from quire.engine.view import View


class Calls(Protocol):
    """The carrier of the calls. A call raises any exception when the replica is lost."""

    def generate(self, request_id: str, call: bytes, host: str, sent_s: float) -> AsyncGenerator[bytes, None]:
        """Run a request on the replica that `CalledReplicas.choose` chooses for it."""

    async def abort(self, replica: str, request_id: str, sequence: int | None) -> None:
        """End a request of a replica, or one sequence of it."""

    async def poll(self, replica: str, name: str, watches: bool, ready: bool, wanted: int) -> bytes:
        """Return the news of a replica for a follower of this name, who takes it to be `ready` or not.

        `wanted`: how many replicas there should be, 0 if the follower does not know.
        """


class CalledReplica:
    """A replica as it is seen from here. `key` is its number in the router, which is never used again."""

    def __init__(self, number: int, key: int) -> None:
        self.number, self.key = number, key
        self.status = EngineStatus()
        self.is_present = True  # new requests may be sent there
        self.num_lost = 0  # requests that it had when it was ready last
        self.host: str | None = None

    @property
    def is_ready(self) -> bool:
        return self.is_present and self.status.state == "ready"


class Readiness:
    """A record of whether any replica is ready, and of how long requests wait for one.

    They do until `patience_s` after one was ready last: those that are replaced may be gone before others are
    ready.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._any = asyncio.Event()
        self._until_s = -math.inf  # by time.monotonic(), while none is ready

    def note(self, is_any: bool) -> None:
        """Note whether any replica is ready now."""
        if is_any:
            self._any.set()
        elif self._any.is_set():
            self._any.clear()
            self._until_s = time.monotonic() + self._patience_s

    def problem(self, now: float) -> str | None:
        """Return the reason why no request can be taken, or None."""
        return None if self._any.is_set() or now < self._until_s else "no replica is ready"

    async def found(self, forever: bool) -> bool:
        """Wait until a replica is ready; return False if none was in time."""
        try:
            async with asyncio.timeout(None if forever else self._until_s - time.monotonic()):
                return await self._any.wait()
        except TimeoutError:
            return self._any.is_set()


class LostCall(NamedTuple):
    """Why a replica does not go on with a request. `alone`: it was lost with no other request."""

    problem: str
    alone: bool = False


def given(name: str) -> str:
    """Return the id that a request has here, of the one it has in an engine."""
    return name.split("-", 2)[-1]


def named(view: View, prefix: str) -> View:
    """Return a view with the ids that requests have here, for those whose ids begin with `prefix`."""

    def rename(name: str) -> str:
        return given(name) if name.startswith(prefix) else name

    steps = [step._replace(rows=[(*row[:7], rename(row[7])) for row in step.rows]) for step in view.steps]
    groups = view.groups and [
        group._replace(tables=[one._replace(request_id=rename(one.request_id)) for one in group.tables])
        for group in view.groups
    ]
    return View(steps, groups)
