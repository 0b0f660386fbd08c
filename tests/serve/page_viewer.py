"""A viewer of a server's page: it reads the events in a thread, and a test waits for what it looks for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
from server import Server

LIMIT_S = 30.0
T = TypeVar("T")


class Viewer:
    """All frames so far. `error` is what ended the stream, None for a proper end."""

    def __init__(self, response: httpx.Response) -> None:
        self.lines: list[str] = []
        self.frames: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.ended = threading.Event()
        self._response = response
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._response.iter_lines():
                self.lines.append(line)
                self.frames.append(json.loads(line))
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            self.error = error
        self.ended.set()

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [step for frame in list(self.frames) for step in frame.get("steps", [])]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The first cache group, each time it was shown."""
        caches = [frame["cache"] for frame in list(self.frames) if frame.get("cache")]
        return [cache["groups"][0] for cache in caches]

    def rows(self, tag: str) -> list[list[Any]]:
        """The rows of a request, in order."""
        return [row for step in self.steps for row in step["rows"] or [] if row[7] == tag]

    def wait(self, found: Callable[[], T]) -> T:
        """Wait until something is found, and return it."""
        end_s = time.monotonic() + LIMIT_S
        while not (result := found()):
            assert not self.ended.is_set(), f"the stream ended: {self.error}"
            assert time.monotonic() < end_s, "not found in the frames"
            time.sleep(0.005)
        return result


@contextmanager
def viewing(server: Server, **headers: str) -> Iterator[Viewer]:
    """A viewer that has its first frame and a view of the caches."""
    with server.client() as client, client.stream("GET", "/page/events", headers=headers) as response:
        assert response.status_code == 200
        viewer = Viewer(response)
        viewer.wait(lambda: viewer.groups)
        yield viewer
