"""The tokenizer of a model's folder without a tokenizer.json, as what that file would hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, quoted
from quire.json_file import read_json
from quire.regular_file import hint_for, present, read_limited
from quire.weights.source import TokenizerData
from quire.weights.vocabularies.byte_level import byte_level
from quire.weights.vocabularies.ranks import has_ranks, tiktoken
from quire.weights.vocabularies.sentencepiece import sentencepiece
from quire.weights.vocabularies.splits import SPLITS
from quire.weights.vocabularies.tekken import TEKKEN, tekken
from quire.weights.vocabularies.tokens import CONTROL, NAMES, NORMAL, TokenTable

MODELS = ("tokenizer.model", "tiktoken.model", "hy.tiktoken")  # of SentencePiece, or ranks
FILES = (TEKKEN, *MODELS, "vocab.json", "merges.txt")
_ADDED = "added_tokens.json"
_LIMIT_BYTES = 32 << 20
# Classes of tokenizers with vocab.json and merges.txt -> how they split texts
_SPLITS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_END = "<|endoftext|>"  # of both, where no file names another


def read_vocabulary(folder: Path, settings: Mapping[str, Any]) -> TokenizerData | None:
    """Read the tokenizer of a folder; None if no file has one. Raises ConfigError.

    `settings` are those of tokenizer_config.json.
    """
    settings = _with_added(folder, settings)
    if present(path := folder / TEKKEN):
        return tekken(path, settings)
    for name in MODELS:
        if present(path := folder / name):
            text = read_limited(path, _LIMIT_BYTES)
            return (tiktoken if has_ranks(text) else sentencepiece)(path, text, settings)
    if present(path := folder / "vocab.json"):
        return _of_merges(path, settings)
    if present(path := folder / "vocab.txt"):
        raise ConfigError(f"{folder} has no tokenizer.json, only vocab.txt", _made_with_transformers(folder))
    return None


def _with_added(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with the tokens of added_tokens.json where they state none."""
    found = dict(settings)
    if found.get("added_tokens_decoder") is None and present(path := folder / _ADDED):
        named = {text for value in settings.values() for text in _texts(value)}
        added: dict[str, Any] = {}
        for text, number in read_json(path).items():
            if type(number) is not int or number < 0:
                raise ConfigError(f"{path}: {quoted(number)} is not a token id")
            added[str(number)] = {"content": text, "special": text in named}
        found["added_tokens_decoder"] = added
    return found


def _texts(value: Any) -> list[str]:
    """Return the texts of a setting: a token, a token as an object, or several."""
    if isinstance(value, list):
        return [text for entry in value for text in _texts(entry)]
    text = value.get("content") if isinstance(value, dict) else value
    return [text] if isinstance(text, str) else []


def _of_merges(path: Path, settings: Mapping[str, Any]) -> TokenizerData:
    """Return the byte-level tokenizer of a vocab.json and the merges.txt beside it."""
    kind = str(settings.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if kind not in _SPLITS:
        what = f"{path}: how a {quoted(kind)} splits texts is not known without a tokenizer.json"
        raise ConfigError(what, _made_with_transformers(path.parent))
    merges_path = path.with_name("merges.txt")
    try:
        lines = read_limited(merges_path, _LIMIT_BYTES).decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{merges_path}: not UTF-8", hint_for(b"")) from None
    merges = [line for line in lines if line and not line.startswith("#version")]
    if (bad := next((line for line in merges if line.count(" ") != 1), None)) is not None:
        raise ConfigError(f"{merges_path}: {quoted(bad)} is not a pair of tokens", hint_for(b""))
    named = {name: text for name in NAMES for text in _texts(settings.get(name))}
    named = named or {"eos_token": _END, "unk_token": _END}
    tokens = _numbered(path, read_json(path), named)
    data = byte_level(tokens, merges, SPLITS[_SPLITS[kind]], settings.get("add_prefix_space") is True)
    return tokens.data(data, settings)


def _numbered(path: Path, vocabulary: Mapping[str, Any], named: Mapping[str, str]) -> TokenTable:
    """Return the tokens of a vocabulary. Raises ConfigError unless every number is that of one token."""
    if set(vocabulary.values()) != set(range(len(vocabulary))):
        what = f"{path}: its numbers are not those from 0 to {len(vocabulary) - 1:,}"
        raise ConfigError(what, hint_for(b""))
    texts = sorted(vocabulary, key=lambda text: vocabulary[text])
    types = [CONTROL if text in named.values() else NORMAL for text in texts]
    ids = {name: vocabulary[text] for name, text in named.items() if text in vocabulary}
    return TokenTable(str(path), vocabulary, texts, types, ids)


def _made_with_transformers(folder: Path) -> str:
    call = f"AutoTokenizer.from_pretrained({str(folder)!r}, use_fast=True)"
    return f"make one with transformers: {call}.save_pretrained({str(folder)!r})"
