"""The load that a test puts on a server: its options, and the requests made from them."""

from __future__ import annotations

import csv
import math
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.openai_api import COMPLETIONS
from quire.bench.workload import (
    Lengths,
    PromptVocabulary,
    Request,
    file_requests,
    first,
    poisson,
    random_requests,
    read_trace,
    trace_requests,
)
from quire.errors import ConfigError

DEFAULT_PROMPTS = 100
INJECTED_TOKENS = 8  # of the answer to an injected prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The requests of a load test and when they are sent. Names are those of `vllm bench serve`.

    Without a rate, a trace or a concurrency, everything is sent at once.
    """

    endpoint: str = COMPLETIONS
    no_stream: bool = False
    timeout: float = 600.0  # of one request, in seconds
    temperature: float = 0.0
    ignore_eos: bool | None = None  # None: where the server is known to support it
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    random_input_len: int = 512
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    num_prefixes: int = 1
    dataset_path: Path | None = None
    arrivals: Path | None = None
    speed: float = 1.0
    max_model_len: int | None = None
    seed: int = 0
    num_prompts: int | None = None
    duration: float | None = None  # seconds
    request_rate: float = math.inf  # a second
    max_concurrency: int | None = None
    inject_long_prompt: int | None = None  # tokens
    at: float = 5.0  # seconds

    def __post_init__(self) -> None:
        if self.arrivals and (self.dataset_path or not math.isinf(self.request_rate)):
            raise ConfigError(
                "--arrivals has its own arrivals and lengths",
                "leave out --dataset-path and --request-rate; --speed changes the rate",
            )
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and not value > low:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value} is out of range", f"give more than {low}"
                )
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError("--random-range-ratio is out of range", "give a share from 0 to below 1")

    @property
    def is_open(self) -> bool:
        """Return True for an open loop: requests are sent at their moments, however long answers take."""
        return self.arrivals is not None or not math.isinf(self.request_rate)


_LOWEST = {  # exclusive
    **dict.fromkeys(("timeout", "speed", "request_rate", "duration"), 0.0),
    **dict.fromkeys(("random_input_len", "random_output_len", "num_prefixes", "num_prompts"), 0),
    **dict.fromkeys(("max_concurrency", "inject_long_prompt", "max_model_len"), 0),
    **dict.fromkeys(("random_prefix_len", "at"), -1),
}


_UNREADABLE = (OSError, EOFError, zlib.error, csv.Error, ValueError, LookupError, TypeError, AttributeError)


def load_requests(
    load: LoadOptions, words: PromptVocabulary, salt: str, max_model_len: int | None
) -> Iterable[Request]:
    """Return the requests of a run; an iterator only where a duration alone bounds a closed loop.

    Lengths and arrivals repeat with the seed; prompts with `salt` as well. Raises ConfigError for files that
    cannot be used.
    """
    try:
        found = _requests(load, words, salt, load.max_model_len or max_model_len)
        if isinstance(found, list) and not found:
            raise ValueError("it has no requests")
        return found
    except _UNREADABLE as error:
        if isinstance(error, ConfigError):
            raise
        path = load.arrivals or load.dataset_path
        raise ConfigError(f"{path}: not a file of requests: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__} {error}"


def _requests(
    load: LoadOptions, words: PromptVocabulary, salt: str, longest: int | None
) -> Iterable[Request]:
    found: Iterable[Request]
    if load.arrivals:
        trace = read_trace(load.arrivals)
        found = trace_requests(trace, words, salt, speed=load.speed, longest=longest)
        return first(found, load.num_prompts or len(trace), load.duration)
    if load.dataset_path:
        found = file_requests(load.dataset_path, load.random_output_len)
    else:
        _check_lengths(load, longest)
        found = random_requests(_lengths(load), words, load.seed, salt)
    if load.is_open:
        if load.num_prompts or not load.duration:
            found = first(found, load.num_prompts or _count(load))
        found = poisson(found, load.request_rate, load.seed)
    elif load.duration and not load.num_prompts and not load.dataset_path:
        return found
    return first(found, load.num_prompts or _count(load), load.duration)


def _count(load: LoadOptions) -> int:
    return sys.maxsize if load.duration or load.dataset_path else DEFAULT_PROMPTS


def _check_lengths(load: LoadOptions, longest: int | None) -> None:
    """Raise ConfigError if the longest random request is longer than the server can take."""
    most = (1 + load.random_range_ratio) * (load.random_input_len + load.random_output_len)
    if longest and load.random_prefix_len + int(most) > longest:
        raise ConfigError(
            f"prompts and answers of up to {load.random_prefix_len + int(most):,} tokens exceed the server's "
            f"context of {longest:,}",
            "lower --random-input-len or --random-output-len",
        )


def _lengths(load: LoadOptions) -> Lengths:
    return Lengths(
        load.random_input_len,
        load.random_output_len,
        load.random_range_ratio,
        load.random_prefix_len,
        load.num_prefixes,
    )


def injected_requests(load: LoadOptions, words: PromptVocabulary, salt: str) -> list[Request]:
    """Return the long prompt to be sent beside the load, if there is one."""
    if load.inject_long_prompt is None:
        return []
    content = words.draw([(load.inject_long_prompt, f"injected {salt}")])
    return [Request(content, INJECTED_TOKENS, load.at)]
