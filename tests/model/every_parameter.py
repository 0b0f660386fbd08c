"""Sampling parameters that are all in force at once, for a vocabulary of at least 7 tokens."""

from __future__ import annotations

from typing import Any

EVERYTHING: dict[str, Any] = {
    "max_tokens": None,
    "temperature": 1.3,
    "top_p": 0.95,
    "top_k": 9,
    "min_p": 0.01,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.9,
    "repetition_penalty": 1.2,
    "logit_bias": {2: 1.5},
    "min_tokens": 20,
    "stop_token_ids": [5],
    "bad_words_token_ids": [[1, 2], [4, 6, 2], [0]],
    "logprobs": 3,
}
