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
    Tokens,
    surrounded,
    tokenizer_json,
)

INSIDE = "##"  # before the pieces of a word but the first
_LONGEST_PIECE = 256  # characters; SentencePiece allows 16 unless told otherwise
_LONGEST_WORD = 100  # characters; as in BERT


def bpe(tokens: Tokens, merges: Sequence[Any], spaced: bool) -> dict[str, Any]:
    """Return the tokenizer of these merges; a text begins with a space if `spaced`."""
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
    to_pieces: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    to_text: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaced:
        to_pieces.insert(0, {"type": "Prepend", "prepend": SPACE})
        to_text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    data = tokenizer_json(tokens, model)
    data["normalizer"] = {"type": "Sequence", "normalizers": to_pieces}
    data["decoder"] = {"type": "Sequence", "decoders": to_text}
    return data


def merges_of_scores(tokens: Tokens, scores: Sequence[float]) -> list[tuple[str, str]]:
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
    tokens: Tokens, scores: Sequence[float], charsmap: bytes, spaced: bool, whole_words: bool
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
    if charsmap:
        text = base64.b64encode(charsmap).decode("ascii")
        data["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": text}
    passes = [{"type": "WhitespaceSplit"}, marking] if whole_words else [marking]
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": passes}
    data["decoder"] = marking
    return data


def _check(tokens: Tokens, scores: Sequence[float]) -> None:
    if len(scores) != len(tokens.texts):
        raise ConfigError(f"{tokens.where}: {len(tokens.texts):,} tokens have {len(scores):,} scores")


def word_pieces(tokens: Tokens, lowercase: bool | None = None) -> dict[str, Any]:
    """Return BERT's tokenizer. Without a word about it, letters are small if no token is a single capital."""
    model = {
        "type": "WordPiece",
        "vocab": tokens.vocabulary,
        "unk_token": tokens.texts[tokens.ids["unk_token"]],
        "continuing_subword_prefix": INSIDE,
        "max_input_chars_per_word": _LONGEST_WORD,
    }
    data = tokenizer_json(tokens, model)
    small = tokens.vocabulary.keys().isdisjoint(ascii_uppercase) if lowercase is None else lowercase
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
