"""The tokenizer of a GGUF file's metadata, as what a tokenizer.json that means the same holds.

Five kinds are supported: byte-level BPE ("gpt2"), whose merges the file states; SentencePiece's BPE
("llama"), whose merges follow from the scores of the pieces; the same with stated merges ("gemma4");
WordPiece ("bert") and SentencePiece's Unigram ("t5") of encoders.
"""

from __future__ import annotations

import logging
from typing import Any

from quire.errors import ConfigError, quoted
from quire.weights.gguf.pieces import unigram, word_pieces
from quire.weights.gguf.splits import split_of, unnamed_split
from quire.weights.gguf.tokens import (
    BYTE,
    DEFINED,
    NAMED,
    NORMAL,
    SPACE,
    UNUSED,
    FileTokens,
    surrounded,
    tokenizer_json,
)
from quire.weights.source import TokenizerData

_LOG = logging.getLogger(__name__)
_BPE = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}


def tokenizer_of(tokens: FileTokens) -> TokenizerData:
    """Return the tokenizer. Raises ConfigError for an unsupported kind."""
    metadata = tokens.metadata
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "bert":
        data, tokens = word_pieces(tokens)
        return _with_settings(tokens, data, {})
    encodes = {"cls", "seperator"} <= tokens.ids.keys()  # as encoders do, whose texts begin and end
    if kind == "gpt2":
        data, begins = _byte_level(tokens)
        begins, ends = begins or encodes, encodes
    elif kind in ("llama", "gemma4"):
        data, begins, ends = _sentence_pieces(tokens, merges_are_stated=kind == "gemma4"), True, False
    elif kind == "t5":
        data, begins, ends = unigram(tokens), "bos" in tokens.ids, True
    else:
        raise ConfigError(
            f"{metadata.where}: a tokenizer of the kind {quoted(kind)} is not supported",
            "take the safetensors version of the model, with its tokenizer.json",
        )
    begins, ends, divides = (
        default if stated is None else stated
        for default, stated in (
            (begins, metadata.flag("tokenizer.ggml.add_bos_token")),
            (ends, metadata.flag("tokenizer.ggml.add_eos_token")),
            (True, metadata.flag("tokenizer.ggml.add_sep_token")),
        )
    )
    if ends and "eos" in tokens.ids:
        first = "bos" if begins and "bos" in tokens.ids else None
        between = "seperator" if divides and "seperator" in tokens.ids else None
        data["post_processor"] = surrounded(tokens, first, "eos", between)
    return _with_settings(tokens, data, {"add_bos_token": begins})


def _with_settings(tokens: FileTokens, data: dict[str, Any], settings: dict[str, Any]) -> TokenizerData:
    named = {name: tokens.texts[tokens.ids[key]] for name, key in NAMED.items() if key in tokens.ids}
    return TokenizerData(f"the tokenizer of {tokens.where}", data, named | settings)


def _byte_level(tokens: FileTokens) -> tuple[dict[str, Any], bool]:
    metadata = tokens.metadata
    name = metadata.text("tokenizer.ggml.pre")
    if name is None:
        name = unnamed_split(metadata.text("general.architecture") or "", tokens.texts)
        _LOG.warning(
            "%s: the file does not say how texts are split (tokenizer.ggml.pre); taken as %r: if answers are "
            "poor, take a newer file of the model",
            metadata.where,
            name,
        )
    split = split_of(name, metadata.where)
    passes = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    in_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        **_BPE,
        "vocab": tokens.vocabulary,
        "merges": metadata.texts("tokenizer.ggml.merges"),
        "ignore_merges": split.whole,
        "byte_fallback": False,
        "unk_token": None,
        "fuse_unk": False,
    }
    data = tokenizer_json(tokens, model)
    data["normalizer"] = {"type": "NFC"} if split.composed else None
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*passes, in_bytes]}
    data["decoder"] = in_bytes
    return data, split.begins


def _sentence_pieces(tokens: FileTokens, merges_are_stated: bool) -> dict[str, Any]:
    spaced = tokens.metadata.flag("tokenizer.ggml.add_space_prefix") is not False
    unknown = tokens.ids.get("unknown")
    model = {
        **_BPE,
        "vocab": tokens.vocabulary,
        "merges": tokens.metadata.texts("tokenizer.ggml.merges") if merges_are_stated else _merges(tokens),
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


def _merges(tokens: FileTokens) -> list[tuple[str, str]]:
    """Return the merges that the scores of the pieces mean: the piece of the highest score first."""
    scores = tokens.metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens.texts):
        raise ConfigError(f"{tokens.where}: {len(tokens.texts):,} tokens have {len(scores):,} scores")
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


_LONGEST_PIECE = 256  # characters; SentencePiece allows 16 unless told otherwise
