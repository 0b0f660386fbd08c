"""The parts of encoders' tokenizers that a GGUF file leaves out or writes otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.errors import ConfigError
from quire.weights.gguf.metadata import Metadata
from quire.weights.vocabularies.pieces import INSIDE
from quire.weights.vocabularies.tokens import CONTROL, SPACE, TokenTable

_NAMES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}  # where a file does not say
_OTHER = {"cls_token": "bos_token", "sep_token": "eos_token"}  # keys that some files have instead


def in_words(tokens: TokenTable) -> TokenTable:
    """Return BERT's tokens as in a checkpoint: those inside a word marked, not those that begin one.

    Raises ConfigError if special ones are missing.
    """
    texts = []
    for text, kind in zip(tokens.texts, tokens.types, strict=True):
        if kind == CONTROL or (text.startswith("[") and text.endswith("]") and len(text) > 2):
            texts.append(text)  # older files have all names in brackets unmarked
        elif text.startswith(SPACE) and text != SPACE:
            texts.append(text.removeprefix(SPACE))
        else:
            texts.append(f"{INSIDE}{text}")
    vocabulary = {text: number for number, text in enumerate(texts)}
    if len(vocabulary) < len(texts):
        raise ConfigError(f"{tokens.where}: two tokens have one text")
    ids = dict(tokens.ids)
    for name, text in _NAMES.items():
        number = ids.get(name, ids.get(_OTHER.get(name, name), vocabulary.get(text)))
        if number is None:
            raise ConfigError(f"{tokens.where}: the tokenizer has no token {text}")
        ids[name] = number
    return replace(tokens, texts=texts, vocabulary=vocabulary, ids=ids)


def charsmap(metadata: Metadata) -> bytes:
    """Return the replacement of characters; empty if the file has none."""
    key = "tokenizer.ggml.precompiled_charsmap"
    numbers = metadata.numbers(key)
    if not numbers:
        return b""
    found = np.asarray(numbers)
    if found.dtype.kind != "i" or found.min() < -128 or found.max() > 255:
        raise ConfigError(f"{metadata.where}: {key} is not a list of bytes")
    return found.astype(np.uint8).tobytes()
