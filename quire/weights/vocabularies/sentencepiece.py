"""The files of SentencePiece: messages of protocol buffers, of which few fields matter."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from quire.errors import ConfigError, quoted
from quire.regular_file import hint_for
from quire.weights.source import TokenizerData
from quire.weights.vocabularies.pieces import bpe, merges_of_scores, unigram
from quire.weights.vocabularies.tokens import NORMAL, TokenTable

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of a file
_PIECE, _SCORE, _TYPE = 1, 2, 3  # fields of a piece
_KIND, _IDS = 3, {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2)}  # and their defaults
_CHARSMAP, _SPACED, _WHOLE_WORDS = 2, 3, 4  # fields of the normalizer
_UNIGRAM, _BPE = 1, 2  # kinds of models
# Classes of tokenizers that give pieces other ids than their file
_RENUMBERED = ("XLMRoberta", "Camembert", "MBart", "Barthez", "Nllb", "Pegasus", "Deberta", "Albert", "XGLM")

_Value = TypeVar("_Value", int, bytes)


def sentencepiece(path: Path, text: bytes, settings: Mapping[str, Any]) -> TokenizerData:
    """Return the tokenizer of a file of SentencePiece. Raises ConfigError: damaged, of an unknown kind."""
    name = str(settings.get("tokenizer_class") or "")
    if name.startswith(_RENUMBERED):
        what = f"{path}: a {quoted(name)} gives pieces other numbers than this file"
        raise ConfigError(what, "take a version of the model with a tokenizer.json")
    try:
        messages: dict[int, list[bytes]] = defaultdict(list)
        for number, value in _fields(text):
            messages[number].append(value)
        pieces = [_piece(message) for message in messages[_PIECES]]
        trainer, normalizer = (dict(_fields(b"".join(messages[field]))) for field in (_TRAINER, _NORMALIZER))
        kind, charsmap = _field(trainer, _KIND, _UNIGRAM), _field(normalizer, _CHARSMAP, b"")
        spaced, whole_words = (bool(_field(normalizer, field, 1)) for field in (_SPACED, _WHOLE_WORDS))
        ids = {name: _field(trainer, field, default) for name, (field, default) in _IDS.items()}
    except (ValueError, TypeError, IndexError, struct.error):
        raise ConfigError(f"{path}: neither a file of SentencePiece nor ranks", hint_for(text)) from None
    texts, scores = [text for text, _, _ in pieces], [score for _, score, _ in pieces]
    vocabulary = {piece: number for number, piece in enumerate(texts)}
    if not texts or len(vocabulary) < len(texts):
        raise ConfigError(f"{path}: two pieces have one text, or there are none", hint_for(text))
    ids = {name: number for name, number in ids.items() if number < len(texts)}
    tokens = TokenTable(str(path), vocabulary, texts, [kind for _, _, kind in pieces], ids)
    if kind == _BPE:
        merges, only_first = merges_of_scores(tokens, scores), settings.get("legacy") is False
        data = bpe(tokens, merges, spaced, charsmap, whole_words, only_first)
    elif kind == _UNIGRAM:
        data = unigram(tokens, scores, charsmap, spaced, whole_words)
    else:
        raise ConfigError(f"{path}: a model of words or characters, neither BPE nor Unigram")
    return tokens.data(data, {"add_bos_token": True} | dict(settings))


def _piece(message: bytes) -> tuple[str, float, int]:
    """Return the text, the score and the type of a piece."""
    fields = dict(_fields(message))
    (score,) = struct.unpack("<f", _field(fields, _SCORE, bytes(4)))
    return _field(fields, _PIECE, b"").decode("utf-8"), score, _field(fields, _TYPE, NORMAL)


def _field(fields: Mapping[int, Any], number: int, default: _Value) -> _Value:
    """Return a field, or what it is where a message has none. Raises ValueError if it is of another type."""
    value = fields.get(number, default)
    if not isinstance(value, type(default)):
        raise ValueError(f"field {number} is of another type")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: integers, and the bytes of everything else. Raises ValueError."""
    at = 0
    while at < len(data):
        tag, at = _integer(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _integer(data, at)
            yield tag >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, at = _integer(data, at)
        if length is None or length > len(data) - at:
            raise ValueError(f"no field of kind {kind} and {length} bytes")
        yield tag >> 3, data[at : at + length]
        at += length


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer that begins at a place, 7 bits a byte, and where it ends. Raises IndexError."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        number |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return number, at
    raise ValueError("an integer of more than ten bytes")
