"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from secrets import token_hex
from typing import Any

from msgspec import UNSET, Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import RequestError
from quire.server.body import read
from quire.server.chat_task import ChatEvent, ChatRun, ChatTask, Finish, start_chat
from quire.server.event_stream import EventStream, encode, id_groups, pieces
from quire.server.generation import beside
from quire.server.generation_fields import warned
from quire.server.logprob_json import ChatLogprobs, LogprobCursor, keep, num_new, prompt_logprobs
from quire.server.openai import protocol
from quire.server.openai.chunks import NOTHING, OPEN, Chunks, added, details, finished, head_of
from quire.server.openai.protocol import ChatChoice, ChatCompletion, ChatMessage, ChatRequest
from quire.server.openapi import describes
from quire.server.service import ServiceState
from quire.text.answer import CallArguments, CallStart, Content, Event, Reasoning

_ROLE = b'"delta":{"role":"assistant","content":""}'
_EMPTY = b'"delta":{}'


@describes("An answer to a conversation", ChatRequest, ChatCompletion, streams=True)
async def chat(request: Request) -> Response:
    """An answer, or the stream of one."""
    serving: ServiceState = request.app.state.serving
    asked, unknown, task = await read(request, ChatRequest, task_of)
    model = serving.check_model(asked.model)
    request_id = f"chatcmpl-{token_hex(12)}"
    with protocol.structure_named(asked):
        run = await start_chat(serving, task, request_id=request_id)
    head = head_of(serving, request_id, model)
    warnings = warned(request, unknown, task.warnings)
    if asked.stream:
        return EventStream(ChatStream(asked, run, head, warnings).events())
    return Response(await whole(asked, run, head, warnings), media_type="application/json")


def task_of(asked: ChatRequest) -> ChatTask:
    """The request in neutral terms. Raises RequestError for fields that do not go together."""
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
    )


@dataclass(slots=True)
class _Turn:
    """What one choice has come to, for a response that is sent as a whole."""

    told: LogprobCursor
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[CallStart, list[str]]] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, event: Event | Finish) -> None:
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
            message.tool_calls = [_call(start, "".join(parts)) for start, parts in self.calls]
            message.content = message.content or None
        shape = self.told.shape
        logprobs = None if shape is None else Raw(shape.join(self.told.kept))
        finish = self.finish or Finish("stop", None)
        ids = self.told.output.token_ids if with_ids else UNSET
        return ChatChoice(index, message, logprobs, finish.reason, finish.stop_reason, ids)


def _call(start: CallStart, arguments: str) -> protocol.ToolCall:
    return protocol.ToolCall(start.id, protocol.Function(start.name, arguments))


async def whole(asked: ChatRequest, run: ChatRun, head: dict[str, Any], warnings: list[str]) -> bytes:
    """The response, when all choices have ended."""
    tolds = _tolds(asked, run)
    turns = [_Turn(told) for told in tolds]
    async for batch in run.batches():
        for index, event in batch:
            turns[index].take(event)
        if asked.logprobs:
            await beside(num_new(tolds), keep, tolds)
    num_entries = sum(len(position) for position in run.output.prompt_logprobs or () if position)
    return await beside(num_entries, _reply, asked, run, head, warnings, turns)


def _reply(
    asked: ChatRequest, run: ChatRun, head: dict[str, Any], warnings: list[str], turns: list[_Turn]
) -> bytes:
    with_ids, output = asked.return_token_ids is True, run.output
    reply = ChatCompletion(
        **head,
        choices=[turn.choice(index, with_ids) for index, turn in enumerate(turns)],
        usage=protocol.usage_of(*run.usage()),
        timings=run.generation.timings(),
        warnings=warnings or UNSET,
        prompt_token_ids=output.prompt_token_ids if with_ids else UNSET,
    )
    if asked.prompt_logprobs is not None and output.prompt_logprobs is not None:
        reply.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, asked.prompt_logprobs)
    return encode(reply)


