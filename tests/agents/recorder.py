"""Writes down what agents ask and are answered: around the application, in the server's process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Recorder:
    """An ASGI application that appends a line of JSON for each POST that was answered to its end."""

    def __init__(self, app: Any, file: Path) -> None:
        self._app = app
        self._file = file

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        asked, answered = bytearray(), bytearray()
        told: dict[str, Any] = {"path": scope["path"], "status": 0, "content_type": ""}

        async def hear() -> Any:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def say(message: Any) -> None:
            if message["type"] == "http.response.start":
                told["status"] = message["status"]
                told["content_type"] = dict(message["headers"]).get(b"content-type", b"").decode()
            answered.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                # Before the agent can know that it is answered, and end
                self._write(told | {"body": json.loads(asked or b"null"), "answer": answered.decode()})
            await send(message)

        if write := scope["state"].get("write_piece"):  # the shorter way of a stream's events

            async def write_piece(data: bytes) -> None:
                answered.extend(data)
                await write(data)

            scope["state"]["write_piece"] = write_piece
        await self._app(scope, hear, say)

    def _write(self, told: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")


def install(path: str) -> None:
    """Record to this file what the server of this process does from now on."""
    from quire.server import lifecycle

    make_app = lifecycle.make_app
    lifecycle.make_app = lambda *args: Recorder(make_app(*args), Path(path))  # type: ignore[assignment]
