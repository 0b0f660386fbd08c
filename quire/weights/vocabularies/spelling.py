"""The alphabet of byte-level vocabularies."""

from __future__ import annotations


def _alphabet() -> str:
    """Return GPT-2's spelling of the 256 bytes: printable Latin-1 as itself, the others from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in plain else next(others)) for byte in range(256))


BYTE_ALPHABET = _alphabet()


def spelled(token: bytes) -> str:
    """Return the spelling of a token in a byte-level vocabulary."""
    return token.decode("latin-1").translate(BYTE_ALPHABET)
