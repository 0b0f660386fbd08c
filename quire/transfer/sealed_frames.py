"""Authenticated frames on a link between hosts: whoever lacks the shared key gets no further than a greeting.

Each side greets with a magic number and 32 random bytes. Both derive one key for each direction from the
shared key and both greetings, so nothing of one connection is valid on another. A frame is

    length of the payload     4 bytes, big endian
    tag                       16 bytes: HMAC-SHA256 over the number of the frame, its length and its payload
    payload

The first frame of each side is empty: it proves that the side has the key. Until it has come, nothing but an
empty frame is read. A frame that was changed, repeated, dropped or reordered ends the connection.

Payloads are authenticated and not encrypted: whoever can read the network reads prompts and answers.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

MAX_PAYLOAD_BYTES = 64 << 20
MIN_KEY_BYTES = 16

_MAGIC = b"quirelk1"
_NONCE_BYTES, _TAG_BYTES = 32, 16
_GREETING_BYTES = len(_MAGIC) + _NONCE_BYTES
_HEAD = struct.Struct(f">I{_TAG_BYTES}s")
_COUNTED = struct.Struct(">QI")


class LinkRefused(Exception):
    """The other side of a link did not prove that it has the key, or sent what it may not send."""


class SealedFrames:
    """One end of a connection: payloads to bytes, and bytes to payloads. Does no input or output itself.

    `calling` is the side that opened the connection. The key has at least MIN_KEY_BYTES.
    """

    def __init__(self, key: bytes, *, calling: bool) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; at least {MIN_KEY_BYTES} are needed")
        self._key, self._calling = key, calling
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._own_key = self._their_key = b""
        self._num_sent = self._num_received = 0
        self._buffer = bytearray()

    @property
    def proven(self) -> bool:
        """True once the other side has shown that it has the key: payloads may be sent to it."""
        return self._num_received > 0

    def greeting(self) -> bytes:
        """Return the bytes that begin a connection."""
        return _MAGIC + self._nonce

    def receive(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Take bytes of the connection; return the payloads that they complete, and bytes to send back.

        Raises LinkRefused for anything but a valid greeting and valid frames.
        """
        buffer, payloads, reply = self._buffer, [], b""
        buffer += data
        if not self._their_key:
            if not _MAGIC.startswith(bytes(buffer[: len(_MAGIC)])):
                raise LinkRefused("what came is no greeting of a link")
            if len(buffer) < _GREETING_BYTES:
                return [], b""
            self._agree(bytes(buffer[len(_MAGIC) : _GREETING_BYTES]))
            del buffer[:_GREETING_BYTES]
            reply = self.seal(b"")
        begin = 0
        while len(buffer) - begin >= _HEAD.size:
            length, tag = _HEAD.unpack_from(buffer, begin)
            if length > (MAX_PAYLOAD_BYTES if self.proven else 0):
                raise LinkRefused(f"a frame of {length:,} bytes")
            end = begin + _HEAD.size + length
            if len(buffer) < end:
                break
            payload = bytes(buffer[begin + _HEAD.size : end])
            if not hmac.compare_digest(tag, _tag(self._their_key, self._num_received, payload)):
                raise LinkRefused("a frame that was not made with this key")
            if self.proven:
                payloads.append(payload)
            self._num_received += 1
            begin = end
        del buffer[:begin]
        return payloads, reply

    def seal(self, payload: bytes | bytearray) -> bytes:
        """Return a payload as a frame. Raises ValueError if it is too long for one."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"a payload of {len(payload):,} bytes; a frame has at most {MAX_PAYLOAD_BYTES:,}"
            )
        tag = _tag(self._own_key, self._num_sent, payload)
        self._num_sent += 1
        return _HEAD.pack(len(payload), tag) + payload

    def _agree(self, theirs: bytes) -> None:
        """Derive the keys of both directions."""
        if theirs == self._nonce:
            raise LinkRefused("it repeats what was sent")
        caller, called = (self._nonce, theirs) if self._calling else (theirs, self._nonce)
        session = hmac.digest(self._key, b"quire link" + caller + called, "sha256")
        keys = [hmac.digest(session, side, "sha256") for side in (b"caller", b"called")]
        self._own_key, self._their_key = keys if self._calling else reversed(keys)


def _tag(key: bytes, number: int, payload: bytes | bytearray) -> bytes:
    code = hmac.new(key, _COUNTED.pack(number, len(payload)), hashlib.sha256)
    code.update(payload)
    return code.digest()[:_TAG_BYTES]
