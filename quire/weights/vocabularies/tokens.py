"""The tokens of a vocabulary file, and what every tokenizer.json made of them has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.weights.source import TokenizerData

NORMAL, UNKNOWN, CONTROL, DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens, as SentencePiece's
SPACE = "\u2581"
# Names of tokens in tokenizer_config.json
NAMES = ("bos_token", "eos_token", "sep_token", "unk_token", "pad_token", "cls_token", "mask_token")
_WHOLE = ("bos_token", "eos_token", "unk_token")  # matched as a whole, whatever their types


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The tokens of a file: ids by text, the texts and types by id, and the ids of named ones."""

    where: str
    vocabulary: Mapping[str, int]
    texts: list[str]
    types: list[int]
    ids: Mapping[str, int]

    def data(self, content: Mapping[str, Any], settings: Mapping[str, Any]) -> TokenizerData:
        """Return a tokenizer with these settings, and the texts of named tokens where they state none."""
        named = {name: self.texts[self.ids[name]] for name in NAMES if name in self.ids}
        return TokenizerData(self.where, content, named | dict(settings))


def tokenizer_json(tokens: TokenTable, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json with this model, and the tokens that are matched as a whole."""
    named = {tokens.ids[name] for name in _WHOLE if name in tokens.ids}
    whole = [
        added_token(number, text, kind != DEFINED or number in named)
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


def added_token(number: int, text: str, special: bool) -> dict[str, Any]:
    """Return the entry of a token that is matched as a whole."""
    matched = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": text, **matched, "special": special}


def surrounded(
    tokens: TokenTable, first: str | None, last: str | None, between: str | None = None
) -> dict[str, Any]:
    """Return a post-processor that puts tokens around every text, and another between the two of a pair.

    They are given by their names in tokenizer_config.json, None for none.
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
