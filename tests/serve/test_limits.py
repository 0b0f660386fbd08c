"""What one client can make the server hold or do is bounded: heads, bodies, chunks, time, connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import resource
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guarded import Guarded, Quick, ended, error_of, parse, read_all, read_one, serve
from starlette.responses import Response

from quire.server import connection, request
from quire.server.body import MAX_BODY_BYTES
from quire.server.connection import Protocol

JSON = {"Content-Type": "application/json"}
POST = b"POST /size HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /size HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Guarded]:
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def quick() -> Iterator[Guarded]:
    with serve(protocol=Quick) as running:
        yield running


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_what_is_within_the_limits_passes(server: Guarded) -> None:
    headers = {f"x-{i}": "a" * 400 for i in range(connection.MAX_HEADERS - 4)} | JSON
    status, _, body = server.ask("POST", "/size", headers, b" " * 100_000)
    assert (status, json.loads(body)["size"]) == (200, 100_000)


@pytest.mark.parametrize(
    "headers",
    [
        [b"x: " + b"a" * 70_000],
        [b"x: " + b"a" * 8_000_000],
        [b"x-%d: a" % i for i in range(connection.MAX_HEADERS)],
        [b"x-%d: a" % i for i in range(5000)],
        [b"x-%d: " % i + b"a" * 1000 for i in range(100)],
    ],
    ids=["one large", "8 MB", "one too many", "5,000", "large together"],
)
def test_large_heads(server: Guarded, headers: list[bytes]) -> None:
    answer = parse(server.send(GET + b"\r\n".join(headers) + b"\r\n\r\n"))
    assert error_of(answer) == (431, "headers_too_large")
    assert answer[1]["connection"] == "close"


def test_a_client_that_goes_on_can_still_read_why_not(server: Guarded) -> None:
    """The connection is not reset under what it sends."""
    with server.connect() as client:
        client.sendall(GET + b"x: " + b"a" * 70_000 + b"\r\n\r\n")
        assert read_one(client)[0] == 431
        for _ in range(3):
            client.sendall(b"a" * 1000)
            time.sleep(0.02)


def test_nobody_is_answered_twice(server: Guarded) -> None:
    with server.connect() as client:
        client.sendall(POST + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert read_one(client)[0] == 415
        client.sendall(b"zz\r\n")
        assert read_all(client) == b""


def test_a_long_target_is_a_large_head(server: Guarded) -> None:
    assert server.ask("GET", "/size?" + "a" * 70_000)[0] == 431


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        CHUNKED + b"zz\r\n",
    ],
    ids=["no HTTP", "TLS", "no Host", "bad chunk"],
)
def test_what_is_no_http(server: Guarded, garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert error_of(parse(server.send(garbage))) == (400, "invalid_request")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_large_body_is_refused_before_it_is_sent(server: Guarded) -> None:
    with server.connect() as client:
        client.sendall(POST.replace(b"/size", b"/size?large") + b"Content-Length: 34603008\r\n\r\n")
        assert error_of(read_one(client)) == (413, "request_too_large")
    assert "large" not in server.seen


@pytest.mark.parametrize("length", ["9" * 300, "9" * 5000, "-1", "1e3", "5, 6"])
def test_lengths_that_are_none(server: Guarded, length: str) -> None:
    assert server.ask("POST", "/size", JSON | {"Content-Length": length})[0] in (400, 413)


def test_a_body_that_was_sent_all_the_same_gets_its_answer(server: Guarded) -> None:
    """The answer comes while the client still sends; the connection goes on afterwards."""
    body = bytes(MAX_BODY_BYTES + 1)
    with server.connect() as client:
        client.sendall(
            POST + b"Content-Length: %d\r\n\r\n" % len(body) + body + GET + b"Connection: close\r\n\r\n"
        )
        answers = read_all(client)
    assert answers.startswith(b"HTTP/1.1 413")
    assert answers.count(b"HTTP/1.1 200") == 1


def test_a_body_of_unknown_length_is_not_buffered_beyond_the_limit(server: Guarded) -> None:
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    before = resident_bytes()
    with server.connect() as client:
        client.sendall(CHUNKED)
        sent = 0
        with contextlib.suppress(OSError):
            for _ in range(200):
                client.sendall(chunk)
                sent += 1
        answer = read_one(client)
    assert error_of(answer) == (413, "request_too_large")
    assert resident_bytes() - before < 16 << 20  # the application drops what it reads
    assert sent >= 32


def test_bodies_on_their_way_are_bounded_together(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_UPLOADS_BYTES", 100_000)
    head = POST + b"Connection: close\r\nContent-Length: 60001\r\n\r\n"
    with server.connect() as first, server.connect() as second:
        first.sendall(head + b" " * 60_000)
        time.sleep(0.1)
        second.sendall(head + b" " * 60_000)
        assert error_of(parse(read_all(second))) == (503, "server_overloaded")
        first.sendall(b" ")
        assert parse(read_all(first))[0] == 200
    assert server.ask("POST", "/size", JSON, b" " * 60_000)[0] == 200


def test_a_body_that_has_arrived_is_not_on_its_way(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_UPLOADS_BYTES", 100_000)
    with server.connect() as first:
        head = POST.replace(b"/size", b"/size?wait_s=0.5")
        first.sendall(head + b"Content-Length: 60000\r\n\r\n" + b" " * 60_000)
        time.sleep(0.1)
        assert server.ask("POST", "/size", JSON, b" " * 60_000)[0] == 200
        assert read_one(first)[0] == 200


def test_many_tiny_chunks_cost_little(server: Guarded) -> None:
    before, begin = resident_bytes(), time.monotonic()
    answer = parse(server.send(CHUNKED + b"1\r\nx\r\n" * 500_000))
    assert error_of(answer) == (400, "invalid_request")
    assert time.monotonic() - begin < 2
    assert resident_bytes() - before < 16 << 20


def test_some_tiny_chunks_pass(server: Guarded) -> None:
    body = b"1\r\nx\r\n" * 2000 + b"10000\r\n" + b"x" * 65536 + b"\r\n" + b"1\r\nx\r\n" * 40 + b"0\r\n\r\n"
    status, _, answer = parse(
        server.send(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
    )
    assert (status, json.loads(answer)["size"]) == (200, 67576)


@pytest.mark.parametrize("coding", ["gzip", "br", "GZIP, identity"])
def test_compressed_bodies_are_refused(server: Guarded, coding: str) -> None:
    answer = server.ask("POST", "/size", JSON | {"Content-Encoding": coding}, b"\x1f\x8b")
    assert error_of(answer) == (415, "unsupported_media_type")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "text/json"])
def test_what_changes_something_takes_json_only(server: Guarded, method: str, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    assert error_of(server.ask(method, "/size", headers, b"{}"))[0] == 415
    assert server.ask(method, "/size", {"Content-Type": "Application/JSON; charset=utf-8"}, b"{}")[0] == 200


def test_pipelined_requests_are_answered_in_order(server: Guarded) -> None:
    body = POST + b"Content-Length: 3\r\n\r\nabc"
    answers = server.send(body + GET + b"\r\n" + body + GET + b"Connection: close\r\n\r\n")
    sizes = [part.partition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK")[1:]]
    assert [json.loads(size)["size"] for size in sizes] == [3, 0, 3, 0]


@pytest.mark.parametrize("begun", [b"", b"GET /si", GET + b"x: a"])
def test_a_slow_head(quick: Guarded, begun: bytes) -> None:
    begin = time.monotonic()
    answer = quick.send(begun)
    assert 0.2 < time.monotonic() - begin < 1.5
    assert not begun or error_of(parse(answer)) == (408, "request_timeout")


def test_a_head_sent_byte_by_byte_has_the_same_time(quick: Guarded) -> None:
    begin = time.monotonic()
    with quick.connect() as client, contextlib.suppress(OSError):
        while time.monotonic() - begin < 3:
            client.sendall(b"G")
            time.sleep(0.02)
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("begun", [POST + b"Content-Length: 10\r\n\r\nabc", CHUNKED + b"3\r\nabc\r\n"])
def test_a_slow_body(quick: Guarded, begun: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire")
    assert error_of(parse(quick.send(begun))) == (408, "request_timeout")
    assert [fields["status"] for fields in ended(caplog)] == [408]


def test_an_idle_connection_is_kept(quick: Guarded) -> None:
    with quick.connect() as client:
        for _ in range(2):
            client.sendall(GET + b"\r\n")
            assert read_one(client)[0] == 200
            time.sleep(0.6)  # twice the time for a head


def test_answers_do_not_wait_for_acknowledgement(server: Guarded) -> None:
    """A head and a body are two small writes; the second waited some 40 ms in the kernel otherwise."""
    times = []
    with server.connect() as client:
        for _ in range(9):
            begin = time.monotonic()
            client.sendall(GET + b"\r\n")
            read_one(client)
            times.append(time.monotonic() - begin)
    assert sorted(times)[4] < 0.02


def test_a_second_head_has_a_deadline_too(quick: Guarded) -> None:
    with quick.connect() as client:
        client.sendall(GET + b"\r\n" + GET)
        answers = read_all(client)
    assert answers.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in answers


def test_an_answer_that_nobody_reads_ends(quick: Guarded) -> None:
    quick.seen.clear()
    with quick.connect() as client:
        client.sendall(GET.replace(b"/size", b"/endless") + b"\r\n")
        end = time.monotonic() + 5
        while not quick.seen and time.monotonic() < end:
            time.sleep(0.02)
    assert quick.seen == ["endless ended"]


def test_a_slow_reader_is_no_such_case(quick: Guarded) -> None:
    """It reads for longer than a whole answer may lie unread."""
    with quick.connect() as client:
        client.sendall(GET.replace(b"/size", b"/endless") + b"\r\n")
        end = time.monotonic() + 3 * Quick.unread_s
        while time.monotonic() < end:
            time.sleep(0.02)
            assert client.recv(4 << 20)


def test_a_slow_reader_of_a_long_answer_gets_all_of_it() -> None:
    """It reads all the time, and what is left stays long."""
    body = b"x" * (24 << 20)
    with serve(app=Response(body), protocol=Quick) as long, long.connect() as client:
        client.sendall(GET + b"Connection: close\r\n\r\n")
        begin_s, num_bytes = time.monotonic(), 0
        while piece := client.recv(256 << 10):
            num_bytes += len(piece)
            time.sleep(0.02)
    assert num_bytes > len(body)
    assert time.monotonic() - begin_s > 2 * Quick.unread_s


def test_a_body_that_goes_on_after_its_answer_is_cut_off(quick: Guarded) -> None:
    with quick.connect() as client:
        client.sendall(POST + b"Content-Length: 34603008\r\n\r\n")
        assert read_one(client)[0] == 413
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begin < 3:
                client.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - begin < 2


def test_a_thousand_silent_connections_hinder_nobody(server: Guarded) -> None:
    with contextlib.ExitStack() as stack:
        for i in range(1000):
            silent = stack.enter_context(server.connect())
            silent.sendall(b"" if i % 2 else GET)
        begin = time.monotonic()
        assert server.ask("GET", "/size")[0] == 200
        assert time.monotonic() - begin < 3


def test_connections_make_room_when_descriptors_run_out(
    server: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = connection.RESERVED_FILES + 4
    monkeypatch.setattr(connection.resource, "getrlimit", lambda which: (room, room))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(server.connect()) for _ in range(8)]
        time.sleep(0.1)
        assert server.ask("GET", "/size")[0] == 200
        assert _is_closed(silent[0])
        assert not _is_closed(silent[-1])


def test_connections_that_come_together_make_room_for_each(
    server: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come while the event loop is busy, and it ends connections later than it takes new ones."""
    room = connection.RESERVED_FILES + 4
    monkeypatch.setattr(connection.resource, "getrlimit", lambda which: (room, room))
    with contextlib.ExitStack() as stack, server.connect() as busy:
        busy.sendall(GET.replace(b"/size", b"/busy") + b"\r\n")
        time.sleep(0.1)
        silent = [stack.enter_context(server.connect()) for _ in range(20)]
        assert read_one(busy)[0] == 200
        time.sleep(0.1)
        assert sum(map(_is_closed, silent)) >= 16


