"""Frames of links: what one side sends reaches the other, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.transfer import sealed_frames
from quire.transfer.sealed_frames import LinkRefused, SealedFrames

KEY = b"sixteen bytes or more"


def connected(caller_key: bytes = KEY, called_key: bytes = KEY) -> tuple[SealedFrames, SealedFrames]:
    """Two ends that have greeted and proved their keys."""
    caller, called = SealedFrames(caller_key, calling=True), SealedFrames(called_key, calling=False)
    _, proof = called.receive(caller.greeting())
    _, own_proof = caller.receive(called.greeting())
    assert called.receive(own_proof) == ([], b"")
    assert caller.receive(proof) == ([], b"")
    assert caller.proven
    assert called.proven
    return caller, called


@given(st.lists(st.binary(max_size=100), max_size=8), st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_payloads_arrive_in_order_however_the_bytes_are_cut(payloads: list[bytes], cuts: list[int]) -> None:
    caller, called = connected()
    sent = b"".join(map(caller.seal, payloads))
    found, at, number = [], 0, 0
    while at < len(sent):
        size = cuts[number % len(cuts)]
        found += called.receive(sent[at : at + size])[0]
        at, number = at + size, number + 1
    assert found == payloads


def test_another_key_is_refused() -> None:
    with pytest.raises(LinkRefused, match="this key"):
        connected(called_key=b"another key of that length")


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_ends_the_connection(place: int, change: int) -> None:
    caller, called = connected()
    frame = bytearray(caller.seal(b"a payload"))
    frame[place % len(frame)] ^= change
    try:
        found, _ = called.receive(bytes(frame))
    except LinkRefused:
        return
    assert found == []  # the length became larger: the rest is waited for


def test_frames_are_valid_once_in_order_and_in_one_direction() -> None:
    caller, called = connected()
    first, second = caller.seal(b"first"), caller.seal(b"second")
    with pytest.raises(LinkRefused):
        called.receive(second)
    caller, called = connected()
    first = caller.seal(b"first")
    assert called.receive(first)[0] == [b"first"]
    with pytest.raises(LinkRefused):
        called.receive(first)
    caller, called = connected()
    with pytest.raises(LinkRefused):
        caller.receive(caller.seal(b"back to its sender"))


def test_nothing_of_one_connection_is_valid_on_another() -> None:
    frame = connected()[0].seal(b"")
    with pytest.raises(LinkRefused):
        connected()[1].receive(frame)


def test_a_greeting_that_is_sent_back_is_refused() -> None:
    one = SealedFrames(KEY, calling=True)
    with pytest.raises(LinkRefused, match="repeats"):
        one.receive(one.greeting())


def test_nothing_is_kept_for_a_side_without_proof() -> None:
    called = SealedFrames(KEY, calling=False)
    with pytest.raises(LinkRefused, match="greeting"):
        called.receive(b"GET / HTTP/1.1\r\n\r\n")
    called = SealedFrames(KEY, calling=False)
    called.receive(SealedFrames(KEY, calling=True).greeting())
    with pytest.raises(LinkRefused, match="1,000 bytes"):
        called.receive((1000).to_bytes(4, "big") + bytes(16))
    assert not called.proven


def test_lengths_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_frames, "MAX_PAYLOAD_BYTES", 100)
    caller, called = connected()
    assert called.receive(caller.seal(bytes(100)))[0] == [bytes(100)]
    with pytest.raises(ValueError, match="101"):
        caller.seal(bytes(101))
    with pytest.raises(LinkRefused, match="101 bytes"):
        called.receive((101).to_bytes(4, "big") + bytes(16))
    with pytest.raises(ValueError, match="at least 16"):
        SealedFrames(b"short", calling=True)
