"""Tokens that end an answer."""

from __future__ import annotations

from typing import Any

from quire.errors import ConfigError, quoted
from quire.text.tokenizer import Tokenizer

MAX_END_TOKENS = 1024


def end_tokens(
    of_generation: Any, of_config: Any, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """Return the end tokens: of generation_config.json, else of config.json, and the tokenizer's own.

    Raises ConfigError for what names no token of the model or the tokenizer.
    """
    where, stated = "generation_config.json", of_generation
    if stated is None:
        where, stated = "config.json", of_config
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    known = vocab_size
    if tokenizer:  # it may have more tokens than the model can produce
        known = max(known, tokenizer.vocab_size)
    if len(ids) > MAX_END_TOKENS:
        raise ConfigError(f"{where}: eos_token_id names {len(ids):,} tokens, more than {MAX_END_TOKENS}")
    for number in ids:
        if type(number) is not int or not 0 <= number < known:
            problem = f"eos_token_id = {quoted(number)} is not the id of a token (0 to {known - 1:,})"
            raise ConfigError(f"{where}: {problem}", "correct the file: an answer would not end")
    if tokenizer and tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return tuple(dict.fromkeys(ids))
