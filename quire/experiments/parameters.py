"""The parameters of experiments, with their ranges, and the form of what they report."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

Line = dict[str, Any]  # one line of what an experiment reports


class CacheParameters(Struct, forbid_unknown_fields=True):
    """Of "cache": the lengths of a prompt and of its answer in tokens."""

    prompt_tokens: Annotated[int, Meta(ge=16, le=768)] = 512
    num_tokens: Annotated[int, Meta(ge=2, le=64)] = 32


class QuantizationParameters(Struct, forbid_unknown_fields=True):
    """Of "quantization": the tokens of the answer, at most, and how often it is measured."""

    num_tokens: Annotated[int, Meta(ge=8, le=256)] = 96
    rounds: Annotated[int, Meta(ge=1, le=8)] = 3


class HeadsParameters(Struct, forbid_unknown_fields=True):
    """Of "heads": sequences computed together, tokens before the measured steps, and the steps.

    `memory_bytes` is the memory for whose batch the cache plan is asked.
    """

    batch: Annotated[int, Meta(ge=1, le=16)] = 8
    context: Annotated[int, Meta(ge=16, le=928)] = 896
    num_tokens: Annotated[int, Meta(ge=4, le=64)] = 32
    memory_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 64 << 20


class FleetParameters(Struct, forbid_unknown_fields=True):
    """Of "fleet": replicas, at most so many with `autoscaling`, and the load on them.

    `load` is that of its peak, in units of what one replica completes with nothing cached. With `death` a
    replica dies at the peak.
    """

    replicas: Annotated[int, Meta(ge=1, le=32)] = 4
    load: Annotated[float, Meta(gt=0, le=64)] = 8.0
    autoscaling: bool = False
    death: bool = False
    num_requests: Annotated[int, Meta(ge=20, le=1200)] = 600


Parameters = CacheParameters | QuantizationParameters | HeadsParameters | FleetParameters
PARAMETERS: dict[str, type[Parameters]] = {
    "cache": CacheParameters,
    "quantization": QuantizationParameters,
    "heads": HeadsParameters,
    "fleet": FleetParameters,
}
