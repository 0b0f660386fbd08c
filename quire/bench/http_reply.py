"""Parsing of HTTP/1.1 replies and server-sent events from pieces of any size, without sockets."""

from __future__ import annotations

MAX_HEAD_BYTES = 1 << 16


class BadReply(Exception):
    """The received bytes are not HTTP."""


def header(head: bytes, name: bytes) -> bytes:
    """Return the value of a header, whose name is given in small letters, or nothing."""
    begin = head.lower().find(b"\r\n" + name + b":")
    return head[begin + 2 :].partition(b"\r\n")[0][len(name) + 1 :].strip() if begin >= 0 else b""


class ReplyParser:
    """The parser of one reply: it takes received bytes and returns those of the body."""

    def __init__(self) -> None:
        self.status = 0  # until the head is complete
        self.head = b""
        self.is_done = False
        self.is_event_stream = False
        self._buffer = bytearray()
        self._rest = -1  # bytes of the body that are still to come; -1: until the connection ends
        self._chunked = False

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body within `data`. Raises BadReply."""
        if self._chunked and not self._buffer and (body := _one_chunk(data)):
            return body
        while not self.status:  # in a loop: 100 Continue goes before the reply
            head, end, rest = (bytes(self._buffer) + data).partition(b"\r\n\r\n")
            self._buffer.clear()
            if not end:
                if len(head) > MAX_HEAD_BYTES:
                    raise BadReply("the head of the reply does not end")
                self._buffer += head
                return b""
            self._read_head(head)
            data = rest
        if not self._chunked:
            return self._plain(data)
        self._buffer += data
        return self._chunks()

    def end(self) -> bool:
        """Take the end of the connection. Return True if the reply is whole."""
        self.is_done = self.is_done or (bool(self.status) and not self._chunked and self._rest < 0)
        return self.is_done

    @property
    def has_begun(self) -> bool:
        """Return True if anything has been received."""
        return bool(self.status or self._buffer)

    @property
    def keeps_alive(self) -> bool:
        return self.is_done and self._rest >= 0 and header(self.head, b"connection").lower() != b"close"

    def _read_head(self, head: bytes) -> None:
        words = head.partition(b"\r\n")[0].split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise BadReply(f"the reply begins with {head[:40].decode('latin-1')!r}")
        status = int(words[1])
        if status < 200:
            return
        self.status, self.head = status, head
        self.is_event_stream = header(head, b"content-type").startswith(b"text/event-stream")
        self._chunked = b"chunked" in header(head, b"transfer-encoding").lower()
        if self._chunked or status in (204, 304):
            self._rest = 0
            self.is_done = not self._chunked
        elif length := header(head, b"content-length"):
            self._rest = int(length)

    def _plain(self, data: bytes) -> bytes:
        if self._rest >= 0:
            data = data[: self._rest]
            self._rest -= len(data)
            self.is_done = not self._rest
        return data

    def _chunks(self) -> bytes:
        """Return the content of all chunks that are complete."""
        buffer, place, found = self._buffer, 0, bytearray()
        while not self.is_done:
            line = buffer.find(b"\r\n", place)
            if line < 0:
                break
            try:
                size = int(bytes(buffer[place:line]).split(b";")[0], 16)
            except ValueError:
                raise BadReply("a chunk has no size") from None
            if len(buffer) < line + size + 4:
                break
            found += buffer[line + 2 : line + 2 + size]
            place = line + size + 4
            self.is_done = not size
        del buffer[:place]
        return bytes(found)


def _one_chunk(data: bytes) -> bytes:
    """Return the content if `data` is exactly one chunk, as it nearly always is, or nothing."""
    line = data.find(b"\r\n")
    try:
        return data[line + 2 : -2] if len(data) == line + int(data[:line], 16) + 4 else b""
    except ValueError:
        return b""


class EventSplitter:
    """The parser of server-sent events: it takes bytes of the body and returns the data of whole events."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that `data` completes. Comments and names of events are left out."""
        if not self._buffer and b"\r" not in data and data.find(b"\n\n") == len(data) - 2 >= 0:
            return [] if (found := _data(data[:-2])) is None else [found]  # one whole event
        buffer = self._buffer + data
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n")
        *events, self._buffer = buffer.split(b"\n\n")
        return [found for event in events if (found := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
