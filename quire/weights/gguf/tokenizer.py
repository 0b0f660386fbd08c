"""The tokenizer of a GGUF file's metadata, as what a tokenizer.json that means the same holds.

Five kinds are supported: byte-level BPE ("gpt2"), whose merges the file states; SentencePiece's BPE
("llama"), whose merges follow from the scores of the pieces; the same with stated merges ("gemma4");
WordPiece ("bert") and SentencePiece's Unigram ("t5") of encoders.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from quire.errors import ConfigError, quoted
from quire.weights.gguf.pieces import charsmap, in_words
from quire.weights.gguf.tokens import FileTokens
from quire.weights.source import TokenizerData
from quire.weights.vocabularies.byte_level import byte_level
from quire.weights.vocabularies.pieces import bpe, merges_of_scores, unigram, word_pieces
from quire.weights.vocabularies.splits import split_of, unnamed_split
from quire.weights.vocabularies.tokens import TokenTable, surrounded

_LOG = logging.getLogger(__name__)


def tokenizer_of(tokens: FileTokens) -> TokenizerData:
    """Return the tokenizer. Raises ConfigError for an unsupported kind."""
    metadata = tokens.metadata
    kind = metadata.text("tokenizer.ggml.model")
    scores = metadata.numbers("tokenizer.ggml.scores")
    spaced = metadata.flag("tokenizer.ggml.add_space_prefix") is not False
    encodes = {"cls_token", "sep_token"} <= tokens.ids.keys()  # as encoders do, whose texts begin and end
    if kind == "bert":
        words = in_words(tokens)
        return _named(words, word_pieces(words), {})
    if kind == "gpt2":
        split = split_of(_name_of_split(tokens), metadata.where)
        data = byte_level(tokens, metadata.texts("tokenizer.ggml.merges"), split)
        begins, ends = split.begins or encodes, encodes
    elif kind == "llama":
        data, begins, ends = bpe(tokens, merges_of_scores(tokens, scores), spaced), True, False
    elif kind == "gemma4":
        data, begins, ends = bpe(tokens, metadata.texts("tokenizer.ggml.merges"), spaced), True, False
    elif kind == "t5":
        whole_words = metadata.flag("tokenizer.ggml.remove_extra_whitespaces") is not False
        data = unigram(tokens, scores, charsmap(metadata), spaced, whole_words)
        begins, ends = "bos_token" in tokens.ids, True
    else:
        raise ConfigError(
            f"{metadata.where}: a tokenizer of the kind {quoted(kind)} is not supported",
            "take the safetensors version of the model, with its tokenizer.json",
        )
    begins, ends, divides = (
        default if stated is None else stated
        for default, stated in (
            (begins, metadata.flag("tokenizer.ggml.add_bos_token")),
            (ends, metadata.flag("tokenizer.ggml.add_eos_token")),
            (True, metadata.flag("tokenizer.ggml.add_sep_token")),
        )
    )
    if ends and "eos_token" in tokens.ids:
        first = "bos_token" if begins and "bos_token" in tokens.ids else None
        between = "sep_token" if divides and "sep_token" in tokens.ids else None
        data["post_processor"] = surrounded(tokens, first, "eos_token", between)
    return _named(tokens, data, {"add_bos_token": begins})


def _named(tokens: TokenTable, data: dict[str, Any], settings: dict[str, Any]) -> TokenizerData:
    return replace(tokens.data(data, settings), where=f"the tokenizer of {tokens.where}")


def _name_of_split(tokens: FileTokens) -> str:
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
    return name
