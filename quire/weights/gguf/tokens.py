"""The tokens of a GGUF file's metadata."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.weights.gguf.metadata import Metadata
from quire.weights.vocabularies.tokens import CONTROL, NORMAL, TokenTable

_NO_TOKEN = (1 << 32) - 1
# Names of tokens in tokenizer_config.json, and in keys of the metadata, the third as the format spells it
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "sep_token": "seperator",
    "unk_token": "unknown",
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
_ENDS = {"eos_token": "eos", "eot_token": "eot", "eom_token": "eom"}
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
class FileTokens(TokenTable):
    """The tokens of a file, and the metadata that they come from."""

    metadata: Metadata


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
    for name, spelling in (_NAMED | _ENDS).items():
        key = f"tokenizer.ggml.{spelling}_token_id"
        number = metadata.size(key, _NO_TOKEN, least=-1, most=_NO_TOKEN)
        if 0 <= number < len(texts):
            ids[name] = number
        elif number not in (-1, _NO_TOKEN):
            problem = f"{key} = {number:,}, but there are {len(texts):,} tokens"
            raise ConfigError(f"{metadata.where}: {problem}")
    return FileTokens(metadata.where, vocabulary, texts, [int(kind) for kind in types], ids, metadata)
