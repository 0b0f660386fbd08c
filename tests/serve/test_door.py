"""While the queue is full, plain requests are turned away by their heads; all others go the long way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from guarded import Guarded, Quick, error_of, make_metrics, parse, read_all, read_one, serve
from requests_over_http import LONG, SHORT, Background, wait_for
from server import running

from quire.config import EngineConfig, ServerConfig
from quire.server import door
from quire.server.connection import Protocol, Refusal
from quire.server.door import Door
from quire.server.exchange import GENERATING
from quire.server.limits import checks
from quire.server.service import ServiceState

KEY = "a-key-of-this-test"
LINES = (b"Host: localhost:1", b"Content-Type: application/json", b"Content-Length: 2")


def request(*more: bytes, lines: tuple[bytes, ...] = LINES, body: bytes = b"{}", **line: str) -> bytes:
    """A plain request with some of it changed."""
    words = {"method": "POST", "path": "/v1/completions", "version": "HTTP/1.1"} | line
    first = " ".join(words.values())
    return b"\r\n".join((first.encode(), *lines, *more, b"", body))


def instead(line: bytes) -> bytes:
    """A plain request with one of its headers replaced."""
    name = line.partition(b":")[0].strip()
    return request(lines=tuple(line if own.startswith(name + b":") else own for own in LINES))


def make_door(keys: tuple[str, ...] = (), **changed: Any) -> Door:
    """The door of a server that lets one request wait, and one does."""
    config = ServerConfig(max_queued_requests=1, max_queued_tokens=100)
    unused: Any = SimpleNamespace()
    serving = ServiceState(
        config, EngineConfig(), unused, unused, make_metrics(), ("demo",), bool(keys), unused
    )
    serving.num_queued_requests = 1
    for name, value in changed.items():
        setattr(serving, name, value)
    return Door(serving, checks(config, keys))


def at(own: Door, data: bytes) -> Refusal | None:
    async def look() -> Refusal | None:
        return own.refusal(data)

    return asyncio.run(look())


def test_a_plain_request_is_told_when_to_come_back() -> None:
    own = make_door()
    refusal = at(own, request(b"X-Request-ID: mine-7"))
    assert refusal is not None
    status, headers, body = parse(refusal.answer)
    assert error_of((status, headers, body)) == (503, "server_overloaded")
    assert "the queue is full: 1 requests wait" in json.loads(body)["error"]["message"]
    assert int(headers["retry-after"]) >= 1
    assert headers["x-request-id"] == "mine-7"
    assert int(headers["content-length"]) == len(body)
    assert refusal.num_to_come == 0
    text = own._serving.metrics.render().decode()
    assert 'reason="requests"} 1.0' in text
    assert 'http_requests_total{method="POST",path="/v1/completions",status="5xx"} 1.0' in text


def test_what_it_says_is_what_waits() -> None:
    refusal = at(make_door(num_queued_requests=0, num_queued_tokens=1234), request(path="/v1/messages"))
    assert refusal is not None
    told = json.loads(parse(refusal.answer)[2])
    assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")
    assert "1,234 prompt tokens wait" in told["error"]["message"]
    assert parse(refusal.answer)[1]["request-id"] == parse(refusal.answer)[1]["x-request-id"]


@pytest.mark.parametrize(
    ("data", "num_to_come"),
    [
        (request(b"Connection: Keep-Alive"), 0),
        (request(b"X-Api-Key: any", b"User-Agent: A/1 (b; c)", b"Accept:", b"x:  \xe9 "), 0),
        (request(body=b""), 2),
        (request(*[b"x: a"] * 61), 0),
        (request(lines=(*LINES[:2], b"content-LENGTH:  300 "), body=b"{" * 100), 200),
    ],
)
def test_plain_heads(data: bytes, num_to_come: int) -> None:
    refusal = at(make_door(), data)
    assert refusal is not None
    assert refusal.num_to_come == num_to_come


@pytest.mark.parametrize(
    "data",
    [
        request(method="GET"),
        request(method="post"),
        request(version="HTTP/1.0"),
        request(path="/v1/completions?a=b"),
        request(path="/v1/completions/"),
        request(path="/v1//completions"),
        request(path="/tokenize"),
        request(path="http://localhost/v1/completions"),
        b" " + request(),
        request()[:-3],
        request()[:40],
        request(lines=LINES[:2]),
        request(b"Content-Length: 2"),
        request(b"content-length: 3"),
        instead(b"Content-Length: 2, 2"),
        instead(b"Content-Length: +2"),
        instead(b"Content-Length: 0x2"),
        instead(b"Content-Length : 2"),
        instead(b"Content-Length: " + b"0" * 5000 + b"2"),
        instead(b"Content-Length: 99999999"),
        request(b"Transfer-Encoding: chunked"),
        request(b"transfer-encoding: identity"),
        request(b"Expect: 100-continue"),
        request(b"Upgrade: h2c"),
        request(b"Connection: close"),
        request(b"Connection: keep-alive, x"),
        request(b"Connection: close", b"Connection: keep-alive"),
        request(*[b"x: a"] * 62),
        request(b"x: " + b"a" * 8192),
        request(b"Origin: https://a.example"),
        request(b" folded: a"),
        request(b"x: a\r\n\tb"),
        request(b"x: a\0b"),
        request(b"x: a\rb"),
        request(b"x y: a"),
        request(b": a"),
        request(b"no colon"),
        request(b"Content-Encoding: gzip"),
        instead(b"Content-Type: text/plain"),
        instead(b"Host: a.example"),
        request(b"Host: localhost"),
        request(lines=LINES[1:]),
        request() + b"P",
        request() + request(),
    ],
)
def test_all_else_goes_the_long_way(data: bytes) -> None:
    own = make_door()
    assert at(own, data) is None
    assert at(own, request()) is not None


def test_it_stands_open_while_there_is_room_and_when_the_server_ends() -> None:
    """Who comes at the end is told of the end."""
    assert at(make_door(num_queued_requests=0), request()) is None
    assert at(make_door(num_queued_requests=0, num_queued_tokens=100), request()) is None
    assert at(make_door(refusing=True), request()) is None


def test_who_lacks_a_key_is_not_told_of_the_queue() -> None:
    own = make_door((KEY,))
    assert at(own, request()) is None
    assert at(own, request(b"Authorization: Bearer wrong")) is None
    assert at(own, request(b"Authorization: Bearer " + KEY.encode())) is not None


def test_refusals_are_logged_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door, "TOLD_S", 0.05)
    caplog.set_level("INFO", "quire")
    own = make_door()

    async def many() -> None:
        for count in (3, 2):
            for _ in range(count):
                own.refusal(request())
            await asyncio.sleep(0.1)

    asyncio.run(many())
    told = [record.fields for record in caplog.records if record.message == "turned away"]
    assert told == [{"status": 503, "too_many": "requests", "requests": count} for count in (3, 2)]


# On a connection


class Short(Quick):
    """A connection that is kept for a moment only."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.timeout_keep_alive = 0.4  # type: ignore[assignment]


