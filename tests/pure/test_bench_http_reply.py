"""What the load generator makes of a stream that comes a chunk at a time, and of one that does not."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from quire.bench.http_reply import EventSplitter, ReplyParser

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
# A chunk that is an event, two events in one, one in two chunks, a comment, an event of two lines
BODIES = (b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n", b"data: 4", b"\n\n", b": x\n\n", b"data: 5\ndata: 6\n\n")
CHUNKS = (*(b"%x\r\n%s\r\n" % (len(body), body) for body in BODIES), b"0\r\n\r\n")
EVENTS = [b"1", b"2", b"3", b"4", b"5\n6"]


def read(pieces):
    parser, splitter, events = ReplyParser(), EventSplitter(), []
    for piece in pieces:
        events += splitter.feed(parser.feed(piece))
    return events, parser.is_done, parser.is_event_stream


def test_a_chunk_at_a_time():
    assert read((HEAD, *CHUNKS)) == (EVENTS, True, True)
    assert read((HEAD + CHUNKS[0], *CHUNKS[1:-2], CHUNKS[-2] + CHUNKS[-1])) == (EVENTS, True, True)


@given(st.lists(st.integers(0, len(HEAD + b"".join(CHUNKS))), max_size=8))
def test_cut_anywhere(cuts):
    whole = HEAD + b"".join(CHUNKS)
    assert read(whole[a:b] for a, b in pairwise((0, *sorted(cuts), len(whole)))) == (EVENTS, True, True)


@given(st.lists(st.integers(0, len(b"".join(BODIES))), max_size=8))
def test_a_stream_without_chunks_cut_anywhere(cuts):
    whole, splitter = b"".join(BODIES), EventSplitter()
    pieces = [whole[a:b] for a, b in pairwise((0, *sorted(cuts), len(whole)))]
    assert [event for piece in pieces for event in splitter.feed(piece)] == EVENTS


def test_a_stream_a_byte_at_a_time():
    splitter = EventSplitter()
    assert [event for byte in b"".join(BODIES) for event in splitter.feed(bytes([byte]))] == EVENTS
