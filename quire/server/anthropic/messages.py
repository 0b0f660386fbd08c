"""/v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from secrets import token_hex
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.answer_blocks import CALL, REASONING, TEXT, Block, Blocks, Grown, Opened, Step, told_as
from quire.server.anthropic import protocol
from quire.server.anthropic.edits import Applied, edit, edits_of
from quire.server.anthropic.protocol import (
    CountRequest,
    Edits,
    Message,
    MessagesRequest,
    MessageUsage,
    OutputBlock,
)
from quire.server.anthropic.turns import Conversation, Turn
from quire.server.body import read
from quire.server.chat_task import ChatRun, ChatTask, encoded, start_chat
from quire.server.errors import anthropic_body
from quire.server.event_stream import EventStream, encode, named, pieces
from quire.server.generation_fields import warned
from quire.server.openapi import describes
from quire.server.service import ServiceState

_PING = named("ping")
_DELTAS = {
    TEXT: ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    CALL: ("input_json_delta", "partial_json"),
}
_NAMES = {
    r"^messages\[\d+\][\w.]*": "messages",
    r"^continue_final_message.*": "the last message is the assistant's: only from its text can one go on",
    r"\.function\.parameters": ".input_schema",
    r"\.function\.": ".",
    r"^stop\b": "stop_sequences",
}


def _told_as(asked: CountRequest) -> AbstractContextManager[None]:
    structure = "tools" if asked.output_config is None else "output_config.format"
    return told_as({**_NAMES, "^structured_outputs": structure})


@describes("An answer to a conversation, for clients of Anthropic's", MessagesRequest, Message, streams=True)
async def create(request: Request) -> Response:
    """An answer, or the stream of one."""
    serving: ServiceState = request.app.state.serving
    asked, unknown, task = await read(request, MessagesRequest, protocol.task_of)
    model = serving.check_model(asked.model)
    message_id = f"msg_{token_hex(12)}"
    with _told_as(asked):
        applied = await _edited(serving, asked, task)
        run = await start_chat(serving, task, request_id=message_id)
    message = Message(id=message_id, model=model, usage=_usage(run))
    sources = serving.frontend.chat_template.templates.values()
    idle = protocol.without_effect(asked, any("reasoning_effort" in source for source in sources))
    if warnings := warned(request, unknown, task.warnings + idle):
        message.warnings = warnings
    edits = UNSET if asked.context_management is None else protocol.Edits(applied)
    if asked.stream:
        events = MessageStream(message, run, asked.max_tokens, edits).events()
        return EventStream(events, _failed, b"", _PING)
    blocks = Blocks()
    async for _, event in run:
        blocks.take(event)
    message.content = [_block(block, block.text) for block in blocks.all]
    message.context_management = edits
    finish(message, run, blocks, asked.max_tokens)
    return Response(encode(message), media_type="application/json")


@describes("How many tokens a conversation has", CountRequest, protocol.TokenCount)
async def count_tokens(request: Request) -> Response:
    """As many as /v1/messages would read."""
    serving: ServiceState = request.app.state.serving
    asked, _, task = await read(request, CountRequest, protocol.task_of)
    serving.check_model(asked.model)
    with _told_as(asked):
        before = await serving.in_thread(encoded, serving.frontend, task)
        edited = await _edited(serving, asked, task)
        prompt = await serving.in_thread(encoded, serving.frontend, task) if edited else before
    count = protocol.TokenCount(len(prompt.token_ids))
    if asked.context_management is not None:
        count.context_management = protocol.TokensBefore(len(before.token_ids))
    return Response(encode(count), media_type="application/json")


async def _edited(serving: ServiceState, asked: CountRequest, task: ChatTask) -> list[Applied]:
    """Make the edits of context_management in the messages of the task. Returns those that changed them."""
    edits, _ = edits_of(asked.context_management)
    if not edits:
        return []

    def messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
        return Conversation(asked.system, turns).messages

    def num_tokens(turns: Sequence[Turn]) -> int:
        return len(encoded(serving.frontend, replace(task, messages=messages(turns))).token_ids)

    def run() -> list[Applied]:
        turns, applied = edit(asked.messages, edits, num_tokens)
        if applied:
            task.messages = messages(turns)
        return applied

    return await serving.in_thread(run)


def finish(message: Message, run: ChatRun, blocks: Blocks, max_tokens: int) -> None:
    """Write down how it ended and what it took."""
    reason, met = blocks.finish
    message.usage = _usage(run)
    message.timings = run.generation.timings()
    if reason == "tool_calls":
        message.stop_reason = "tool_use"
    elif reason == "length":
        full = message.usage.output_tokens < max_tokens
        message.stop_reason = "model_context_window_exceeded" if full else "max_tokens"
    elif isinstance(met, str):
        message.stop_reason, message.stop_sequence = "stop_sequence", met
    else:
        message.stop_reason = "end_turn"


class MessageStream:
    """The events of a message: it starts, block by block with their deltas, it stops.

    It starts when there is a first token: how much of the input was cached is known then.
    """

    def __init__(
        self, message: Message, run: ChatRun, max_tokens: int, edits: Edits | UnsetType = UNSET
    ) -> None:
        self._message = message
        self._run = run
        self._max_tokens = max_tokens
        self._edits = edits
        self._blocks = Blocks()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events; those that are ready together come in one piece."""
        message, run = self._message, self._run
        async for batch in run.batches():
            parts = []
            if not self._blocks.all:
                message.usage = _usage(run)
                parts.append(named("message_start", message=message))
            for _, event in batch:
                parts += [part for step in self._blocks.take(event) for part in _told(step)]
            yield b"".join(parts)
        finish(message, run, self._blocks, self._max_tokens)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        last: dict[str, Any] = {"delta": delta, "usage": message.usage, "timings": message.timings}
        if self._edits is not UNSET:
            last["context_management"] = self._edits
        yield named("message_delta", **last) + named("message_stop")


def _told(step: Step) -> Iterator[bytes]:
    """The events of one step."""
    block = step.block
    match step:
        case Opened():
            yield named("content_block_start", index=block.index, content_block=_block(block, ""))
        case Grown(_, text):
            kind, name = _DELTAS[block.kind]
            for piece in pieces(text):
                yield named("content_block_delta", index=block.index, delta={"type": kind, name: piece})
        case _:
            yield named("content_block_stop", index=block.index)


def _block(block: Block, text: str) -> OutputBlock:
    """A block that holds this text."""
    if block.kind == CALL:
        return protocol.ToolUseBlock(block.call_id, block.name, _input(text))
    return protocol.ThinkingBlock(text) if block.kind == REASONING else protocol.TextBlock(text)


def _input(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}  # not at its end: half a call is not to be made


def _usage(run: ChatRun) -> MessageUsage:
    usage = run.usage()
    computed = usage.prompt_tokens - usage.cached_tokens
    details = protocol.ThinkingDetails(usage.reasoning_tokens)
    return MessageUsage(computed, usage.cached_tokens, usage.completion_tokens, details)


def _failed(error: Exception) -> bytes:
    body = anthropic_body(error)
    return named(body["type"], error=body["error"])


ROUTES = [
    Route("/v1/messages", create, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
