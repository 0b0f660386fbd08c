"""Chunks of OpenAI's streams, as types."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType

from quire.outputs import CompletionOutput
from quire.server.event_stream import encode, grouped, id_groups
from quire.server.logprob_json import LogprobCursor
from quire.server.openai.protocol import TokenCounts
from quire.server.service import ServiceState
from quire.text.tokenizer import Tokenizer

TOKEN_CHARACTERS = 64  # of a token's text: some are long runs of spaces
Timings = dict[str, float]
# Log-probabilities and ids of the tokens of one chunk.
TokenDetails = tuple[Raw | None, Sequence[int] | UnsetType]
NO_DETAILS: TokenDetails = None, UNSET


class FunctionDelta(Struct):
    """A part of a call: the name first, then its arguments in pieces."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(Struct):
    """A part of the call of this index; the first one has its id."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(Struct):
    """New content of the model's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class StepDrafting(Struct, omit_defaults=True):
    """The tokens that a step gave to a choice, and the drafted ones that it verified, as text.

    The first `num_accepted` drafted tokens were accepted (see Drafting). A token that is part of a character
    is U+FFFD; wrong ones from the store of earlier answers, which may be somebody else's, are empty. The step
    was expected to give `expected_tokens` in `predicted_ms`; without drafts, one in `plain_ms`.
    """

    tokens: list[str]
    drafted: list[str] = []
    num_accepted: int = 0
    source: str = ""
    match: int = 0
    expected_tokens: float = 0.0
    predicted_ms: float = 0.0
    plain_ms: float = 0.0
    why_none: str = ""


class ChatChunkChoice(Struct):
    """New content of one choice."""

    index: int
    delta: Delta
    logprobs: Raw | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    drafting: StepDrafting | UnsetType = UNSET


class CompletionChunkChoice(Struct):
    """New text of one choice."""

    index: int
    text: str
    logprobs: Raw | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    drafting: StepDrafting | UnsetType = UNSET


class _StreamChunk(Struct, kw_only=True):
    """Fields of both chunks. The first of a stream has `warnings`, the last `timings`."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: TokenCounts | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class ChatChunk(_StreamChunk, kw_only=True):
    """An event of a streamed chat completion."""

    choices: list[ChatChunkChoice] = []
    object: str = "chat.completion.chunk"
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class CompletionChunk(_StreamChunk, kw_only=True):
    """An event of a streamed completion."""

    choices: list[CompletionChunkChoice] = []
    object: str = "text_completion"


Chunk = TypeVar("Chunk", ChatChunk, CompletionChunk)


def event_of(
    chunk: Chunk,
    choices: list[Any],
    usage: TokenCounts | UnsetType = UNSET,
    timings: Timings | UnsetType = UNSET,
) -> bytes:
    """Return a chunk with this content as an event. Its warnings are sent once."""
    chunk.choices, chunk.usage, chunk.timings = choices, usage, timings
    event = b"data: %b\n\n" % encode(chunk)
    chunk.warnings = UNSET
    return event


def head_of(service: ServiceState, request_id: str, model: str) -> dict[str, Any]:
    """Return the fields that identify a response, and each chunk of a stream."""
    return {
        "id": request_id,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": service.fingerprint,
    }


def token_details(cursor: LogprobCursor, with_ids: bool, with_end: bool = True) -> list[TokenDetails]:
    """Return log-probabilities and ids of new tokens, in parts that each fit into one chunk; at least one.

    `with_end`: see LogprobCursor.advance.
    """
    if cursor.shape is None and not with_ids:
        return [NO_DETAILS]
    token_ids, positions = cursor.advance(with_end)
    shape = cursor.shape
    logprobs = [Raw(shape.join(group)) for group in grouped(positions)] if shape else []
    parts = zip_longest(logprobs, id_groups(token_ids) if with_ids else ())
    return [(entry, UNSET if ids is None else ids) for entry, ids in parts] or [NO_DETAILS]


def take_drafting(output: CompletionOutput, tokenizer: Tokenizer) -> Iterator[StepDrafting]:
    """Yield what the steps since the last call verified, and forget it."""

    def texts(token_ids: Iterable[int]) -> list[str]:
        return [tokenizer.token_text(one)[:TOKEN_CHARACTERS] for one in token_ids]

    taken, output.drafting = output.drafting, []
    for token_ids, drafting in taken:
        entry = StepDrafting(texts(token_ids), why_none=drafting.why_none or "")
        if (draft := drafting.draft) is not None:
            entry.drafted, entry.num_accepted = texts(draft.token_ids), drafting.num_accepted
            if draft.source == "store":  # those that were wrong are words of somebody else's answer
                entry.drafted[drafting.num_accepted :] = [""] * (len(draft.token_ids) - drafting.num_accepted)
            entry.source, entry.match = draft.source, draft.match
        if drafting.plain_s:
            entry.expected_tokens = round(drafting.expected_tokens, 3)
            entry.predicted_ms = round(drafting.predicted_s * 1e3, 3)
            entry.plain_ms = round(drafting.plain_s * 1e3, 3)
        yield entry
