"""Renders chat templates in another process (see `worker`): they are programs from a model repository."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.text.worker import Worker

TIME_LIMIT_S = 2.0
MEMORY_LIMIT_BYTES = 256 << 20


class Segment(NamedTuple):
    """A stretch of a rendered prompt; `trusted` if the template wrote it, and not a caller."""

    text: str
    trusted: bool


class Sandbox(Worker):
    """The render process."""

    def __init__(
        self, time_limit_s: float = TIME_LIMIT_S, memory_limit_bytes: int = MEMORY_LIMIT_BYTES
    ) -> None:
        super().__init__(
            "text", "render_worker", time_limit_s=time_limit_s, memory_limit_bytes=memory_limit_bytes
        )

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def render(
        self,
        source: str,
        context: Mapping[str, Any],
        trusted: Mapping[str, str | list[str]] | None = None,
        now: datetime | None = None,
    ) -> list[Segment]:
        """Render `source` with the variables of `context` and, as the template's own, of `trusted`.

        `now` is the clock of `strftime_now`. Raises RequestError when the template fails, asks for what
        is not allowed, or exceeds its time or memory.
        """
        clock = now.isoformat() if now else None
        request = {"source": source, "context": context, "trusted": dict(trusted or {}), "now": clock}
        try:
            line = json.dumps(request, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            message = f"the conversation cannot be written as JSON: {error}"
            raise RequestError(message, param="messages") from None
        reply = self.ask(line)
        if "segments" not in reply:
            raise _refusal(reply, self)
        return [Segment(text, trust) for text, trust in reply["segments"]]

    def problem_of(self, source: str) -> str | None:
        """Why `source` is no template; None when it is one."""
        reply = self.ask(json.dumps({"source": source, "context": None}).encode() + b"\n")
        return None if "segments" in reply else str(reply.get("error") or _refusal(reply, self).message)


def _refusal(reply: Mapping[str, Any], sandbox: Sandbox) -> RequestError:
    kind = reply.get("kind")
    if kind == "template":
        message = f"the chat template refused the conversation: {reply['error']}"
        return RequestError(message, "check the roles, the tools and chat_template_kwargs", "messages")
    if kind == "time":
        message = f"the chat template did not finish in {sandbox.time_limit_s:g} s"
    elif kind in ("memory", "stack"):
        message = f"the chat template needed more than {sandbox.memory_limit_bytes >> 20} MiB"
    else:
        return RequestError("the render process did not start", "is jinja2 installed for this Python?")
    return RequestError(message, "shorten the conversation, or use another chat template", "messages")
