"""Grammars as llguidance runs them: its limits, its vocabulary, its errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.grammar.wording import in_words

# Beyond these a grammar is refused or, if it grows while it runs, its request fails. A state is 500 bytes. An
# object takes four items for each property that may come next; a mask of 8,000 items takes up to 0.15 s.
_LIMITS = LLParserLimits(
    max_lexer_states=50_000,
    max_items_in_row=10_000,
    step_max_items=500_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_MARK = 0xFF  # begins special tokens in llguidance, and is in no text

FORCED_CHARACTERS = (
    512  # of a text that the grammar dictates, tokenized at once: the next token needs no more
)


class _Wrapped:
    """The tokens of a model in the form that LLTokenizer wants."""

    is_tokenizer_wrapper = True
    eos_token_id = None  # llguidance adds a token for the end, behind the others
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
    """What llguidance knows of a model's tokens: the bytes of each, or of `special` ones the name.

    A special token follows only where a grammar names it; one without bytes never. Token number len(tokens)
    is the end of the output. `encode` tokenizes a text that stands in the middle of another.
    """
    listed = [b"" if _MARK in token else token for token in tokens]
    for token_id, name in special.items():
        listed[token_id] = name.encode(errors="replace")
    wrapped: Any = _Wrapped(listed, list(special), encode)
    vocabulary = LLTokenizer(wrapped)
    wrapped.tokens = []  # llguidance has its own copy
    return vocabulary


def make_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """A grammar at its beginning; look at `fault` before using it."""
    return LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)


def fault(matcher: LLMatcher) -> str | None:
    """Why a matcher cannot go on, in one line, or None."""
    if not matcher.is_error():
        return None
    return in_words(matcher.get_error())
