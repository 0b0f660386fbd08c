"""Rendering of chat templates in a sandbox: they are programs from a model repository."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.sandbox.process import SandboxProcess

TIME_LIMIT_S = 2.0
MEMORY_LIMIT_BYTES = 256 << 20


class Segment(NamedTuple):
    """A part of a rendered prompt; `trusted` if the template wrote it rather than a caller."""

    text: str
    trusted: bool


class RefusedByTemplate(RequestError):
    """A template refused a conversation, or failed at it, as it would again."""


class TemplateRenderer(SandboxProcess):
    """The process that renders chat templates."""

    def __init__(
        self, time_limit_s: float = TIME_LIMIT_S, memory_limit_bytes: int = MEMORY_LIMIT_BYTES
    ) -> None:
        super().__init__(
            "quire.text.render_job", time_limit_s=time_limit_s, memory_limit_bytes=memory_limit_bytes
        )

    def render(
        self,
        source: str,
        context: Mapping[str, Any],
        trusted: Mapping[str, str | list[str]] | None = None,
        now: datetime | None = None,
    ) -> list[Segment]:
        """Render `source` with the variables of `context` and `trusted`; the latter are trusted text.

        `now` is the time that `strftime_now` formats. Raises RequestError when the template fails, does
        something forbidden, or exceeds its time or memory.
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
        """Return why `source` does not compile, or None if it does."""
        reply = self.ask(json.dumps({"source": source, "context": None}).encode() + b"\n")
        return None if "segments" in reply else reply.get("error") or _refusal(reply, self).message


def _refusal(reply: Mapping[str, Any], renderer: TemplateRenderer) -> RequestError:
    if "error" in reply:
        message = f"the chat template refused the conversation: {reply['error']}"
        return RefusedByTemplate(message, "check the roles, the tools and chat_template_kwargs", "messages")
    kind = reply["kind"]
    if kind == "time":
        message = f"the chat template did not finish in {renderer.time_limit_s:g} s"
    elif kind in ("memory", "stack"):
        message = f"the chat template needed more than {renderer.memory_limit_bytes >> 20} MiB"
    else:
        return RequestError("the render process did not start", "is jinja2 installed for this Python?")
    return RequestError(message, "shorten the conversation, or use another chat template", "messages")
