"""The tokens of a GGUF file's metadata, and what every tokenizer.json made of them has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.weights.gguf.metadata import Metadata

_NO_TOKEN = (1 << 32) - 1
NORMAL, UNKNOWN, CONTROL, DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
SPACE = "\u2581"
# Names of tokens in tokenizer_config.json, and in keys of the metadata, the third as the format spells it
NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "sep_token": "seperator",
    "unk_token": "unknown",
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
_WHOLE = ("bos", "eos", "unknown")  # matched as a whole, whatever their types
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


def end_tokens(tokens: FileTokens) -> list[int]:
    """Return the ids of tokens that end an answer: those stated, and those known by their names."""
    stated = [tokens.ids[name] for name in _ENDS if name in tokens.ids]
    harmony = "<|return|>" in tokens.vocabulary
    names = _ENDING if harmony else _ENDING | _ENDING_OTHERWISE
    found = (tokens.vocabulary.get(name, -1) for name in names)
    control = {number for number in found if number >= 0 and tokens.types[number] == CONTROL}
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
    types = metadata.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(texts)
    if len(types) != len(texts):
        raise ConfigError(f"{metadata.where}: {len(texts):,} tokens have {len(types):,} types")
    ids: dict[str, int] = {}
    for name in {*_ENDS, *NAMED.values()}:
        key = f"tokenizer.ggml.{name}_token_id"
        number = metadata.size(key, _NO_TOKEN, least=-1, most=_NO_TOKEN)
        if 0 <= number < len(texts):
            ids[name] = number
        elif number not in (-1, _NO_TOKEN):
            problem = f"{key} = {number:,}, but there are {len(texts):,} tokens"
            raise ConfigError(f"{metadata.where}: {problem}")
    return FileTokens(metadata, vocabulary, texts, types, ids)


def tokenizer_json(tokens: FileTokens, model: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json with this model, and the tokens that are matched as a whole."""
    named = {tokens.ids[name] for name in _WHOLE if name in tokens.ids}
    whole = [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != DEFINED or number in named,
        }
        for number, (text, kind) in enumerate(zip(tokens.texts, tokens.types, strict=True))
        if kind in (CONTROL, DEFINED) or number in named
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": whole,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }


def surrounded(
    tokens: FileTokens, first: str | None, last: str | None, between: str | None = None
) -> dict[str, Any]:
    """Return a post-processor that puts tokens around every text, and another between the two of a pair.

    They are given by their names in the metadata, None for none.
    """
    before, after, other = (
        [] if name is None else [{"SpecialToken": {"id": tokens.texts[tokens.ids[name]], "type_id": 0}}]
        for name in (first, last, between)
    )
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    used = {name for name in (first, last, between) if name is not None}
    texts = {tokens.texts[tokens.ids[name]]: tokens.ids[name] for name in used}
    return {
        "type": "TemplateProcessing",
        "single": [*before, one, *after],
        "pair": [*before, one, *after, *other, two, *after],
        "special_tokens": {t: {"id": t, "ids": [number], "tokens": [t]} for t, number in texts.items()},
    }
