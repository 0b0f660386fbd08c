"""In-process access to the server's endpoints, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from quire.engine.status import EngineStatus
from quire.errors import EngineDead


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response."""

    status: int
    headers: dict[str, str]
    body: bytes


class LocalServer:
    """Calls the endpoints of one model in process. Bodies and responses are those of the HTTP server."""

    def __init__(self, app: ASGIApp, host: str, status: EngineStatus) -> None:
        self._app = app
        self._host = host
        self._status = status

    @property
    def chosen(self) -> Mapping[str, str]:
        """The settings chosen for the model on this machine, by name."""
        return self._status.facts.chosen

    def check_alive(self) -> None:
        """Raise EngineDead once the engine has died too often to be started again."""
        if self._status.state == "stopped":
            raise EngineDead("the engine died repeatedly and is not started again")

    async def post(self, path: str, body: bytes) -> Reply:
        """Send a JSON body to a path and wait for the complete response."""
        headers = {"host": self._host, "content-type": "application/json", "content-length": str(len(body))}
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": None,
            "server": None,
            "state": {},
        }
        incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if not incoming:
                await asyncio.Event().wait()  # the client never disconnects early
            return incoming.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        start, *parts = sent
        named = {name.decode().lower(): value.decode("latin-1") for name, value in start["headers"]}
        return Reply(start["status"], named, b"".join(part.get("body", b"") for part in parts))