def _is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_nothing_stays_open(server: Guarded) -> None:
    """All the connections above are gone, on the server's side too."""
    end_s = time.monotonic() + 10
    while (left := _connections(server.port)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert left == 0


def _connections(port: int) -> int:
    """Connections whose near end has this port and is not closed yet (in the kernel's words, 1 and 8)."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    ends = ((line.split()[1].split(":")[1], line.split()[3]) for line in lines)
    return sum(int(near, 16) == port and state in ("01", "08") for near, state in ends)


def test_nothing_is_left_of_an_ended_connection() -> None:
    """Not until a timer, and not until the garbage collector runs. (asyncio's transports wait for it.)"""
    made: list[weakref.ref[Any]] = []

    class Seen(Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            made.append(weakref.ref(self))

    with serve(protocol=Seen) as running:
        gc.collect()
        gc.disable()
        try:
            for begun in (b"", GET, GET + b"\r\n", POST + b"Content-Length: 3\r\n\r\nab"):
                with running.connect() as client:
                    client.sendall(begun)
                    time.sleep(0.05)
            running.ask("GET", "/size")
            end = time.monotonic() + 1
            while any(one() is not None for one in made) and time.monotonic() < end:
                time.sleep(0.01)
            assert [one() for one in made] == [None] * 5
        finally:
            gc.enable()
