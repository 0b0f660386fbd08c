"""A server before two others: it passes on what the first answers, and compares what the second does."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from endurance.answers import Answer
from endurance.essence import essence, stripped

SEEDED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SEEDED_IN_OPTIONS = ("/api/chat", "/api/generate")  # of Ollama
UNEQUAL = ("/load", "/metrics")
OF_OLLAMA = frozenset(("created_at", "modified_at", "prompt_eval_count"))
MADE_ID = re.compile(rb'"id": ?"((?:resp|msg|cmpl|chatcmpl)[\w-]+)"')
PASSED = ("content-type", "x-request-id", "request-id", "retry-after", "openai-processing-ms")


class Both:
    """What two servers answered to the same requests. Those without a seed get one."""

    def __init__(self, first: str, second: str) -> None:
        options: dict[str, Any] = {"timeout": 120, "trust_env": False, "limits": httpx.Limits()}
        self.first = httpx.Client(base_url=first, **options)
        self.second = httpx.Client(base_url=second, **options)
        self.num_same = 0
        self.differences: list[str] = []
        self.pool = ThreadPoolExecutor(32)
        self.ids: dict[bytes, bytes] = {}  # that the first server made, and those of the second

    def ask_second(self, method: str, path: str, headers: dict[str, str], body: bytes) -> httpx.Response:
        for own, other in [*self.ids.items()]:
            body, path = body.replace(own, other), path.replace(own.decode(), other.decode())
        return self.second.request(method, path, headers=headers, content=body)

    def compare(self, path: str, content: bytes, status: int, other: httpx.Response) -> None:
        """Note whether both answered the same."""
        if path in UNEQUAL:
            return
        self.ids.update(zip(MADE_ID.findall(content), MADE_ID.findall(other.content), strict=False))
        kind = other.headers.get("content-type", "")
        found = [(status, gist(content, kind)), (other.status_code, gist(other.content, kind))]
        if found[0] == found[1]:
            self.num_same += 1
        else:
            self.differences.append(f"{path}: {str(found[0])[:2000]}\n  and {str(found[1])[:2000]}")


def gist(content: bytes, kind: str) -> Any:
    """Return an answer without what differs each time."""
    text = content.decode()
    if kind.startswith("text/event-stream"):
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        events = [json.loads(one) for one in data if one != "[DONE]"]
        if any("error" in event for event in events):
            return [stripped(event) for event in events][-1]
        return essence(Answer(events=events)), data[-1] == "[DONE]"
    if kind.startswith("application/x-ndjson"):
        pieces = [json.loads(line) for line in text.splitlines()]
        texts = [one.get("response") or one.get("message", {}).get("content") or "" for one in pieces]
        calls = [one["message"]["tool_calls"] for one in pieces if "tool_calls" in one.get("message", {})]
        return "".join(texts), calls, of_ollama(pieces[-1])
    return of_ollama(stripped(json.loads(text))) if kind.startswith("application/json") else text


def of_ollama(value: Any) -> Any:
    """Return an answer without the fields that Ollama has for times and for what was cached."""
    if isinstance(value, list):
        return [of_ollama(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {name: one for name, one in value.items() if name not in OF_OLLAMA}
    return {name: of_ollama(one) for name, one in kept.items() if not name.endswith("_duration")}


def with_seed(path: str, body: bytes) -> bytes:
    """Return a request that is answered the same each time."""
    with suppress(ValueError, TypeError):
        asked = json.loads(body)
        if path in SEEDED:
            return json.dumps({"seed": 7, **asked}).encode()
        if path in SEEDED_IN_OPTIONS:
            return json.dumps({**asked, "options": {"seed": 7, **(asked.get("options") or {})}}).encode()
    return body


@contextmanager
def both(first: str, second: str) -> Iterator[tuple[str, Both]]:
    """The address of a server before two others, and what it finds."""
    found = Both(first, second)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            path = self.path
            body = with_seed(path, self.rfile.read(int(self.headers.get("content-length", 0))))
            names = ("content-type", "x-request-id", "authorization", "x-api-key", "anthropic-version")
            headers = {name: value for name in names if (value := self.headers.get(name)) is not None}
            other = found.pool.submit(found.ask_second, self.command, path, headers, body)
            with found.first.stream(self.command, path, headers=headers, content=body) as reply:
                self.send_response(reply.status_code)
                for name in PASSED:
                    if name in reply.headers:
                        self.send_header(name, reply.headers[name])
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                content, held = b"", b""
                for piece in reply.iter_raw():
                    self._pass(held)
                    content, held = content + piece, piece
            found.compare(path, content, reply.status_code, other.result())
            self._pass(held)  # after it the client may go on
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_DELETE = do_HEAD = do_POST

        def _pass(self, piece: bytes) -> None:
            if piece:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.flush()

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            problem = sys.exc_info()[1]
            if not isinstance(problem, ConnectionError):  # some clients reset theirs
                found.differences.append(repr(problem))

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", found
    server.shutdown()
    server.server_close()
