"""Byte-level BPE, as what a tokenizer.json holds: of stated merges, or of the ranks of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.weights.vocabularies.spelling import spelled
from quire.weights.vocabularies.splits import Split
from quire.weights.vocabularies.tokens import TokenTable, tokenizer_json

BPE = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}


def byte_level(
    tokens: TokenTable, merges: Sequence[Any], split: Split, add_prefix_space: bool = False
) -> dict[str, Any]:
    """Return the tokenizer of these merges, with texts split before."""
    passes = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    in_bytes = {"type": "ByteLevel", "trim_offsets": True, "use_regex": False}
    model = {
        **BPE,
        "vocab": tokens.vocabulary,
        "merges": merges,
        "ignore_merges": split.whole,
        "byte_fallback": False,
        "unk_token": None,
        "fuse_unk": False,
    }
    data = tokenizer_json(tokens, model)
    data["normalizer"] = {"type": "NFC"} if split.composed else None
    last = in_bytes | {"add_prefix_space": add_prefix_space}
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*passes, last]}
    data["decoder"] = in_bytes | {"add_prefix_space": False}
    return data


def merges_of_ranks(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return the merges that ranks mean: of all pairs that make a token, that of the lowest rank first.

    Of the pairs that make one token, those of lower ranks come first.
    """
    get = ranks.get
    found = [
        (number, left, right)
        for token, number in ranks.items()
        for at in range(1, len(token))
        if (left := get(token[:at])) is not None and (right := get(token[at:])) is not None
    ]
    found.sort()
    spellings = {number: spelled(token) for token, number in ranks.items()}
    return [(spellings[left], spellings[right]) for _, left, right in found]
