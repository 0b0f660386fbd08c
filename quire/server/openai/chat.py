"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from secrets import token_hex
from typing import Any

from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import RequestError
from quire.server.chat_task import ChatEvent, ChatRun, ChatTask, Finish, start_chat
from quire.server.event_stream import EventStream, encode, id_groups, pieces
from quire.server.generation_fields import response_warnings
from quire.server.logprob_json import ChatLogprobs, LogprobCursor, keep, num_new, prompt_logprobs
from quire.server.openai import protocol
from quire.server.openai.chunks import (
    NO_DETAILS,
    ChatChunk,
    ChatChunkChoice,
    Delta,
    FunctionDelta,
    ToolCallDelta,
    event_of,
    head_of,
    take_drafting,
    token_details,
)
from quire.server.openai.protocol import ChatChoice, ChatCompletion, ChatMessage, ChatRequest
from quire.server.openapi import describes
from quire.server.request import handle_of, offloaded, read
from quire.text.answer import CallArguments, CallStart, Content, Reasoning


@describes("Answer a conversation", ChatRequest, ChatCompletion, streams=ChatChunk)
async def chat(request: Request) -> Response:
    """Return an answer, or the stream of one."""
    handle = handle_of(request)
    asked, unknown, task = await read(request, ChatRequest, task_of)
    model, handle.adapter = handle.service.check_name(asked.model)
    with protocol.structure_named(asked):
        run = await start_chat(handle, task)
    asked.messages.clear()  # which may hold images, for as long as the answer is streamed
    head = head_of(handle.service, f"chatcmpl-{token_hex(12)}", model)
    if asked.reasoning_effort and not handle.service.template_reads("reasoning_effort"):
        task.warnings.append("reasoning_effort has no effect")
    warnings = response_warnings(request, unknown, task.warnings)
    if asked.stream:
        return EventStream(stream(asked, run, head, warnings))
    return Response(await whole(asked, run, head, warnings), media_type="application/json")


def task_of(asked: ChatRequest) -> ChatTask:
    """Return the request in neutral terms. Raises RequestError for fields that contradict each other."""
    protocol.check(asked)
    if asked.echo or asked.add_special_tokens:
        name = "echo" if asked.echo else "add_special_tokens"
        raise RequestError(f"{name} is not supported for conversations", "use /v1/completions", name)
    if asked.top_logprobs and not asked.logprobs:
        raise RequestError("top_logprobs needs logprobs", "set logprobs to true", "top_logprobs")
    sampling = protocol.sampling_of(asked)
    if asked.max_completion_tokens is not None:
        sampling["max_tokens"] = asked.max_completion_tokens
    if asked.logprobs:
        sampling["logprobs"] = asked.top_logprobs or 0
    going_on = asked.continue_final_message is True
    prompted = not going_on if asked.add_generation_prompt is None else asked.add_generation_prompt
    kwargs = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", asked.reasoning_effort)
    return ChatTask(
        messages=asked.messages,
        sampling=sampling,
        tools=asked.tools,
        tool_choice=asked.tool_choice,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        chat_template_kwargs=kwargs,
        add_generation_prompt=prompted,
        continue_final_message=going_on,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        truncation_side=asked.truncation_side,
        include_reasoning=asked.include_reasoning is not False,
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt or "",
        report_drafting=protocol.reports_drafting(asked),
        prediction=asked.prediction.text if asked.prediction is not None else "",
    )


@dataclass(slots=True)
class _Turn:
    """The content of one choice so far, for a response that is sent as a whole."""

    cursor: LogprobCursor
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[CallStart, list[str]]] = field(default_factory=list)
    finish: Finish = field(default_factory=lambda: Finish("stop", None))

    def take(self, event: ChatEvent) -> None:
        match event:
            case Content(text):
                self.content.append(text)
            case Reasoning(text):
                self.reasoning.append(text)
            case CallStart():
                self.calls.append((event, []))
            case CallArguments(index, text):
                self.calls[index][1].append(text)
            case Finish():
                self.finish = event

    def choice(self, index: int, with_ids: bool) -> ChatChoice:
        message = ChatMessage("".join(self.content))
        if self.reasoning:
            message.reasoning_content = "".join(self.reasoning)
        if self.calls:
            message.tool_calls = [
                protocol.ToolCall(start.id, protocol.CalledFunction(start.name, "".join(parts)))
                for start, parts in self.calls
            ]
            message.content = message.content or None
        shape = self.cursor.shape
        logprobs = None if shape is None else Raw(shape.join(self.cursor.kept))
        ids = self.cursor.output.token_ids if with_ids else UNSET
        return ChatChoice(index, message, logprobs, self.finish.reason, self.finish.stop_reason, ids)


