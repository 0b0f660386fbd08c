"""Options that clients of llama.cpp and of Ollama send by the same names, where others have other names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from quire.errors import RequestError
from quire.server.generation_fields import SamplingFields, given_of, refuse
from quire.server.unsupported_fields import REFUSED

ANY_SEED = (1 << 32) - 1  # how llama.cpp stores -1
DONE = frozenset({"repeat_penalty", "repeat_last_n"})  # of those that the other interfaces refuse
_PENALTIES_OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class LlamaSampling(SamplingFields, kw_only=True):
    """The fields of SamplingParams, and what both call otherwise."""

    repeat_penalty: float | None = None
    repeat_last_n: int | None = None


def sampling_of(asked: LlamaSampling, done: Collection[str] = DONE) -> dict[str, Any]:
    """Fields for SamplingParams.from_dict. Raises RequestError for what is not done here."""
    refuse(asked, {name: instead for name, instead in REFUSED.items() if name not in done})
    given = given_of(asked)
    if asked.repeat_penalty is not None:
        given["repetition_penalty"] = asked.repeat_penalty
    if asked.repeat_last_n == 0:
        given |= _PENALTIES_OFF
    if asked.seed == ANY_SEED:
        del given["seed"]
    if asked.stop is not None:
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        given["stop"] = [text for text in stop if text]
    return given


def without_effect(asked: LlamaSampling) -> list[str]:
    """Warnings of options that are taken and do nothing."""
    penalties = (asked.repeat_penalty or 1) != 1 or asked.presence_penalty or asked.frequency_penalty
    if penalties and asked.repeat_last_n not in (None, 0, -1):
        return ["repeat_last_n has no effect: penalties look at the whole text"]
    return []


def max_tokens_of(limit: int | None, name: str) -> int | None:
    """The most tokens that are generated; None for as many as the context has room for."""
    if limit == 0:
        raise RequestError(f"{name} = 0 asks for nothing", "-1 is as much as there is room for", name)
    return None if limit is None or limit < 0 else limit
