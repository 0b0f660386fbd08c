"""Outputs of LLM.generate. Names follow vLLM's offline API."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.types import Drafting, FinishReason, RequestMetrics


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

    `delta` is the text added since the request was last yielded by a stream. `drafting` has the tokens that
    each step gave and what it verified, if the request asked for them, until a stream takes them.
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
    drafting: list[tuple[tuple[int, ...], Drafting]] = field(default_factory=list)


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
    vector: tuple[float, ...] = ()  # in place of choices, if the model gives vectors


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding: float32 numbers."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A text and its embedding."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """A pair of texts, as the model read it, and its score."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


def drafts_in_words(num_accepted: int, num_drafted: int, decode_s: float, saved_s: float) -> str:
    """Say how many drafted tokens were right and, if the law of steps is known, what that gained."""
    words = f"drafts: {num_accepted:,} of {num_drafted:,} accepted"
    if not saved_s or decode_s <= 0:
        return words
    return f"{words}, {(decode_s + saved_s) / decode_s:.2f} times as fast"
