"""Byte-level BPE by ranks, and the files of tiktoken, which have nothing else."""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.regular_file import hint_for
from quire.weights.source import TokenizerData
from quire.weights.vocabularies.byte_level import byte_level, merges_of_ranks
from quire.weights.vocabularies.spelling import spelled
from quire.weights.vocabularies.splits import SPLITS, Split
from quire.weights.vocabularies.tokens import CONTROL, DEFINED, NORMAL, TokenTable

_LONGEST = 256  # bytes of a token
_LONGEST_LINE = 1 << 10


@dataclass(frozen=True, slots=True)
class _Known:
    """A tokenizer by the number of its ranks: how it splits texts, and the special tokens that follow."""

    split: str
    special: tuple[str, ...]
    named: Mapping[str, str]


_LLAMA3 = _Known(
    "llama3",
    (
        *("<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(4))),
        *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
        *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
    ),
    {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
)
_KIMI = _Known("kimi-k2", tuple(f"<|reserved_token_{163_584 + i}|>" for i in range(256)), {})
_HUNYUAN = _Known(
    "qwen2",
    (
        *("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"),
        *(f"<|extra_{i}|>" for i in range(205)),
    ),
    {},
)
_KNOWN = {128_000: _LLAMA3, 163_584: _KIMI, 127_957: _HUNYUAN}  # by the number of ranks


def has_ranks(text: bytes) -> bool:
    """Return True if a file has lines of a token in base64 and its rank, by the first of them."""
    token, _, rank = text[:_LONGEST_LINE].partition(b"\n")[0].partition(b" ")
    try:
        return rank.strip().isdigit() and bool(binascii.a2b_base64(token, strict_mode=True))
    except binascii.Error:
        return False


def tiktoken(path: Path, text: bytes, settings: Mapping[str, Any]) -> TokenizerData:
    """Return the tokenizer of a file of ranks. Raises ConfigError for one that is not known.

    Ranks count the lines, but for those with a token that was there before, as in Hunyuan's code. Special
    tokens have their names from `settings` where these state them.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        token, _, rank = line.partition(b" ")
        try:
            int(rank)
            ranks.setdefault(binascii.a2b_base64(token, strict_mode=True), len(ranks))
        except ValueError:
            what = f"{path}, line {number}: no token in base64 and its rank"
            raise ConfigError(what, hint_for(text)) from None
    if (known := _KNOWN.get(len(ranks))) is None:
        what = f"{path}: {len(ranks):,} ranks, of no tokenizer whose special tokens and splits are known"
        raise ConfigError(what, "take a version of the model with a tokenizer.json")
    split = SPLITS[known.split]
    stated = settings.get("added_tokens_decoder")
    special = []
    for number, name in enumerate(known.special, len(ranks)):
        entry = stated.get(str(number)) if isinstance(stated, dict) else None
        named = isinstance(entry, dict) and isinstance(entry.get("content"), str)
        special.append((entry["content"], bool(entry.get("special"))) if entry and named else (name, True))
    tokens = ranked_tokens(str(path), ranks, special, first_special=len(ranks))
    begins = {"add_bos_token": True} if split.begins else {}
    return of_ranks(tokens, ranks, split, begins | dict(known.named) | dict(settings))


def ranked_tokens(
    where: str, ids: Mapping[bytes, int], special: Sequence[tuple[str, bool]], first_special: int = 0
) -> TokenTable:
    """Return tokens by their ids, and special ones, each with whether it is hidden, from `first_special` on.

    Raises ConfigError unless every number is that of one token.
    """
    texts: list[str | None] = [None] * (len(ids) + len(special))
    types = [NORMAL] * len(texts)
    for number, (text, hidden) in enumerate(special, first_special):
        texts[number], types[number] = text, CONTROL if hidden else DEFINED
    for token, number in ids.items():
        if not 0 <= number < len(texts) or texts[number] is not None or not 0 < len(token) <= _LONGEST:
            raise ConfigError(f"{where}: the numbers of its tokens do not fit", hint_for(b""))
        texts[number] = spelled(token)
    whole = [text for text in texts if text is not None]
    vocabulary = {text: number for number, text in enumerate(whole)}
    if len(vocabulary) < len(texts):
        raise ConfigError(f"{where}: two tokens have one text, or one has none", hint_for(b""))
    return TokenTable(where, vocabulary, whole, types, {})


def of_ranks(
    tokens: TokenTable, ranks: Mapping[bytes, int], split: Split, settings: Mapping[str, Any]
) -> TokenizerData:
    return tokens.data(byte_level(tokens, merges_of_ranks(ranks), split), settings)
