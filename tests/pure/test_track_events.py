"""Traces in Perfetto's format, read back with Perfetto's own definition of it."""

from __future__ import annotations

from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from quire.recording.track_events import TrackEvents


def read(events: TrackEvents) -> Any:
    return Trace.FromString(events.encoded())


def slices_of(trace: Any) -> list[tuple[str, str, int, int, int]]:
    """Return (track, name, begin, end, depth) of each slice, in the order of their ends."""
    names = {packet.track_descriptor.uuid: packet.track_descriptor.name for packet in trace.packet}
    open_on: dict[int, list[tuple[str, int]]] = {}
    found = []
    for packet in trace.packet:
        event = packet.track_event
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            open_on.setdefault(event.track_uuid, []).append((event.name, packet.timestamp))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            name, begin = open_on[event.track_uuid].pop()
            depth = len(open_on[event.track_uuid])
            found.append((names[event.track_uuid], name, begin, packet.timestamp, depth))
    assert not any(open_on.values())
    return found


def test_tracks_are_a_tree_in_order() -> None:
    events = TrackEvents("quire")
    slots = events.track("slots")
    first, second = events.track("slot 0", slots), events.track("slot 1", slots)
    counter = events.counter("running", "requests")
    descriptors = {packet.track_descriptor.uuid: packet.track_descriptor for packet in read(events).packet}
    assert descriptors[events.root].process.process_name == descriptors[events.root].name == "quire"
    assert descriptors[slots].parent_uuid == descriptors[counter].parent_uuid == events.root
    assert descriptors[first].parent_uuid == descriptors[second].parent_uuid == slots
    assert descriptors[first].sibling_order_rank < descriptors[second].sibling_order_rank
    assert descriptors[counter].counter.unit_name == "requests"
    assert not descriptors[slots].HasField("counter")


def test_slices_nest_whatever_their_order() -> None:
    events = TrackEvents("quire")
    track = events.track("slot 0")
    events.slice(track, "second step", 1.5, 2.0)
    events.slice(track, "request", 1.0, 2.0)
    events.slice(track, "first step", 1.0, 1.5)
    events.slice(track, "next request", 2.0, 3.0)
    events.slice(track, "empty", 3.0, 3.0)
    s = 1_000_000_000
    assert slices_of(read(events)) == [
        ("slot 0", "first step", s, 3 * s // 2, 1),
        ("slot 0", "second step", 3 * s // 2, 2 * s, 1),
        ("slot 0", "request", s, 2 * s, 0),
        ("slot 0", "next request", 2 * s, 3 * s, 0),
    ]


def test_counters_and_notes_keep_their_values() -> None:
    events = TrackEvents("quire")
    track, counter = events.track("steps"), events.counter("share of the roof")
    events.count(counter, 1.25, -0.5)
    notes = {"tokens": 3, "below": -7, "share": 0.25, "cut": True, "bound": "mémoire"}
    events.slice(track, "step", 1.0, 2.0, notes)
    packets = read(events).packet
    (begun,) = [p.track_event for p in packets if p.track_event.type == TrackEvent.TYPE_SLICE_BEGIN]
    read_back = {one.name: getattr(one, one.WhichOneof("value")) for one in begun.debug_annotations}
    assert read_back == notes
    (counted,) = [p for p in packets if p.track_event.type == TrackEvent.TYPE_COUNTER]
    assert (counted.timestamp, counted.track_event.double_counter_value) == (1_250_000_000, -0.5)
    assert counted.track_event.track_uuid == counter
    assert len({packet.trusted_packet_sequence_id for packet in packets}) == 1


@pytest.mark.parametrize("value", [0, 127, 128, 1 << 40, -1, -(1 << 40)])
def test_numbers_of_any_size(value: int) -> None:
    events = TrackEvents("quire")
    events.slice(events.track("a"), "b", 0.0, 1.0, {"n": value})
    (note,) = [n for p in read(events).packet for n in p.track_event.debug_annotations]
    assert note.int_value == value
