"""Mistral's tekken.json: a tokenizer by ranks, and the version of the conversations that go with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire.errors import ConfigError, shortened
from quire.regular_file import hint_for, read_limited
from quire.weights.source import TokenizerData
from quire.weights.vocabularies.ranks import of_ranks, ranked_tokens
from quire.weights.vocabularies.splits import Split

TEKKEN = "tekken.json"
_LIMIT_BYTES = 128 << 20
_MOST_SPECIAL = 1 << 14


class _Entry(msgspec.Struct):
    rank: int
    token_bytes: bytes


class _Special(msgspec.Struct):
    rank: int
    token_str: str
    is_control: bool = True


class _Settings(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str


class _Image(msgspec.Struct):
    image_patch_size: int
    max_image_size: int


class _Version(msgspec.Struct):
    config: _Settings
    special_tokens: list[_Special] | None = None
    image: _Image | None = None
    multimodal: _Image | None = None  # the same, in older files


class _Tekken(_Version, kw_only=True):
    vocab: list[_Entry]


_File = TypeVar("_File", bound=_Version)


# Special tokens of files that state none
_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def tekken(path: Path, settings: Mapping[str, Any]) -> TokenizerData:
    """Return the tokenizer of a tekken.json, whose special tokens come before the others.

    Raises ConfigError if the file is damaged or its numbers do not fit.
    """
    file = _decoded(path, _Tekken)
    size, reserved = file.config.default_vocab_size, file.config.default_num_special_tokens
    ranks = {entry.token_bytes: entry.rank for entry in file.vocab if entry.rank < size - reserved}
    if len(ranks) != size - reserved or not ranks:
        what = f"{path}: it has {len(ranks):,} tokens for {size:,} numbers, {reserved:,} of them special"
        raise ConfigError(what, hint_for(b""))
    special = [(f"<SPECIAL_{number}>", True) for number in range(max(0, min(reserved, _MOST_SPECIAL)))]
    stated = file.special_tokens
    for token in [_Special(i, name) for i, name in enumerate(_SPECIAL)] if stated is None else stated:
        if not 0 <= token.rank < len(special):
            what = f"{path}: the special token {token.rank:,} is none of {reserved:,}"
            raise ConfigError(what, hint_for(b""))
        special[token.rank] = token.token_str, token.is_control
    tokens = ranked_tokens(str(path), {token: rank + reserved for token, rank in ranks.items()}, special)
    split = Split((file.config.pattern,), whole=True)
    named = {name: text for name, text in _NAMED.items() if text in tokens.vocabulary}
    return of_ranks(tokens, ranks, split, {"add_bos_token": True} | named | dict(settings))


def tekken_version(path: Path) -> tuple[str, frozenset[str]]:
    """Return the version of a tekken.json and the names of its special tokens. Raises ConfigError."""
    file = _decoded(path, _Version)
    stated = _SPECIAL if file.special_tokens is None else [token.token_str for token in file.special_tokens]
    return file.config.version, frozenset(stated)


def tekken_images(path: Path) -> dict[str, Any]:
    """Return what a preprocessor_config.json of Pixtral would say; {} for a model without images."""
    file = _decoded(path, _Version)
    if (stated := file.image or file.multimodal) is None:
        return {}
    return {
        "image_processor_type": "PixtralImageProcessorFast",
        "patch_size": {"height": stated.image_patch_size, "width": stated.image_patch_size},
        "size": {"longest_edge": stated.max_image_size},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _decoded(path: Path, kind: type[_File]) -> _File:
    text = read_limited(path, _LIMIT_BYTES)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {shortened(str(error), 200)}", hint_for(text)) from None
