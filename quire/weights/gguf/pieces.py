"""The tokenizers of encoders: WordPiece, and SentencePiece's Unigram, as what a tokenizer.json holds."""

from __future__ import annotations

import base64
from dataclasses import replace
from string import ascii_uppercase
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.weights.gguf.tokens import BYTE, CONTROL, SPACE, UNKNOWN, FileTokens, surrounded, tokenizer_json

_INSIDE = "##"  # before the pieces of a word but the first
_NAMES = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]"}  # of BERT's, where a file does not say
_OTHER = {"cls": "bos", "seperator": "eos"}  # keys that some files have instead
_LONGEST_WORD = 100  # characters; as in BERT


def word_pieces(tokens: FileTokens) -> tuple[dict[str, Any], FileTokens]:
    """Return BERT's tokenizer, and the tokens as it has them. Raises ConfigError if special ones are missing.

    A file marks the pieces that begin a word, not the others, and does not say whether letters are small:
    they are if no token is a single capital letter.
    """
    tokens = _in_words(tokens)
    ids = dict(tokens.ids)
    for name, text in _NAMES.items():
        number = ids.get(name, ids.get(_OTHER.get(name, name), tokens.vocabulary.get(text)))
        if number is None:
            raise ConfigError(f"{tokens.where}: the tokenizer has no token {text}")
        ids[name] = number
    tokens = replace(tokens, ids=ids)
    model = {
        "type": "WordPiece",
        "vocab": tokens.vocabulary,
        "unk_token": tokens.texts[ids["unknown"]],
        "continuing_subword_prefix": _INSIDE,
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
    data["post_processor"] = surrounded(tokens, "cls", "seperator")
    data["decoder"] = {"type": "WordPiece", "prefix": _INSIDE, "cleanup": True}
    return data, tokens


def _in_words(tokens: FileTokens) -> FileTokens:
    """Return the tokens as in a checkpoint: those inside a word marked, not those that begin one."""
    texts = []
    for text, kind in zip(tokens.texts, tokens.types, strict=True):
        if kind == CONTROL or (text.startswith("[") and text.endswith("]") and len(text) > 2):
            texts.append(text)  # older files have all names in brackets unmarked
        elif text.startswith(SPACE) and text != SPACE:
            texts.append(text.removeprefix(SPACE))
        else:
            texts.append(f"{_INSIDE}{text}")
    vocabulary = {text: number for number, text in enumerate(texts)}
    if len(vocabulary) < len(texts):
        raise ConfigError(f"{tokens.where}: two tokens have one text")
    return replace(tokens, texts=texts, vocabulary=vocabulary)


def unigram(tokens: FileTokens) -> dict[str, Any]:
    """Return the tokenizer that cuts a text into the pieces of the highest scores."""
    metadata = tokens.metadata
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens.texts):
        raise ConfigError(f"{tokens.where}: {len(tokens.texts):,} tokens have {len(scores):,} scores")
    unknown = tokens.ids.get("unknown")
    if unknown is None and UNKNOWN in tokens.types:
        unknown = tokens.types.index(UNKNOWN)
    model = {
        "type": "Unigram",
        "unk_id": unknown,
        "vocab": [[text, score] for text, score in zip(tokens.texts, scores, strict=True)],
        "byte_fallback": BYTE in tokens.types,
    }
    spaced = metadata.flag("tokenizer.ggml.add_space_prefix") is not False
    marking = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always" if spaced else "never"}
    whole_words = metadata.flag("tokenizer.ggml.remove_extra_whitespaces") is not False
    data = tokenizer_json(tokens, model)
    data["normalizer"] = _charsmap(tokens)
    passes = [{"type": "WhitespaceSplit"}, marking] if whole_words else [marking]
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": passes}
    data["decoder"] = marking
    return data


def _charsmap(tokens: FileTokens) -> dict[str, Any] | None:
    """Return the replacement of characters; None if the file has none."""
    key = "tokenizer.ggml.precompiled_charsmap"
    numbers = tokens.metadata.numbers(key)
    if not numbers:
        return None
    found = np.asarray(numbers)
    if found.dtype.kind != "i" or found.min() < -128 or found.max() > 255:
        raise ConfigError(f"{tokens.where}: {key} is not a list of bytes")
    data = found.astype(np.uint8).tobytes()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode("ascii")}
