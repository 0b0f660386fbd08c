"""Sampling options that llama.cpp and Ollama share, and OpenAI and vLLM name otherwise."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from quire.errors import RequestError
from quire.server.generation_fields import SamplingFields, given_of, refuse
from quire.server.unsupported_fields import REFUSED

RANDOM_SEED = (1 << 32) - 1  # llama.cpp stores -1 as this
SUPPORTED = frozenset({"repeat_penalty", "repeat_last_n"})  # refused by the other interfaces
PENALTIES_OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class LlamaSampling(SamplingFields, kw_only=True):
    """The fields of SamplingParams, and those with a name of their own in both."""

    repeat_penalty: float | None = None
    repeat_last_n: int | None = None


def sampling_of(asked: LlamaSampling, supported: Collection[str] = SUPPORTED) -> dict[str, Any]:
    """Return fields for SamplingParams.from_dict. Raises RequestError for an unsupported field."""
    refuse(asked, {name: instead for name, instead in REFUSED.items() if name not in supported})
    given = given_of(asked)
    if asked.repeat_penalty is not None:
        given["repetition_penalty"] = asked.repeat_penalty
    if asked.repeat_last_n == 0:
        given |= PENALTIES_OFF
    if asked.seed == RANDOM_SEED:
        del given["seed"]
    if asked.stop is not None:
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        given["stop"] = [text for text in stop if text]
    return given


def without_effect(asked: LlamaSampling) -> list[str]:
    """Return warnings about options that are accepted without effect."""
    penalties = (asked.repeat_penalty or 1) != 1 or asked.presence_penalty or asked.frequency_penalty
    if penalties and asked.repeat_last_n not in (None, 0, -1):
        return ["repeat_last_n has no effect: penalties apply to the whole text"]
    return []


def max_tokens_of(limit: int | None, name: str) -> int | None:
    """Return the maximum number of tokens to generate; None for the rest of the context."""
    if limit == 0:
        raise RequestError(f"{name} = 0 generates nothing", "-1 uses the rest of the context", name)
    return None if limit is None or limit < 0 else limit
