"""Checks of grammars on a vocabulary of bytes and a few tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

END = 256


class Bytes:
    """A vocabulary of the 256 bytes, an end token, and the tokens named."""

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self.ids = {token: END + 1 + i for i, token in enumerate(tokens)}
        self.eos_token_id, self.bos_token_id = END, None
        self.tokens = [bytes([i]) for i in range(256)] + [b"<end>"] + [token.encode() for token in tokens]
        self.special_token_ids = [END, *self.ids.values()]
        self._marks = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self.library = LLTokenizer(TokenizerWrapper(self))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def encode(self, text: str) -> list[int]:
        """Token ids, the named tokens wherever they are spelled."""
        ids: list[int] = []
        at = 0
        for mark in self._marks.finditer(text):
            ids += [*text[at : mark.start()].encode(), self.ids[mark.group()]]
            at = mark.end()
        return ids + list(text[at:].encode())

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.library, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def allows(self, grammar: str, text: str) -> bool:
        """True if the grammar accepts the whole text."""
        ids = [*self.encode(text), END]
        return bool(self.matcher(grammar).validate_tokens(ids) == len(ids))

    def begins(self, grammar: str, text: str) -> bool:
        """True if the grammar accepts the text as the beginning of an answer."""
        ids = self.encode(text)
        return bool(self.matcher(grammar).validate_tokens(ids) == len(ids))

    def write(
        self, grammar: str, begin: str, draw: random.Random, limit: int = 2000, end_of_text: str = ""
    ) -> str:
        """Generate a random text of the grammar after a prefix, with a preference for closing characters.

        `end_of_text` ends free text, as a random choice would hardly end it.
        """
        matcher, written = self.matcher(grammar), bytearray(begin.encode())
        assert matcher.consume_tokens(self.encode(begin))
        for _ in range(limit):
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(len(self.tokens)) if mask[i // 8] >> (i % 8) & 1]
            if end_of_text and len(allowed) > 150 and draw.random() < 0.2:
                assert matcher.consume_tokens(self.encode(end_of_text))
                written += end_of_text.encode()
                continue
            liked = [i for i in allowed if i >= END or i in b'"}],{' or 97 <= i < 100]
            token = draw.choice(liked if liked and draw.random() < 0.9 else allowed)
            if token == END:
                return written.decode()
            matcher.consume_token(token)
            written += self.tokens[token]
        raise AssertionError(f"no end in sight: {bytes(written[:200])!r}")
