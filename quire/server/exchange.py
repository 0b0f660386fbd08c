"""One HTTP request from its arrival to its end: refused while draining, ended when its client is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import Overloaded
from quire.server.errors import report, response_for
from quire.server.generation import Generation
from quire.server.service import EXCHANGE, Exchange, ServiceState

DRAIN_RETRY_S = 5
GENERATING = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"),
        *("/api/chat", "/api/generate", "/completion", "/completions"),
    }
)


class Exchanges:
    """ASGI middleware around all endpoints. What a request started in the engine ends with it.

    A task that answers a POST is cancelled when its client goes, whatever it waits for; so endpoints need
    not watch for that.
    """

    def __init__(self, app: ASGIApp, serving: ServiceState) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._serving.refusing:
            self._serving.metrics.rejected("draining")
            refusal = Overloaded("the server is shutting down", "ask again", DRAIN_RETRY_S)
            await response_for(refusal, scope["path"])(scope, receive, send)
        elif scope["path"] in GENERATING and (crowd := self._serving.crowd()) is not None:
            scope["endpoint"] = self  # it is counted under its path, though nothing of it is read
            await response_for(self._serving.overloaded(crowd), scope["path"])(scope, receive, send)
        else:
            await self._answer(scope, _Client(receive, send))

    async def _answer(self, scope: Scope, client: _Client) -> None:
        exchange = Exchange(time.monotonic(), scope["state"]["tenant"])
        token = EXCHANGE.set(exchange)
        self._serving.exchanges.add(exchange)
        try:
            await self._app(scope, client.receive, client.send)
        except (ClientDisconnect, asyncio.CancelledError):
            if not client.gone.is_set():
                raise
        finally:
            client.close()
            for generation in exchange.generations:
                generation.abort()
                self._tell(generation, scope["state"])
            exchange.generations.clear()  # timers that began in this context hold it for a minute more
            self._serving.exchanges.discard(exchange)
            EXCHANGE.reset(token)

    def _tell(self, generation: Generation, state: dict[str, Any]) -> None:
        """What the log may say of it."""
        timings = generation.timings()
        state["tokens"] = (timings["prompt_tokens"], timings["completion_tokens"])
        if generation.failure is not None:
            state["error"] = report(generation.failure).message
        if self._serving.config.log_prompts:
            outputs = [reader.output for reader in generation.readers]
            state["prompt"] = "\n".join(output.prompt or "" for output in outputs)
            state["answer"] = "\n".join(choice.text for output in outputs for choice in output.outputs)


class _Client:
    """The two ends of a connection, watched: `gone` is set when the client is."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self.gone = asyncio.Event()
        self._ended = False
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        """The body comes from here; after its end, nothing but the news that the client is gone."""
        if self._watcher is not None:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone.set()
        elif not message.get("more_body"):
            self._watcher = asyncio.create_task(self._watch())
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self._ended = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended and self._task is not None:
            self.gone.set()
            self._task.cancel()

    def close(self) -> None:
        """End the watcher and let go of it: its traceback holds this, and through this the whole answer."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
