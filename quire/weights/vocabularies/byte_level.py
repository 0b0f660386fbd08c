"""Byte-level BPE, as what a tokenizer.json holds: of stated merges, or of the ranks of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.weights.vocabularies.splits import Split
from quire.weights.vocabularies.tokens import Tokens, tokenizer_json

BPE = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}


def _alphabet() -> str:
    """Return GPT-2's spelling of the 256 bytes: printable Latin-1 as itself, the others from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in plain else next(others)) for byte in range(256))


BYTE_ALPHABET = _alphabet()


def spelled(token: bytes) -> str:
    """Return the spelling of a token in a byte-level vocabulary."""
    return token.decode("latin-1").translate(BYTE_ALPHABET)


def byte_level(
    tokens: Tokens, merges: Sequence[Any], split: Split, add_prefix_space: bool = False
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
    found = [
        (number, ranks[token[:at]], ranks[token[at:]])
        for token, number in ranks.items()
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    found.sort()
    spellings = {number: spelled(token) for token, number in ranks.items()}
    return [(spellings[left], spellings[right]) for _, left, right in found]
