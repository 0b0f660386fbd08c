"""SentencePiece's BPE and Unigram, and WordPiece, as what a tokenizer.json holds."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from quire.errors import ConfigError
from quire.weights.vocabularies.byte_level import BPE
from quire.weights.vocabularies.tokens import (
    BYTE,
    DEFINED,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    TokenTable,
    surrounded,
    tokenizer_json,
)

INSIDE = "##"  # before the pieces of a word but the first
_LONGEST_PIECE = 256  # characters; SentencePiece allows 16 unless told otherwise
_LONGEST_WORD = 100  # characters; as in BERT


def bpe(
    tokens: TokenTable,
    merges: Sequence[Any],
    spaced: bool,
    charsmap: bytes = b"",
    whole_words: bool = False,
    only_first: bool = False,
) -> dict[str, Any]:
    """Return the tokenizer of these merges.

    `charsmap` replaces characters before, if it is not empty; white space is one space each if `whole_words`.
    A text begins with a space if `spaced`, and so does one after a control token unless `only_first`.
    """
    unknown = tokens.ids.get("unk_token")
    model = {
        **BPE,
        "vocab": tokens.vocabulary,
        "merges": merges,
        "ignore_merges": False,
        "byte_fallback": BYTE in tokens.types,
        "unk_token": None if unknown is None else tokens.texts[unknown],
        "fuse_unk": True,
    }
    data = tokenizer_json(tokens, model)
    data["decoder"] = _joined(spaced)
    before = [*_replaced(charsmap)]
    if whole_words:
        before.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
        before.append({"type": "Strip", "strip_left": True, "strip_right": True})
    if only_first and spaced:
        first = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
        data["pre_tokenizer"] = first
    else:
        before += _marked(spaced)
    data["normalizer"] = {"type": "Sequence", "normalizers": before}
    return data


def _marked(spaced: bool) -> list[dict[str, Any]]:
    """Return the normalizers that write spaces as pieces do, and another one before the text if `spaced`."""
    before = [{"type": "Prepend", "prepend": SPACE}] if spaced else []
    return [*before, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def _joined(spaced: bool) -> dict[str, Any]:
    """Return the decoder of pieces, some of which may be bytes."""
    parts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaced:
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": parts}


def _replaced(charsmap: bytes) -> list[dict[str, Any]]:
    """Return the normalizer that replaces characters; none for an empty map."""
    text = base64.b64encode(charsmap).decode("ascii")
    return [{"type": "Precompiled", "precompiled_charsmap": text}] if charsmap else []


def merges_of_scores(tokens: TokenTable, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that the scores of the pieces mean: the piece of the highest score first."""
    _check(tokens, scores)
    found: list[tuple[float, int, int, int, int, str, str]] = []
    ids = {
        text: number
        for number, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True))
        if kind in (NORMAL, DEFINED, UNUSED)
    }
    for text, number in ids.items():
        if len(text) > _LONGEST_PIECE:
            continue
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in ids and right in ids:
                found.append((-scores[number], -at, at - len(text), ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def unigram(
    tokens: TokenTable, scores: Sequence[float], charsmap: bytes, spaced: bool, whole_words: bool
) -> dict[str, Any]:
    """Return the tokenizer that cuts a text into the pieces of the highest scores.

    `charsmap` replaces characters before, if it is not empty. A text begins with a space if `spaced`; white
    space is one space each if `whole_words`.
    """
    _check(tokens, scores)
    unknown = tokens.ids.get("unk_token")
    if unknown is None and UNKNOWN in tokens.types:
        unknown = tokens.types.index(UNKNOWN)
    model = {
        "type": "Unigram",
        "unk_id": unknown,
        "vocab": [[text, score] for text, score in zip(tokens.texts, scores, strict=True)],
        "byte_fallback": BYTE in tokens.types,
    }
    marking = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always" if spaced else "never"}
    data = tokenizer_json(tokens, model)
    before = _replaced(charsmap)
    if whole_words:
        passes = [{"type": "WhitespaceSplit"}, marking]
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": passes}
    else:
        before += _marked(spaced)
    data["normalizer"] = {"type": "Sequence", "normalizers": before} if before else None
    data["decoder"] = _joined(spaced) if BYTE in tokens.types else marking
    return data


def _check(tokens: TokenTable, scores: Sequence[float]) -> None:
    if len(scores) != len(tokens.texts):
        raise ConfigError(f"{tokens.where}: {len(tokens.texts):,} tokens have {len(scores):,} scores")


def word_pieces(tokens: TokenTable) -> dict[str, Any]:
    """Return BERT's tokenizer, which makes letters small if no token is a single capital letter."""
    model = {
        "type": "WordPiece",
        "vocab": tokens.vocabulary,
        "unk_token": tokens.texts[tokens.ids["unk_token"]],
        "continuing_subword_prefix": INSIDE,
        "max_input_chars_per_word": _LONGEST_WORD,
    }
    data = tokenizer_json(tokens, model)
    small = tokens.vocabulary.keys().isdisjoint(ascii_uppercase)
    data["normalizer"] = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,  # with capital letters
        "lowercase": small,
    }
    data["pre_tokenizer"] = {"type": "BertPreTokenizer"}
    data["post_processor"] = surrounded(tokens, "cls_token", "sep_token")
    data["decoder"] = {"type": "WordPiece", "prefix": INSIDE, "cleanup": True}
    return data
