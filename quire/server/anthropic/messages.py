"""/v1/messages and /v1/messages/count_tokens, for Anthropic's clients."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from secrets import token_hex

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.answer_blocks import CALL, REASONING, TEXT, AnswerBlocks, Block, BlockChange, encode_event
from quire.server.anthropic import protocol
from quire.server.anthropic.edits import AppliedEdit, apply_edits, edits_of
from quire.server.anthropic.protocol import CountRequest, MessageReply, MessagesRequest, MessageUsage
from quire.server.anthropic.turns import Turn, messages_of
from quire.server.chat_task import ChatRun, ChatTask, encoded, start_chat
from quire.server.errors import AnthropicErrorBody
from quire.server.event_stream import EventStream, encode, pieces
from quire.server.field_names import renaming_fields
from quire.server.generation_fields import response_warnings
from quire.server.openapi import describes
from quire.server.request import handle_of, read
from quire.server.service import ServiceState

PING = encode_event(protocol.Ping())
_DELTAS: dict[str, Callable[[str], protocol.BlockDelta]] = {
    TEXT: protocol.TextDelta,
    REASONING: protocol.ThinkingDelta,
    CALL: protocol.InputJsonDelta,
}
_NAMES = {
    r"^messages\[\d+\](?!\.content\[)[\w.]*": "messages",
    r"^continue_final_message.*": "the last message is the assistant's, and only its text can be continued",
    r"\.function\.parameters": ".input_schema",
    r"\.function\.": ".",
    r"^stop\b": "stop_sequences",
}


def _own_field_names(asked: CountRequest) -> AbstractContextManager[None]:
    return renaming_fields({**_NAMES, "^structured_outputs": protocol.structure_field(asked) or "tools"})


@describes("Answer a conversation", MessagesRequest, MessageReply, streams=protocol.MessageEvent)
async def create(request: Request) -> Response:
    """Return a message, or the stream of its events."""
    service: ServiceState = request.app.state.service
    task_of = partial(protocol.task_of, sees=service.frontend.sees)
    asked, unknown, task = await read(request, MessagesRequest, task_of)
    handle = handle_of(request)
    model, handle.adapter = service.check_name(asked.model)
    edits: protocol.Edits | UnsetType = UNSET
    with _own_field_names(asked):
        if asked.context_management is not None:
            applied = await service.in_thread_for(task.messages, _edit, service, asked, task)
            edits = protocol.Edits(applied)
        run = await start_chat(handle, task)
    message = MessageReply(id=f"msg_{token_hex(12)}", model=model, usage=_usage(run))
    idle = protocol.without_effect(asked, service.template_reads("reasoning_effort"))
    message.warnings = response_warnings(request, unknown, task.warnings + idle) or UNSET
    writer = MessageWriter(message, run, asked.max_tokens, edits)
    if asked.stream:
        return EventStream(writer.events(), failed, b"", PING)
    del asked, task  # which may hold images, for as long as the answer takes
    return Response(await writer.whole(), media_type="application/json")


@describes("Count the tokens of a conversation", CountRequest, protocol.MessageTokenCount)
async def count_tokens(request: Request) -> Response:
    """Return the number of input tokens that /v1/messages would read."""
    service: ServiceState = request.app.state.service
    task_of = partial(protocol.task_of, sees=service.frontend.sees)
    asked, _, task = await read(request, CountRequest, task_of, timely=False)
    service.check_name(asked.model)

    def counted() -> protocol.MessageTokenCount:
        before = len(encoded(service.frontend, task).token_ids)
        if asked.context_management is None:
            return protocol.MessageTokenCount(before)
        edited = _edit(service, asked, task)
        left = len(encoded(service.frontend, task).token_ids) if edited else before
        return protocol.MessageTokenCount(left, protocol.TokensBefore(before))

    with _own_field_names(asked):
        count = await service.in_thread_for(task.messages, counted)
    return Response(encode(count), media_type="application/json")


def _edit(service: ServiceState, asked: CountRequest, task: ChatTask) -> list[AppliedEdit]:
    """Apply the edits of context_management to the messages of the task. Returns those that changed them."""

    def num_tokens(turns: Sequence[Turn]) -> int:
        messages, _ = messages_of(asked.system, turns, service.frontend.sees)
        return len(encoded(service.frontend, replace(task, messages=messages)).token_ids)

    turns, applied = apply_edits(asked.messages, edits_of(asked.context_management)[0], num_tokens)
    if applied:
        task.messages, _ = messages_of(asked.system, turns, service.frontend.sees)
    return applied


class MessageWriter:
    """Writes a run of the model as a message, whole or as events.

    The first event is sent with the first token.
    """

    def __init__(
        self, message: MessageReply, run: ChatRun, max_tokens: int, edits: protocol.Edits | UnsetType = UNSET
    ) -> None:
        self._message = message
        self._run = run
        self._max_tokens = max_tokens
        self._edits = edits
        self._blocks = AnswerBlocks()

    async def whole(self) -> bytes:
        """Return the message after its end."""
        async for batch in self._run.batches():
            self._blocks.add(event for _, event in batch)
        self._finish()
        self._message.content = [_block(block, block.text) for block in self._blocks.all]
        self._message.context_management = self._edits
        return encode(self._message)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events; those that are ready together in one piece."""
        message = self._message
        async for batch in self._run.batches():
            parts = []
            if not self._blocks.all:
                message.usage = _usage(self._run)
                parts.append(encode_event(protocol.MessageStart(message)))
            for change in self._blocks.add(event for _, event in batch):
                parts += map(encode_event, _events(change))
            yield b"".join(parts)
        self._finish()
        last = protocol.MessageDelta(
            delta=protocol.StopDelta(message.stop_reason, message.stop_sequence),
            usage=message.usage,
            timings=message.timings,
            context_management=self._edits,
        )
        yield encode_event(last) + encode_event(protocol.MessageStop())

    def _finish(self) -> None:
        """Fill in the fields that are known at the end."""
        message, (reason, met) = self._message, self._blocks.finish
        message.usage = _usage(self._run)
        message.timings = self._run.timings()
        if reason == "tool_calls":
            message.stop_reason = "tool_use"
        elif reason == "length":
            full = message.usage.output_tokens < self._max_tokens
            message.stop_reason = "model_context_window_exceeded" if full else "max_tokens"
        elif isinstance(met, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", met
        else:
            message.stop_reason = "end_turn"


def _events(change: BlockChange) -> Iterator[protocol.BlockEvent]:
    block = change.block
    if change.kind == "start":
        yield protocol.ContentBlockStart(block.index, _block(block, ""))
    elif change.kind == "delta":
        for piece in pieces(change.text):
            yield protocol.ContentBlockDelta(block.index, _DELTAS[block.kind](piece))
    else:
        yield protocol.ContentBlockStop(block.index)


def _block(block: Block, text: str) -> protocol.OutputBlock:
    if block.kind == CALL:
        return protocol.ToolUseBlock(block.call_id, block.name, _input(text))
    return protocol.ThinkingBlock(text) if block.kind == REASONING else protocol.TextBlock(text)


def _input(text: str) -> Raw:
    try:
        msgspec.json.decode(text, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError):
        return Raw(b"{}")  # the answer ended within the call, which must not be made then
    return Raw(text.encode())


def _usage(run: ChatRun) -> MessageUsage:
    usage = run.usage()
    computed = usage.prompt_tokens - usage.cached_tokens
    details = protocol.ThinkingDetails(usage.reasoning_tokens)
    return MessageUsage(computed, usage.cached_tokens, usage.completion_tokens, details)


def failed(error: Exception) -> bytes:
    """Return the event that ends a stream which failed."""
    return b"event: error\ndata: %s\n\n" % encode(AnthropicErrorBody.of(error))


ROUTES = [
    Route("/v1/messages", create, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
