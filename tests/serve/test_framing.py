"""Where a request ends is never in doubt: what follows a body is not read as a request that nobody sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from guarded import Guarded, error_of, parse, serve

from quire.server.body import MAX_BODY_BYTES

POST = b"POST /size HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
NEXT = b"GET /size?next HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LENGTH, CODING = b"Content-Length: 6\r\n", b"Transfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Guarded]:
    with serve() as running:
        yield running


def refusal(server: Guarded, data: bytes) -> tuple[int, str]:
    """The one answer to what must not be followed by another."""
    server.seen.clear()
    answers = server.send(data + NEXT)
    assert answers.count(b"HTTP/1.1 ") == 1
    assert parse(answers)[1]["connection"] == "close"
    assert "next" not in server.seen
    return error_of(parse(answers))


@pytest.mark.parametrize(
    "head",
    [POST + LENGTH + CODING, POST + CODING + LENGTH, POST.replace(b"1.1", b"1.0") + LENGTH + CODING],
    ids=["length first", "coding first", "HTTP/1.0"],
)
def test_a_length_beside_a_transfer_coding_is_refused(server: Guarded, head: bytes) -> None:
    assert refusal(server, head + b"\r\n0\r\n\r\n") == (400, "invalid_request")
    assert b"both Content-Length and Transfer-Encoding" in server.send(head + b"\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "coding", ["chunked, identity", "identity", "gzip, chunked", "xchunked", "x\r\n chunked"]
)
def test_other_transfer_codings_are_refused(server: Guarded, coding: str) -> None:
    head = POST + f"Transfer-Encoding: {coding}\r\n\r\n".encode()
    assert refusal(server, head + b"0\r\n\r\n") == (400, "invalid_request")
    assert b"the only supported transfer coding is chunked" in server.send(head)


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 3\r\nContent-Length: 5",
        b"Content-Length: 3, 5",
        b"Content-Length: 3\r\n 5",
        b"Content-Length: +3",
        b"Content-Length : 3",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    ],
)
def test_framing_that_can_be_read_in_two_ways_is_refused(server: Guarded, lines: bytes) -> None:
    assert refusal(server, POST + lines + b"\r\n\r\nabc") == (400, "invalid_request")


@pytest.mark.parametrize("size", [b"%x" % (1 << 72), b"f" * 20])
def test_a_chunk_beyond_the_limit_is_refused_when_that_much_has_come(server: Guarded, size: bytes) -> None:
    """Nothing in it is ever read as a request."""
    server.seen.clear()
    assert parse(server.send(CHUNKED + size + b"\r\n" + bytes(MAX_BODY_BYTES + 1) + NEXT))[0] == 413
    assert "next" not in server.seen


@pytest.mark.parametrize("name", [b";name=", b";"])
def test_chunk_extensions_are_bounded(server: Guarded, name: bytes) -> None:
    chunk = b"4" + name + b"a" * 2000 + b"\r\nabcd\r\n"
    assert parse(server.send(CHUNKED + b"4;a=b\r\nabcd\r\n0;x\r\n\r\n" + NEXT))[0] == 200
    assert refusal(server, CHUNKED + chunk * 100 + b"0\r\n\r\n") == (400, "invalid_request")


def test_trailers_are_bounded_as_headers_are(server: Guarded) -> None:
    body = b"3\r\nabc\r\n0\r\n"
    assert parse(server.send(CHUNKED + body + b"x: a\r\n\r\n" + NEXT))[0] == 200
    trailers = b"".join(b"x-%d: a\r\n" % i for i in range(129))
    assert refusal(server, CHUNKED + body + trailers + b"\r\n") == (431, "headers_too_large")
