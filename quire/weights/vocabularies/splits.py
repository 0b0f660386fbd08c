"""Splits of texts before byte-level BPE, by the name in `tokenizer.ggml.pre`.

A GGUF file names the split instead of stating it. The patterns are those of the models' own tokenizer.json
files or, for models without one, of llama.cpp. Each pattern splits what the one before it left whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import ConfigError, did_you_mean, quoted

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_REST_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_O200K = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST_AND_SLASH}"
)
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_AND_SLASH}"
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# Letters with a case, but not Georgian ones; and punctuation of all widths
_CASED = r"\s?(?:(?![\u10d0-\u10ff])[\p{Lu}\p{Ll}\p{Lt}])+"
_PUNCTUATION = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_CHINESE = r"[一-龥ࠀ-一가-퟿]+"
_NOT_HAN = r"(?!\p{Han})"
_KIMI = (
    rf"\p{{Han}}+|{_BEFORE}(?:{_NOT_HAN}{_UPPER})*(?:{_NOT_HAN}{_LOWER})+{_CONTRACTIONS}?"
    rf"|{_BEFORE}(?:{_NOT_HAN}{_UPPER})+(?:{_NOT_HAN}{_LOWER})*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"
)
_NO_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001


@dataclass(frozen=True, slots=True)
class Split:
    """The way in which one kind of tokenizer splits a text.

    `whole`: a piece that is a token is not split further, whatever the merges say. `begins`: texts begin with
    the token for that, unless the file says otherwise. `composed`: texts are normalized to NFC before.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    composed: bool = False


DEFAULT = Split((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_SPLITS = {
    Split((_LLAMA3,), whole=True, begins=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    Split((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe glm5",
    Split((_QWEN2,), composed=True): "qwen2 deepseek-r1-qwen megrez kormo f2llmv2",
    Split((_QWEN2,)): "stablelm2 hunyuan solar-open grok-2",
    Split((f"{_CONTRACTIONS}|{_MARKED}",), composed=True): "qwen35",
    Split((_GPT2,)): (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling roberta-bpe modern-bert gigachat a.x-4.0 mellum "
        "exaone4"
    ),
    Split((r"\p{N}", _GPT2)): ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    Split((r"\p{N}{1,3}", r"[一-龥\u3040-\u30FF]+", _DEEPSEEK)): (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4"
    ),
    Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")): "deepseek-coder",
    Split((r"[\r\n]", _CASED, _PUNCTUATION, r"\s+$", _CHINESE, r"\p{N}+")): "deepseek-llm",
    Split((_KIMI,)): "kimi-k2",
    Split((_O200K,)): "gpt-4o llama4 kanana2 minimax-m2 talkie",
    Split((_TEKKEN,), whole=True, begins=True): "tekken",
    Split((_SEED,)): "seed-coder",
    Split((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")): "falcon",
    Split((_NO_PUNCTUATION,)): "bloom poro-chat gpt3-finnish",
    Split((_NO_PUNCTUATION, r"\p{N}")): "viking",
    DEFAULT: "default",
}
SPLITS = {name: split for split, names in _SPLITS.items() for name in names.split()}

# What files without the name mean, by their architecture or by a token of theirs.
_OF_ARCHITECTURE = {
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "gpt2": "gpt-2",
    "olmo2": "dbrx",
    "olmoe": "olmo",
    "granite": "refact",
    "gpt-oss": "gpt-4o",
    "cohere2": "command-r",
    "glm4": "glm4",
    "phi3": "gpt-4o",
    "qwen3next": "qwen2",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "glm4moe": "glm4",
    "llama4": "llama4",
    "falcon-h1": "falcon-h1",
}
_OF_TOKEN = {"<|begin_of_text|>": "llama-bpe", "[TOOL_CALLS]": "tekken"}


def split_of(name: str, where: str) -> Split:
    """Return the split of a name. Raises ConfigError for an unknown one."""
    if name not in SPLITS:
        near = did_you_mean(name, SPLITS)
        hint = f"{near or ''} take the safetensors version of the model, or a GGUF file of a known tokenizer"
        raise ConfigError(f"{where}: the pre-tokenizer {quoted(name)} is not supported", hint.strip())
    return SPLITS[name]


def unnamed_split(architecture: str, tokens: Sequence[str]) -> str:
    """Return the name of the split that a file without one most likely means."""
    marks = {mark: name for mark, name in _OF_TOKEN.items() if mark in tokens}
    return next(iter(marks.values()), _OF_ARCHITECTURE.get(architecture, "default"))