class ChatStream:
    """The chunks of a stream: the role when a choice has its first token, deltas, how it ended, the usage.

    `warnings` come with the first chunk, `timings` with the last.
    """

    def __init__(self, asked: ChatRequest, run: ChatRun, head: dict[str, Any], warnings: list[str]) -> None:
        self._run = run
        self._options = asked.stream_options or protocol.StreamOptions()
        self._with_ids = asked.return_token_ids is True
        self._tolds = _tolds(asked, run)
        self._chunks = Chunks({**head, "object": "chat.completion.chunk"}, warnings)
        self._begun: set[int] = set()
        self._num_open = len(self._tolds)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks; those that are ready together come in one piece."""
        run, options = self._run, self._options
        always = options.continuous_usage_stats
        async for batch in run.batches():
            usage = added({"usage": protocol.usage_of(*run.usage())}) if always else b""
            yield await beside(num_new(self._tolds), self._joined, batch, usage)
        if options.include_usage:
            usage = added({"usage": protocol.usage_of(*run.usage()), "timings": run.generation.timings()})
            yield self._chunks.none(usage)

    def _joined(self, batch: list[tuple[int, ChatEvent]], usage: bytes) -> bytes:
        return b"".join(chunk for item in batch for chunk in self._written(*item, usage))

    def _written(self, index: int, event: Event | Finish, usage: bytes) -> Iterator[bytes]:
        choice = self._chunks.choice
        if index not in self._begun:
            yield from self._opening(index, usage)
        parts = details(self._tolds[index], self._with_ids)
        if isinstance(event, Finish):
            for part in parts[:-1]:
                yield choice(index, _EMPTY, part, OPEN, usage)
            yield choice(
                index, _EMPTY, parts[-1], finished(event.reason, event.stop_reason), usage + self._end()
            )
        else:
            for body, part in zip_longest(_deltas(event), parts):
                yield choice(index, body or _EMPTY, part or NOTHING, OPEN, usage)

    def _opening(self, index: int, usage: bytes) -> Iterator[bytes]:
        """The role; in the first chunk of all, and in more if they are many, the ids of the prompt."""
        extras = [usage]
        if not self._begun:
            ids = id_groups(self._run.output.prompt_token_ids if self._with_ids else ())
            extras = [usage + added({"prompt_token_ids": group}) for group in ids] or extras
        self._begun.add(index)
        for number, extra in enumerate(extras):
            yield self._chunks.choice(index, _EMPTY if number else _ROLE, NOTHING, OPEN, extra)

    def _end(self) -> bytes:
        """What the chunk that ends a choice says of the request, if nothing comes after it."""
        self._num_open -= 1
        if self._num_open or self._options.include_usage:
            return b""
        return added({"timings": self._run.generation.timings()})


def _tolds(asked: ChatRequest, run: ChatRun) -> list[LogprobCursor]:
    """One for each choice."""
    k, as_ids = asked.top_logprobs or 0, asked.return_tokens_as_token_ids is True
    return [
        LogprobCursor(output, ChatLogprobs(run.tokenizer, k, as_ids) if asked.logprobs else None)
        for output in run.output.outputs
    ]


def _deltas(event: Event) -> list[bytes]:
    """An event as deltas, each small enough for a chunk."""
    match event:
        case Content(text):
            return [b'"delta":{"content":%s}' % encode(piece) for piece in pieces(text)]
        case Reasoning(text):
            return [b'"delta":{"reasoning_content":%s}' % encode(piece) for piece in pieces(text)]
        case CallStart(index, call_id, name):
            call = {
                "index": index,
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            return [b'"delta":{"tool_calls":[%s]}' % encode(call)]
        case CallArguments(index, text):
            form = b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":%s}}]}'
            return [form % (index, encode(piece)) for piece in pieces(text)]


ROUTES = [Route("/v1/chat/completions", chat, methods=["POST"])]
