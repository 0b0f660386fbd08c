"""The encoding of a block's content: it comes back bit for bit, or not at all."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest

from quire.backends.checksum import checksum
from quire.transfer import content
from quire.transfer.content import decode, encode

FINGERPRINT, BLOCK = sha256(b"model").digest(), sha256(b"tokens").digest()
CONTENT = {0: b"keys and values", 2: b"", 7: bytes(range(256)) * 3}


def test_a_content_comes_back() -> None:
    found = decode(encode(FINGERPRINT, BLOCK, CONTENT), FINGERPRINT, BLOCK)
    assert found is not None
    assert {group: bytes(part) for group, part in found.items()} == CONTENT


def test_views_are_encoded_as_bytes_are() -> None:
    views = {group: memoryview(b"!" + part)[1:] for group, part in reversed(CONTENT.items())}
    assert encode(FINGERPRINT, BLOCK, views) == encode(FINGERPRINT, BLOCK, CONTENT)


def test_one_of_another_model_or_other_tokens_is_refused() -> None:
    frame, other = encode(FINGERPRINT, BLOCK, CONTENT), sha256(b"other").digest()
    assert decode(frame, other, BLOCK) is None
    assert decode(frame, FINGERPRINT, other) is None


def test_any_changed_bit_is_noticed() -> None:
    frame = encode(FINGERPRINT, BLOCK, {1: b"0123456789abcdef" * 2})
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        assert decode(frame, FINGERPRINT, BLOCK) is None, bit
        frame[bit // 8] ^= 1 << bit % 8
    assert decode(frame, FINGERPRINT, BLOCK) is not None


def test_any_other_length_is_noticed() -> None:
    frame = bytes(encode(FINGERPRINT, BLOCK, CONTENT))
    for length in range(len(frame)):
        assert decode(frame[:length], FINGERPRINT, BLOCK) is None
    assert decode(frame + b"\0", FINGERPRINT, BLOCK) is None


@pytest.mark.parametrize(
    "groups", [((1, 4), (1, 4)), ((2, 4), (1, 4)), ((1, 1 << 63), (2, 1 << 63)), ((1, 9),)]
)
def test_a_table_that_contradicts_itself_is_refused(groups: tuple[tuple[int, int], ...]) -> None:
    """With a checksum that is right: whoever can write a file can write that, too."""
    head = content._HEADER.pack(content._MAGIC, content._VERSION, len(groups), FINGERPRINT, BLOCK)
    body = head + b"".join(content._GROUP.pack(*group) for group in groups) + b"01234567"
    assert decode(body + checksum(body), FINGERPRINT, BLOCK) is None


def test_more_groups_than_bytes_are_refused() -> None:
    head = content._HEADER.pack(content._MAGIC, content._VERSION, 65535, FINGERPRINT, BLOCK)
    assert decode(head + checksum(head), FINGERPRINT, BLOCK) is None


def test_noise_is_refused() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        assert decode(draw.randbytes(draw.randrange(300)), FINGERPRINT, BLOCK) is None
