"""The tokenizer of a GGUF file's metadata, as what a tokenizer.json that means the same holds.

Three kinds are supported: byte-level BPE ("gpt2"), whose merges the file states; SentencePiece's BPE
("llama"), whose merges follow from the scores of the pieces; the same with stated merges ("gemma4").
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError, quoted
from quire.weights.gguf.metadata import Metadata
from quire.weights.gguf.splits import split_of, unnamed_split
from quire.weights.source import TokenizerData

_LOG = logging.getLogger(__name__)
_NO_TOKEN = (1 << 32) - 1
_NORMAL, _UNKNOWN, _CONTROL, _DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ENDS = ("eos", "eot", "eom")
# Names of tokens that end an answer, which many files do not state; the second group only where there is no
# <|return|>, whose models write <|end|> between the parts of an answer.
_ENDING = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<turn|>",
}
_ENDING_VISIBLY = "<|tool_response>"  # files give it the type of text, for who reads the call before it
_ENDING_OTHERWISE = {"<|end|>", "<|end_of_text|>", "</s>", "<eos>"}


@dataclass(frozen=True, slots=True)
class FileTokens:
    """The tokens of a file: ids by text, the texts and types by id, and the ids of named ones."""

    metadata: Metadata
    vocabulary: dict[str, int]
    texts: list[str]
    types: list[int] | list[float]
    ids: dict[str, int]

    @property
    def where(self) -> str:
        return self.metadata.where


def tokenizer_of(tokens: FileTokens) -> TokenizerData:
    """Return the tokenizer. Raises ConfigError for an unsupported kind."""
    metadata = tokens.metadata
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        data, begins = _byte_level(tokens)
    elif kind in ("llama", "gemma4"):
        data, begins = _sentence_pieces(tokens, merges_are_stated=kind == "gemma4"), True
    else:
        raise ConfigError(
            f"{metadata.where}: a tokenizer of the kind {quoted(kind)} is not supported",
            "take the safetensors version of the model, with its tokenizer.json",
        )
    settings: dict[str, Any] = {
        name: tokens.texts[tokens.ids[key]] for name, key in _NAMED.items() if key in tokens.ids
    }
    stated = metadata.flag("tokenizer.ggml.add_bos_token")
    settings["add_bos_token"] = begins if stated is None else stated
    if metadata.flag("tokenizer.ggml.add_eos_token") and "eos" in tokens.ids:
        data["post_processor"] = _appending(settings["eos_token"], tokens.ids["eos"])
    return TokenizerData(f"the tokenizer of {metadata.where}", data, settings)


def end_tokens(tokens: FileTokens) -> list[int]:
    """Return the ids of tokens that end an answer: those stated, and those known by their names."""
    stated = [tokens.ids[name] for name in _ENDS if name in tokens.ids]
    harmony = "<|return|>" in tokens.vocabulary
    names = _ENDING if harmony else _ENDING | _ENDING_OTHERWISE
    found = (tokens.vocabulary.get(name, -1) for name in names)
    control = {number for number in found if number >= 0 and tokens.types[number] == _CONTROL}
    if _ENDING_VISIBLY in tokens.vocabulary:
        control.add(tokens.vocabulary[_ENDING_VISIBLY])
    return list(dict.fromkeys((*stated, *sorted(control))))


def read_tokens(metadata: Metadata) -> FileTokens | None:
    """Read the tokens, with their types and the ids of named ones; None for a file without a tokenizer.

    Raises ConfigError if they do not fit.
    """
    if metadata.text("tokenizer.ggml.model") in (None, "no_vocab", "none"):
        return None
    texts = metadata.texts("tokenizer.ggml.tokens")
    if not texts:
        raise ConfigError(f"{metadata.where}: the metadata has a tokenizer without tokens")
    vocabulary = {text or f"[EMPTY_{number}]": number for number, text in enumerate(texts)}
    if len(vocabulary) < len(texts):
        raise ConfigError(f"{metadata.where}: two tokens have one text")
    texts = [*vocabulary]
    types = metadata.numbers("tokenizer.ggml.token_type") or [_NORMAL] * len(texts)
    if len(types) != len(texts):
        raise ConfigError(f"{metadata.where}: {len(texts):,} tokens have {len(types):,} types")
    ids: dict[str, int] = {}
    for name in {*_ENDS, *_NAMED.values()}:
        key = f"tokenizer.ggml.{name}_token_id"
        number = metadata.size(key, _NO_TOKEN, least=-1, most=_NO_TOKEN)
        if 0 <= number < len(texts):
            ids[name] = number
        elif number not in (-1, _NO_TOKEN):
            problem = f"{key} = {number:,}, but there are {len(texts):,} tokens"
            raise ConfigError(f"{metadata.where}: {problem}")
    return FileTokens(metadata, vocabulary, texts, types, ids)


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
        "merges": metadata.texts("tokenizer.ggml.merges"),
        "ignore_merges": split.whole,
        "byte_fallback": False,
        "unk_token": None,
        "fuse_unk": False,
    }
    data = _tokenizer(tokens, model)
    data["normalizer"] = {"type": "NFC"} if split.composed else None
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*passes, in_bytes]}
    data["decoder"] = in_bytes
    return data, split.begins


def _sentence_pieces(tokens: FileTokens, merges_are_stated: bool) -> dict[str, Any]:
    spaced = tokens.metadata.flag("tokenizer.ggml.add_space_prefix") is not False
    unknown = tokens.ids.get("unknown")
    model = {
        "merges": tokens.metadata.texts("tokenizer.ggml.merges") if merges_are_stated else _merges(tokens),
        "ignore_merges": False,
        "byte_fallback": _BYTE in tokens.types,
        "unk_token": None if unknown is None else tokens.texts[unknown],
        "fuse_unk": True,
    }
    to_pieces: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    to_text: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaced:
        to_pieces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        to_text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    data = _tokenizer(tokens, model)
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
        if kind in (_NORMAL, _DEFINED, _UNUSED)
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


def _tokenizer(tokens: FileTokens, model: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json with the vocabulary, and the tokens that are matched as a whole."""
    named = {tokens.ids[name] for name in ("bos", "eos", "unknown") if name in tokens.ids}
    whole = [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _DEFINED or number in named,
        }
        for number, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True))
        if kind in (_CONTROL, _DEFINED) or number in named
    ]
    shared = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": whole,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {**shared, **model, "vocab": tokens.vocabulary},
    }


def _appending(text: str, number: int) -> dict[str, Any]:
    """Return a post-processor that puts a token at the end of every text."""
    end = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [first, end],
        "pair": [first, end, second, end],
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
    }