GET = b"GET /size HTTP/1.1\r\nHost: localhost\r\n\r\n"
NO = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno"


def turn_away(data: bytes) -> Refusal | None:
    """Turns away what says NO, and how much of it is to come: NO 3"""
    word, _, rest = data.partition(b"\n")
    return Refusal(NO, int(word[3:]) - len(rest)) if word.startswith(b"NO") else None


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with serve(protocol=partial(Short, turn_away=turn_away)) as running:
        yield running


def test_a_connection_goes_on_after_a_refusal(guarded: Guarded) -> None:
    """Its rest is passed over, in whatever pieces it comes; what comes after it is a request again."""
    with guarded.connect() as client:
        for rest in ([], [b"ab", b"c"], [b"abc" + GET], [b"a", b"bc" + GET[:9], GET[9:]]):
            client.sendall(b"NO 3\n" if rest else b"NO 0\n")
            assert read_one(client)[0] == 503
            for piece in rest:
                client.sendall(piece)
                time.sleep(0.02)
            if not b"".join(rest).endswith(GET):
                client.sendall(GET)
            assert read_one(client)[0] == 200


def test_only_what_begins_a_request_is_turned_away(guarded: Guarded) -> None:
    """Not what is in a body or in the middle of a head."""
    head = (
        b"POST /size HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 5\r\n"
    )
    with guarded.connect() as client:
        for pieces in ((head + b"\r\n", b"NO 3\n"), (head + b"x: a", b"NO 3\n: b\r\n\r\n12345")):
            for piece in pieces:
                client.sendall(piece)
                time.sleep(0.05)
            assert read_one(client)[0] in (200, 400)


def test_what_never_comes_is_not_awaited_for_ever(guarded: Guarded) -> None:
    with guarded.connect() as client:
        client.sendall(GET)
        assert read_one(client)[0] == 200
        begin = time.monotonic()
        client.sendall(b"NO 3\n")
        assert read_all(client) == NO
    assert time.monotonic() - begin < 1.5


def test_each_refusal_keeps_the_connection(guarded: Guarded) -> None:
    """For as long as an answer does, and not longer."""
    with guarded.connect() as client:
        client.sendall(GET)
        assert read_one(client)[0] == 200
        for _ in range(4):
            client.sendall(b"NO 0\n")
            assert read_one(client)[0] == 503
            time.sleep(0.25)
        begin = time.monotonic()
        assert read_all(client) == b""
        assert time.monotonic() - begin < 1.5


def test_who_does_not_read_is_not_written_to_for_ever() -> None:
    """From some point on it is not turned away any more, so that no more is kept for it."""
    asked: list[bytes] = []

    def refuse(data: bytes) -> Refusal:
        asked.append(data)
        return Refusal(b"x" * 65536, 0)

    with serve(protocol=partial(Protocol, turn_away=refuse)) as guarded, guarded.connect() as client:
        with contextlib.suppress(OSError):
            for _ in range(1000):
                client.sendall(b"NO\n")
                time.sleep(0.001)
        assert 1 < len(asked) < 500


def test_it_says_what_the_long_way_says() -> None:
    """A server that is full: the plain request and one from a browser get the same answer."""
    with running("--device", "reference", "--max-num-seqs", "1", "--max-queued-requests", "1") as server:
        held = Background(server, LONG)
        assert held.first.wait(30)
        Background(server, SHORT)
        wait_for(lambda: server.load()["num_requests_queued"] == 1, 10, "one waits")
        for path in GENERATING:
            content = {
                "/v1/completions": {"prompt": "a", "max_tokens": 3},
                "/v1/responses": {"input": "a"},
            }.get(path, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3})
            answers = []
            for more in ({}, {"origin": "http://a.example"}):  # each on a connection of its own
                with server.client() as client:
                    named = {"x-request-id": "one"} | more
                    answers.append(client.post(path, json=content, headers=named))
            assert ["date" in answer.headers for answer in answers] == [False, True]
            for answer in answers:
                answer.headers.pop("date", None)
            first, second = answers
            assert (first.status_code, first.content) == (second.status_code, second.content)
            assert dict(first.headers) == dict(second.headers)
        unread = {"origin": "http://a.example", "content-type": "application/json"}
        for path in GENERATING:
            with server.client() as client:
                assert client.post(path, content=b"{", headers=unread).status_code == 503
        wait_for(lambda: "turned away" in server.log, 3, "a line of the log")