async def whole(asked: ChatRequest, run: ChatRun, head: dict[str, Any], warnings: list[str]) -> bytes:
    """Return the response when all choices have ended."""
    cursors = _cursors(asked, run)
    turns = [_Turn(cursor) for cursor in cursors]
    async for batch in run.batches():
        for index, event in batch:
            turns[index].take(event)
        if asked.logprobs:
            await offloaded(num_new(cursors), keep, cursors)
    num_entries = sum(len(position) for position in run.output.prompt_logprobs or () if position)
    return await offloaded(num_entries, _response, asked, run, head, warnings, turns)


def _response(
    asked: ChatRequest, run: ChatRun, head: dict[str, Any], warnings: list[str], turns: list[_Turn]
) -> bytes:
    with_ids, output = asked.return_token_ids is True, run.output
    response = ChatCompletion(
        **head | {"system_fingerprint": run.handle.fingerprint},
        choices=[turn.choice(index, with_ids) for index, turn in enumerate(turns)],
        usage=protocol.usage_of(*run.usage()),
        timings=run.timings(),
        warnings=warnings or UNSET,
        prompt_token_ids=output.prompt_token_ids if with_ids else UNSET,
    )
    if asked.prompt_logprobs is not None and output.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, asked.prompt_logprobs)
    return encode(response)


async def stream(
    asked: ChatRequest, run: ChatRun, head: dict[str, Any], warnings: list[str]
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks: each choice's role with its first token, deltas, its finish; then the usage.

    Chunks that are ready together are yielded together.
    """
    options = asked.stream_options or protocol.StreamOptions()
    with_ids = asked.return_token_ids is True
    cursors = _cursors(asked, run)
    chunk = ChatChunk(**head, warnings=warnings or UNSET)
    begun: set[int] = set()
    num_open = len(cursors)

    def usage() -> protocol.TokenCounts:
        return protocol.usage_of(*run.usage())

    def opening(index: int, counts: protocol.TokenCounts | UnsetType) -> Iterator[bytes]:
        """Yield the role; and with the first chunk of all, and more if they are many, the prompt's ids."""
        prompt = run.output.prompt_token_ids if with_ids and not begun else ()
        begun.add(index)
        groups: list[Sequence[int] | UnsetType] = [*id_groups(prompt)]
        for number, ids in enumerate(groups or [UNSET]):
            delta = Delta() if number else Delta(role="assistant", content="")
            chunk.prompt_token_ids = ids
            yield event_of(chunk, [ChatChunkChoice(index, delta)], counts)
        chunk.prompt_token_ids = UNSET

    def serialized(batch: list[tuple[int, ChatEvent]]) -> bytes:
        nonlocal num_open
        chunk.system_fingerprint = run.handle.fingerprint
        events: list[bytes] = []
        counts = usage() if options.continuous_usage_stats else UNSET
        for index, event in batch:
            if index not in begun:
                events += opening(index, counts)
            for drafting in take_drafting(run.output.outputs[index], run.tokenizer):
                events.append(event_of(chunk, [ChatChunkChoice(index, Delta(), drafting=drafting)], counts))
            details_of = token_details(cursors[index], with_ids, with_end=isinstance(event, Finish))
            parts = [*zip_longest(deltas_of(event), details_of)]
            for number, (delta, details) in enumerate(parts, 1):
                logprobs, ids = details or NO_DETAILS
                choice = ChatChunkChoice(index, delta or Delta(), logprobs, token_ids=ids)
                timings: dict[str, float] | UnsetType = UNSET
                if isinstance(event, Finish) and number == len(parts):
                    choice.finish_reason, choice.stop_reason = event
                    num_open -= 1
                    if not num_open and not options.include_usage:
                        timings = run.timings()
                events.append(event_of(chunk, [choice], counts, timings))
        return b"".join(events)

    async for batch in run.batches():
        yield await offloaded(num_new(cursors) if asked.logprobs else 0, serialized, batch)
    if options.include_usage:
        yield event_of(chunk, [], usage(), run.timings())


def _cursors(asked: ChatRequest, run: ChatRun) -> list[LogprobCursor]:
    """Return a cursor for each choice."""
    k, as_ids = asked.top_logprobs or 0, asked.return_tokens_as_token_ids is True
    return [
        LogprobCursor(output, ChatLogprobs(run.tokenizer, k, as_ids) if asked.logprobs else None)
        for output in run.output.outputs
    ]


def deltas_of(event: ChatEvent) -> list[Delta]:
    """Return an event as deltas, each small enough for a chunk; none for a Finish."""
    match event:
        case Content(text):
            return [Delta(content=piece) for piece in pieces(text)]
        case Reasoning(text):
            return [Delta(reasoning_content=piece) for piece in pieces(text)]
        case CallStart(index, call_id, name):
            return [Delta(tool_calls=[ToolCallDelta(index, call_id, "function", FunctionDelta(name))])]
        case CallArguments(index, text):
            return [
                Delta(tool_calls=[ToolCallDelta(index, function=FunctionDelta(arguments=piece))])
                for piece in pieces(text)
            ]
        case Finish():
            return []


ROUTES = [Route("/v1/chat/completions", chat, methods=["POST"])]
