"""Outputs of LLM.generate. Names follow vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.types import FinishReason, RequestMetrics


@dataclass(slots=True)
class Logprob:
    """Natural logarithm of a token's probability, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `stop_reason` is the stop string or token id that ended it, None if the model did.

    `delta` is the text added since the request was last yielded by a stream.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    delta: str = ""
    error: str | None = None  # the reason, if finish_reason is "error"
    metrics: RequestMetrics | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and its choices. `metrics` are those of the choice that began or finished last."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
