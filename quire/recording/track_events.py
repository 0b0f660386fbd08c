"""Writer of traces in Perfetto's TrackEvent format, which ui.perfetto.dev opens.

The messages are protobuf: https://perfetto.dev/docs/reference/synthetic-track-event has the fields and their
numbers. A trace has tracks in a tree; a track has slices, which nest but never overlap, or is a counter.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

Note = str | int | float | bool

_SEQUENCE = 1  # all packets are of one writer
_BEGIN, _END, _COUNTER = 1, 2, 4  # TrackEvent.Type
_CLEARED = 1  # TracePacket.SequenceFlags: no earlier packet of the sequence is referred to
_EXPLICIT = 3  # TrackDescriptor.ChildTracksOrdering: by sibling_order_rank


class _Event(NamedTuple):
    """An event in the order of the file: by time; at one time, ends first, then the longest slice."""

    time_ns: int
    begins: bool
    shortness_ns: int
    number: int
    payload: bytes


class TrackEvents:
    """A trace under construction. Times are seconds on one clock."""

    def __init__(self, process: str) -> None:
        self._packets: list[bytes] = []
        self._events: list[_Event] = []
        self._num_tracks = 0
        self._ranks: dict[int, int] = {}  # children of a track so far
        self.root = self._describe(process, None, _message(3, _number(1, 1) + _text(6, process)))

    def track(self, name: str, parent: int | None = None) -> int:
        """Add a track below `parent`, after its other children; return its number."""
        return self._describe(name, parent, b"")

    def counter(self, name: str, unit: str = "", parent: int | None = None) -> int:
        """Add a track of a number that changes over time; return its number."""
        return self._describe(name, parent, _message(8, _text(6, unit) if unit else b""))

    def slice(
        self, track: int, name: str, begin_s: float, end_s: float, notes: Mapping[str, Note] | None = None
    ) -> None:
        """Add a slice, unless it is empty. Slices of a track nest or follow each other."""
        begin_ns, end_ns = _ns(begin_s), _ns(end_s)
        if end_ns <= begin_ns:
            return
        head = _number(9, _BEGIN) + _number(11, track) + _text(23, name)
        head += b"".join(_message(4, _annotation(*note)) for note in (notes or {}).items())
        self._add(begin_ns, True, begin_ns - end_ns, head)
        self._add(end_ns, False, end_ns - begin_ns, _number(9, _END) + _number(11, track))

    def count(self, counter: int, time_s: float, value: float) -> None:
        """Set a counter from this time on."""
        payload = _number(9, _COUNTER) + _number(11, counter) + _double(44, value)
        self._add(_ns(time_s), False, 0, payload)

    def encoded(self) -> bytes:
        """Return the trace as a file."""
        packets = list(self._packets)
        for event in sorted(self._events):
            packets.append(_packet(_number(8, event.time_ns) + _message(11, event.payload)))
        return b"".join(packets)

    def _describe(self, name: str, parent: int | None, kind: bytes) -> int:
        self._num_tracks += 1
        number = self._num_tracks
        descriptor = _number(1, number) + _text(2, name) + _number(11, _EXPLICIT) + kind
        if number > 1:
            above = parent or self.root
            rank = self._ranks[above] = self._ranks.get(above, 0) + 1
            descriptor += _number(5, above) + _number(12, rank)
        flags = _number(13, _CLEARED) if number == 1 else b""
        self._packets.append(_packet(flags + _message(60, descriptor)))
        return number

    def _add(self, time_ns: int, begins: bool, shortness_ns: int, payload: bytes) -> None:
        self._events.append(_Event(time_ns, begins, shortness_ns, len(self._events), payload))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _packet(payload: bytes) -> bytes:
    """Return a TracePacket as an entry of Trace.packet."""
    return _message(1, payload + _number(10, _SEQUENCE))


def _annotation(name: str, value: Note) -> bytes:
    """Return a DebugAnnotation."""
    match value:
        case bool():
            own = _number(2, int(value))
        case int():
            own = _number(4, value)
        case float():
            own = _double(5, value)
        case str():
            own = _text(6, value)
    return _text(10, name) + own


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers as two's complement
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _message(field: int, payload: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(payload)) + payload


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())
