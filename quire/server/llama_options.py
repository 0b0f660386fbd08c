"""How tokens are chosen, by the names that clients of llama.cpp and of Ollama use for it.

Each option is done, refused where its value asks for a sampler that is not here, or says only how such a
sampler would work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct, defstruct

from quire.errors import RequestError

RANDOM_SEEDS = (-1, (1 << 32) - 1)  # which ask for any; the second is how the first is stored
# option of a sampler that is not here -> the greatest value at which it does nothing, or the least
OFF_UP_TO = {
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "top_n_sigma"), 0),
    "min_keep": 1,
    "adaptive_target": -1,
}
OFF_FROM = {"typical_p": 1, "tfs_z": 1}
# what says how they work
IDLE = (
    *("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "adaptive_decay"),
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
)
# option -> field of SamplingParams
FIELDS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
_PENALTIES_OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
if TYPE_CHECKING:
    _Samplers = Struct
else:
    _Off = [(name, float | None, None) for name in (*OFF_UP_TO, *OFF_FROM)]
    _Samplers = defstruct("_Samplers", [*_Off, *((name, Any, None) for name in IDLE)], kw_only=True)


class LlamaOptions(_Samplers, kw_only=True):
    """The options that both have. None means "not given"."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


def sampling_of(options: LlamaOptions) -> dict[str, Any]:
    """Fields for SamplingParams.from_dict. Raises RequestError for a sampler that is not here."""
    for name, value in _asked(options):
        hint = f"leave it out, or at {value:g}, where it does nothing"
        raise RequestError(f"{name} is not supported", hint, name, "unsupported_parameter")
    given = {own: value for name, own in FIELDS.items() if (value := getattr(options, name)) is not None}
    if options.repeat_last_n == 0:
        given |= _PENALTIES_OFF
    if options.seed is not None and options.seed not in RANDOM_SEEDS:
        given["seed"] = options.seed
    if options.stop:
        stop = [options.stop] if isinstance(options.stop, str) else options.stop
        given["stop"] = [text for text in stop if text]
    return given


def without_effect(options: LlamaOptions) -> list[str]:
    """Warnings of options that are taken and do nothing."""
    penalties = (options.repeat_penalty or 1) != 1 or options.presence_penalty or options.frequency_penalty
    if penalties and options.repeat_last_n not in (None, 0, -1):
        return ["repeat_last_n has no effect: penalties look at the whole text"]
    return []


def max_tokens_of(limit: int | None, name: str) -> int | None:
    """The most tokens that are generated; None for as many as the context has room for."""
    if limit == 0:
        raise RequestError(f"{name} = 0 asks for nothing", "-1 is as much as there is room for", name)
    return None if limit is None or limit < 0 else limit


def _asked(options: LlamaOptions) -> list[tuple[str, int]]:
    """Samplers that are not here and that the options turn on, with a value that would not."""
    bounds = OFF_UP_TO | OFF_FROM
    given = {name: value for name in bounds if (value := getattr(options, name)) is not None}
    return [
        (name, bounds[name])
        for name, value in given.items()
        if (value > bounds[name] if name in OFF_UP_TO else value < bounds[name])
    ]
