"""Regrouping of tokens into whole characters: a token may end within one.

In two kinds of vocabulary it does. *Byte-level* ones spell every byte as one printable character (GPT-2's
alphabet); *byte-fallback* ones have tokens `<0x00>` to `<0xFF>` for characters they lack. The classes here
take token strings and return them regrouped: each list ends on a character boundary. Bytes that can no
longer become a character are returned as U+FFFD: in byte-level text by the rule of the Unicode standard (one
for each maximal subpart), in byte-fallback text one for each byte, as sentencepiece does.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Protocol

from quire.weights.vocabularies.spelling import BYTE_ALPHABET

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_OF = {char: byte for byte, char in enumerate(BYTE_ALPHABET)}


def byte_of_token(token: str) -> int | None:
    """Return the byte of a token such as `<0x41>`, or None for any other token."""
    match = _BYTE_TOKEN.fullmatch(token) if token.startswith("<0x") else None
    return int(match[1], 16) if match else None


def bytes_of_spelling(token: str) -> bytes:
    """Return the bytes that a byte-level token spells; one outside the alphabet is taken as text."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode(errors="replace")


class WholeCharacters(Protocol):
    """A regrouping of token strings: returns them as soon as they end on a character boundary."""

    def push(self, token: str) -> list[str]: ...

    def finish(self) -> list[str]: ...


class TextTokens:
    """Regrouping for vocabularies whose tokens are text: nothing is held back."""

    def push(self, token: str) -> list[str]:
        return [token]

    def finish(self) -> list[str]:
        return []


class ByteLevelTokens:
    """Regrouping for byte-level vocabularies: the tokens are one stream of bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> list[str]:
        return self._spell(self._decoder.decode(bytes_of_spelling(token)))

    def finish(self) -> list[str]:
        return self._spell(self._decoder.decode(b"", final=True))

    def _spell(self, text: str) -> list[str]:
        return ["".join([BYTE_ALPHABET[byte] for byte in text.encode()])] if text else []


class ByteFallbackTokens:
    """Regrouping for byte-fallback vocabularies: a run of byte tokens is a stream of bytes.

    The `tokenizers` library turns every byte of a run into U+FFFD when any of them is invalid, which cannot
    be streamed: a later byte would change characters already returned. Here valid characters are kept, and
    the rest of the run equals the library's.
    """

    def __init__(self) -> None:
        self._pending = bytearray()

    def push(self, token: str) -> list[str]:
        byte = byte_of_token(token)
        if byte is None:
            return [*self.finish(), token]
        self._pending.append(byte)
        released: list[str] = []
        while self._pending:
            try:
                self._pending.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                released.append(REPLACEMENT)
                del self._pending[0]
            else:
                released += [f"<0x{part:02X}>" for part in self._pending]
                self._pending.clear()
        return released

    def finish(self) -> list[str]:
        released = [REPLACEMENT] * len(self._pending)
        self._pending.clear()
        return released


def regroup(characters: WholeCharacters, tokens: Iterable[str]) -> list[str]:
    """Pass all of `tokens` through `characters`, to the end."""
    released = [part for token in tokens for part in characters.push(token)]
    return released + characters.finish()
