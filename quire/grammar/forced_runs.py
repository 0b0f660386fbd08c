"""Runs of text that a grammar forces, as drafts.

Strictly, JSON forces little more than the rest of a name, as a blank may stand between any two of its parts.
But which one stands there an answer shows early: so a run goes on over such a place with the blank that stood
at the last one like it, as far as what follows that is forced again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from quire.program.caches import MAX_DRAFTED
from quire.types import Draft

SURE = 16  # Draft.match of a run whose first token is the only one allowed
NOTHING = Draft((), "grammar")
_MOST_BYTES = 4 * MAX_DRAFTED
_NUM_SHOWING = 100  # last tokens of the output that show its blanks
_BLANK = re.compile(rb"[ \n\t]*")
_ENDS = re.compile(rb"([]{}[,:\"\d]|true|false|null|^)\Z")  # of parts of JSON, which a blank may follow


def forced_run(matcher: LLMatcher, vocabulary: LLTokenizer, output: Sequence[int]) -> Draft:
    """Return the tokens that the grammar forces after an output that `matcher` has taken; there may be none.

    They are those of the tokenizer. It takes 10 to 50 us, within a text 2.
    """
    sure = token_ids = matcher.compute_ff_tokens()
    if not matcher.compute_ff_bytes() and not _ENDS.search(vocabulary.decode_bytes(list(output[-1:]))):
        return NOTHING
    if len(sure) < MAX_DRAFTED and (run := _run(matcher.deep_copy(), vocabulary, output)):
        token_ids = vocabulary.tokenize_bytes(run)
        if token_ids[: len(sure)] != sure:  # which know the token before
            token_ids = sure
    return Draft(tuple(token_ids[:MAX_DRAFTED]), "grammar", SURE if sure else 0)


def _run(matcher: LLMatcher, vocabulary: LLTokenizer, output: Sequence[int]) -> bytes:
    """Return the text of a run, by advancing `matcher`."""
    run, shown = b"", b""
    while len(run) < _MOST_BYTES:
        piece = matcher.compute_ff_bytes()
        if not piece:
            behind = matcher.deep_copy()
            if not _take(behind, vocabulary, b" ") or not (part := behind.compute_ff_bytes()[:1]):
                return run
            shown = shown or vocabulary.decode_bytes(list(output[-_NUM_SHOWING:]))
            piece = blank_after(shown + run, part) + part
        if not _take(matcher, vocabulary, piece):
            return run
        run += piece
    return run


def _take(matcher: LLMatcher, vocabulary: LLTokenizer, text: bytes) -> bool:
    """Advance by a text, in whatever tokens; False if it may not follow."""
    try:
        token_ids = vocabulary.greedy_tokenize(text.decode())
    except UnicodeDecodeError:  # a control token, or half a character
        return False
    return matcher.try_consume_tokens(token_ids) == len(token_ids)


def blank_after(text: bytes, part: bytes) -> bytes:
    """Return the blank that is likely between a text in JSON and its next part, as there were before."""
    last, before = text[-1:], text[:-1]
    if last == b":":
        return _blank_at(before, before.rfind(b":"), b" ")
    opened = max(before.rfind(b"{"), before.rfind(b"["))
    blank = _blank_at(before, opened, b"")
    more = blank[len(_indent(before, opened)) :] if b"\n" in blank else b""  # than in the line before
    if last in (b"{", b"["):
        return _indent(text, len(text)) + more if more else blank
    if last == b",":
        comma = before.rfind(b",")
        blank = _blank_at(before, comma, b"") if comma > opened else blank
        if b"\n" in blank:
            return _indent(text, len(text))
        return blank if comma > opened else _blank_at(before, before.rfind(b":"), b" ")
    return _indent(text, len(text))[: -len(more)] if more and part in b"]}" else b""


def _blank_at(text: bytes, at: int, otherwise: bytes) -> bytes:
    """Return the blank behind a position."""
    found = _BLANK.match(text, at + 1)
    return found.group() if at >= 0 and found is not None else otherwise


def _indent(text: bytes, at: int) -> bytes:
    """Return the line break and the blank with which the line of a position begins."""
    begin = text.rfind(b"\n", 0, at)
    return b"\n" + _blank_at(text, begin, b"")
