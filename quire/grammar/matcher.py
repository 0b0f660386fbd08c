"""Interface to llguidance: its limits, vocabulary and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.grammar.wording import in_words

# Beyond these limits a grammar is refused or, if it grows at run time, its request fails. A state takes
# 500 bytes. An object takes four items for each property that may follow; a mask of 8,000 items takes up to
# 0.15 s.
_LIMITS = LLParserLimits(
    max_lexer_states=50_000,
    max_items_in_row=10_000,
    step_max_items=500_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_MARK = 0xFF  # the first byte of special tokens in llguidance; text never contains it

FORCED_CHARACTERS = 512  # of text that a grammar forces, tokenized at once: the next token needs no more


class _Wrapped:
    """A model's tokens in the form that LLTokenizer expects."""

    is_tokenizer_wrapper = True
    eos_token_id = None  # llguidance adds a token for the end, after all others
    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text[:FORCED_CHARACTERS])


def make_vocabulary(
    tokens: Sequence[bytes], special: Mapping[int, str], encode: Callable[[str], list[int]]
) -> LLTokenizer:
    """Make llguidance's vocabulary of the bytes of a model's tokens, and the names of `special` ones.

    A special token is allowed only where a grammar names it; one without bytes never. The token of id
    len(tokens) is the end of the output. `encode` tokenizes text in the middle of another.
    """
    listed = [b"" if _MARK in token else token for token in tokens]
    for token_id, name in special.items():
        listed[token_id] = name.encode(errors="replace")
    wrapped: Any = _Wrapped(listed, list(special), encode)
    vocabulary = LLTokenizer(wrapped)
    wrapped.tokens = []  # llguidance has its own copy
    return vocabulary


def make_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Make a matcher at the beginning of a grammar; check `fault` before using it."""
    return LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)


def fault(matcher: LLMatcher) -> str | None:
    """Return why a matcher cannot continue, in one line, or None."""
    if not matcher.is_error():
        return None
    return in_words(matcher.get_error())
