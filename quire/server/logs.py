"""The server's log: one line per request and per other event, as text or as JSON.

Values sent by clients are escaped, so that none can forge a line or control a terminal. Prompts are logged
only on request, keys never.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import sys
import time
import traceback
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import QuireError, escape
from quire.server.errors import response_for
from quire.server.metrics import HttpCounts

CLIENT_GONE = 499  # in logs and metrics, when the client disconnected before a status was sent
MAX_TEXT = 2000  # characters of a prompt or an answer that are logged
QUIET = frozenset(  # logged only where they fail
    {"/health", "/health/live", "/health/ready", "/ping", "/v1/health", "/metrics", "/page/{file}"}
)
_LOG = logging.getLogger("quire.server.http")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# Beginnings of uvicorn's messages about errors that are logged here as well
_DUPLICATES = (
    *("Invalid HTTP request", "Exception in ASGI", "ASGI callable returned without"),
    *("Unsupported upgrade request", "No supported WebSocket library"),
)


class LineFormatter(logging.Formatter):
    """Format a record as one line of JSON, or as a line of text with an indented traceback below it.

    `extra={"fields": {...}}` adds named values to a record.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._write = self._as_json if as_json else self._as_text

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = getattr(record, "fields", {})
        error = record.exc_info[1] if record.exc_info else None
        trace = "".join(traceback.format_exception(error)) if error is not None else ""
        return self._write(record, when, fields, trace)

    def _as_json(self, record: logging.LogRecord, when: str, fields: dict[str, Any], trace: str) -> str:
        entry = {
            "time": when,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        return json.dumps(entry | fields | ({"traceback": trace} if trace else {}), default=str)

    def _as_text(self, record: logging.LogRecord, when: str, fields: dict[str, Any], trace: str) -> str:
        words = [when, record.levelname, record.name, escape(record.getMessage())]
        words += (f"{name}={_value(value)}" for name, value in fields.items())
        return "\n".join([" ".join(words), *(f"    {escape(line)}" for line in trace.splitlines())])


def _value(value: Any) -> str:
    """Format a value, in quotes if it contains spaces or quotes."""
    text = str(value)
    return escape(text) if re.fullmatch(r"[^\s\"=]+", text) else escape(json.dumps(text, ensure_ascii=False))


def setup(log_format: str) -> None:
    """Send every log line of the process to stderr, in this format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(as_json=log_format == "json"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("quire").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").addFilter(_is_no_duplicate)


def _is_no_duplicate(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_DUPLICATES)


class RequestLog:
    """ASGI middleware that gives each request an id, logs and counts it, and turns exceptions into responses.

    Endpoints may add to scope["state"], Starlette's request.state: `tokens`, the counts of prompt and answer;
    `error`, the error that ended a stream; `warnings`, those of the response; `prompt` and `answer`, which
    are logged only with --log-prompts. `named_outside`: the caller adds X-Request-Id to responses.
    """

    def __init__(
        self, app: ASGIApp, count: HttpCounts, *, log_prompts: bool = False, named_outside: bool = False
    ) -> None:
        self._app = app
        self._count = count
        self._log_prompts = log_prompts
        self._named_outside = named_outside
        self._num_shed = 0  # requests that a full queue refused, not logged yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = request_id_of(scope)
        begin_s, status = time.monotonic(), 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name in id_headers(scope["path"])[self._named_outside :]:
                    headers[name] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception as error:
            if not isinstance(error, QuireError | HTTPException):
                _LOG.error("a request failed", exc_info=error, extra={"fields": {"request_id": request_id}})
            if not status:
                await response_for(error, scope["path"])(scope, receive, send_named)
        finally:
            self._end(scope, state.get("refused") or status or CLIENT_GONE, time.monotonic() - begin_s)

    def _end(self, scope: Scope, status: int, seconds: float) -> None:
        method, path, state = scope["method"], route_path(scope), scope["state"]
        self._count(method, path, status)
        if state.get("shed"):  # there may be thousands a second: they are logged together
            if not self._num_shed:
                asyncio.get_running_loop().call_later(SHED_LOG_S, self._log_shed)
            self._num_shed += 1
            return
        fields = {"method": method, "path": path, "status": status, "ms": round(seconds * 1e3, 1)}
        if path == UNMATCHED:
            fields["raw_path"] = scope["path"][:200]
        if tokens := state.get("tokens"):
            fields |= {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]} | state.get("times", {})
        if self._log_prompts:
            fields |= {name: str(state[name])[:MAX_TEXT] for name in ("prompt", "answer") if name in state}
        if error := state.get("error"):
            fields["error"] = error
        if warnings := state.get("warnings"):
            fields["warnings"] = "; ".join(warnings)[:MAX_TEXT]
        fields["request_id"] = state["request_id"]
        level = logging.DEBUG if path in QUIET and status < 400 else logging.INFO
        _LOG.log(level, "request", extra={"fields": fields})

    def _log_shed(self) -> None:
        _LOG.info("queue full", extra={"fields": {"status": 503, "requests": self._num_shed}})
        self._num_shed = 0


UNMATCHED = "unmatched"
SHED_LOG_S = 1.0  # between two log lines about requests that a full queue refused


def route_path(scope: Scope) -> str:
    """Return the path of the route, such as /v1/models/{model}: one of few, whatever clients request."""
    if "endpoint" not in scope:
        return UNMATCHED
    path: str = scope["path"]
    for name, value in scope.get("path_params", {}).items():
        if str(value):
            before, _, after = path.rpartition(str(value))
            path = f"{before}{{{name}}}{after}"
    return path


def id_headers(path: str) -> tuple[str, ...]:
    """Return the response headers with the request's id. Anthropic's clients read the second."""
    return ("x-request-id", "request-id") if path.startswith("/v1/messages") else ("x-request-id",)


def request_id_of(scope: Scope) -> str:
    """Return the client's X-Request-Id if it is harmless, otherwise a new id."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(given := value.decode("latin-1")):
            return given
    return f"req-{secrets.token_hex(12)}"
