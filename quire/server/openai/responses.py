"""/v1/responses, without state: a request brings the whole conversation, and nothing is kept of it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import count, zip_longest
from secrets import token_hex

from msgspec import UNSET, Raw
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.sampling_params import SamplingParams
from quire.server.answer_blocks import CALL, REASONING, TEXT, AnswerBlocks, Block, BlockChange, encode_event
from quire.server.chat_task import ChatRun, encoded, start_chat
from quire.server.errors import HTTPRefusal, NotFound, report
from quire.server.event_stream import EventStream, encode, grouped, pieces
from quire.server.field_names import renaming_fields
from quire.server.generation_fields import response_warnings
from quire.server.logprob_json import ChatLogprobs, LogprobCursor, Position
from quire.server.openai import items, protocol
from quire.server.openai import response_events as sse
from quire.server.openai.history import COMPACT_YOURSELF
from quire.server.openai.items import OutputItem, OutputText, ReasoningText, ResponseObject, ResponseRequest
from quire.server.openai.response_tools import CUSTOM, FUNCTION, ID_PREFIXES, CustomInput, Toolbox
from quire.server.openapi import describes
from quire.server.request import handle_of, read
from quire.server.service import ServiceState

_PREFIXES = {TEXT: "msg", REASONING: "rs", **ID_PREFIXES}
_NAMES = {
    r"^messages(\[\d+\][\w.]*)?|^prompt$": "input",
    r"\.function\.": ".",
    r"^max_tokens\b": "max_output_tokens",
}


@describes("Answer a conversation", ResponseRequest, ResponseObject, streams=sse.ResponseEvent)
async def create(request: Request) -> Response:
    """Return a response, or the stream of its events."""
    service: ServiceState = request.app.state.service
    task_of = partial(items.task_of, sees=service.frontend.sees)
    asked, unknown, (task, toolbox) = await read(request, ResponseRequest, task_of)
    handle = handle_of(request)
    model, handle.adapter = service.check_name(asked.model)
    response_id = f"resp_{token_hex(12)}"
    with _own_field_names(asked, toolbox):
        run = await start_chat(handle, task)
    params = run.params
    response = _begun(asked, service, params, response_id, model)
    idle = items.without_effect(asked, service.template_reads("reasoning_effort"))
    response.warnings = response_warnings(request, unknown, task.warnings + idle) or UNSET
    shape = None if params.logprobs is None else ChatLogprobs(run.tokenizer, params.logprobs, False)
    writer = ResponseWriter(response, run, toolbox, LogprobCursor(run.output.outputs[0], shape))
    if asked.stream:
        return EventStream(writer.events(), writer.failed, b"")
    del asked, task  # which may hold images, for as long as the answer takes
    return Response(await writer.whole(), media_type="application/json")


def _own_field_names(asked: ResponseRequest, toolbox: Toolbox) -> AbstractContextManager[None]:
    structure = "tools" if asked.text is None or asked.text.format is None else "text.format"
    return renaming_fields({**toolbox.names, **_NAMES, "^structured_outputs": structure})


def _begun(
    asked: ResponseRequest, service: ServiceState, params: SamplingParams, response_id: str, model: str
) -> ResponseObject:
    text = asked.text or items.TextOptions()
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        model=model,
        system_fingerprint=service.fingerprint,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=asked.metadata or {},
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        reasoning=asked.reasoning or items.ReasoningOptions(),
        temperature=params.temperature,
        text=items.TextOptions(format=text.format or items.TextFormat(type="text"), verbosity=text.verbosity),
        tool_choice="auto" if asked.tool_choice is None else asked.tool_choice,
        tools=asked.tools or [],
        top_logprobs=params.logprobs or 0,
        top_p=params.top_p,
        user=asked.user,
    )


class ResponseWriter:
    """Writes a run of the model as a response, whole or as events.

    The first events are sent with the first token.
    """

    def __init__(
        self, response: ResponseObject, run: ChatRun, toolbox: Toolbox, logprobs: LogprobCursor
    ) -> None:
        self._response = response
        self._run = run
        self._toolbox = toolbox
        self._logprobs = logprobs
        self._blocks = AnswerBlocks()
        self._custom_input = CustomInput()  # of the last call of a custom tool
        self._numbers = count()
        self._opened = False

    async def whole(self) -> bytes:
        """Return the response after its end."""
        async for batch in self._run.batches():
            self._blocks.add((event for _, event in batch), self._logprobs.advance()[1])
        self._finish()
        return encode(self._response)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events; those that are ready together in one piece."""
        async for batch in self._run.batches():
            changes = self._blocks.add((event for _, event in batch), self._logprobs.advance()[1])
            opening = self._opening()
            parts = [encode_event(event) for change in changes for event in self._change_events(change)]
            yield opening + b"".join(parts)
        self._finish()
        complete = self._response.status == "completed"
        last = sse.ResponseCompleted if complete else sse.ResponseIncomplete
        yield encode_event(last(next(self._numbers), self._response))

    def failed(self, error: Exception) -> bytes:
        """Return the events that end a response which failed while it ran."""
        opening = self._opening()
        self._response.status = "failed"
        self._response.error = {"code": "server_error", "message": report(error).message}
        self._response.output = self._output()
        return opening + encode_event(sse.ResponseFailed(next(self._numbers), self._response))

    def _opening(self) -> bytes:
        """Return the events that precede all others, once."""
        if self._opened:
            return b""
        self._opened = True
        first = (sse.ResponseCreated, sse.ResponseInProgress)
        return b"".join(encode_event(event(next(self._numbers), self._response)) for event in first)

    def _finish(self) -> None:
        """Fill in the fields that are known at the end."""
        response, usage = self._response, self._run.usage()
        response.system_fingerprint = self._run.handle.fingerprint
        if self._blocks.finish.reason == "length":
            response.status, response.incomplete_details = "incomplete", {"reason": "max_output_tokens"}
        else:
            response.status, response.completed_at = "completed", int(time.time())
        response.output = self._output()
        response.usage = items.ResponseUsage(
            usage.prompt_tokens,
            protocol.PromptDetails(usage.cached_tokens),
            usage.completion_tokens,
            protocol.OutputDetails(usage.reasoning_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )
        response.timings = self._run.timings()

    def _output(self) -> list[OutputItem]:
        return [self._item(block, _status(block)) for block in self._blocks.all]

    def _item_id(self, block: Block) -> str:
        kind = self._toolbox.called(block.name).kind if block.kind == CALL else block.kind
        return f"{_PREFIXES[kind]}_{self._response.id.removeprefix('resp_')}{block.index:02x}"

    def _item(self, block: Block, status: str) -> OutputItem:
        """Return the item of a block: without its content while the status is "in_progress"."""
        item_id, begun = self._item_id(block), status == "in_progress"
        if block.kind == CALL:
            arguments = "" if begun else block.text
            return self._toolbox.called(block.name).item(item_id, status, block.call_id, arguments)
        if block.kind == REASONING:
            return items.ReasoningItem(item_id, status, [] if begun else [ReasoningText(block.text)])
        return items.OutputMessage(item_id, status, [] if begun else [_output_text(block)])

    def _change_events(self, change: BlockChange) -> Iterator[sse.ResponseEvent]:
        block = change.block
        if change.kind == "start":
            item = self._item(block, "in_progress")
            yield sse.OutputItemAdded(next(self._numbers), block.index, item)
        if block.kind == CALL:
            yield from self._call_events(change)
        else:
            yield from self._text_events(change)
        if change.kind == "stop":
            item = self._item(block, _status(block))
            yield sse.OutputItemDone(next(self._numbers), block.index, item)

    def _text_events(self, change: BlockChange) -> Iterator[sse.TextEvent | sse.ReasoningEvent]:
        numbers, block, is_text = self._numbers, change.block, change.block.kind == TEXT
        place = (self._item_id(block), block.index, 0)
        if change.kind == "start":
            part = OutputText("") if is_text else ReasoningText("")
            yield sse.ContentPartAdded(next(numbers), *place, part)
        elif change.kind == "stop" and is_text:
            text = _output_text(block)
            yield sse.OutputTextDone(next(numbers), *place, text.text, text.logprobs)
            yield sse.ContentPartDone(next(numbers), *place, text)
        elif change.kind == "stop":
            yield sse.ReasoningTextDone(next(numbers), *place, block.text)
            yield sse.ContentPartDone(next(numbers), *place, ReasoningText(block.text))
        elif is_text:
            for piece, group in zip_longest(pieces(change.text), grouped(change.logprobs)):
                yield sse.OutputTextDelta(next(numbers), *place, piece or "", _entries(group or ()))
        else:
            for piece in pieces(change.text):
                yield sse.ReasoningTextDelta(next(numbers), *place, piece)

    def _call_events(self, change: BlockChange) -> Iterator[sse.CallEvent]:
        """Yield the events of a function's arguments or a custom tool's input. Other calls have none."""
        numbers, block = self._numbers, change.block
        called, place = self._toolbox.called(block.name), (self._item_id(block), block.index)
        if called.kind == FUNCTION and change.kind == "stop":
            yield sse.FunctionArgumentsDone(next(numbers), *place, called.name, block.text)
        elif called.kind == FUNCTION and change.text:
            for piece in pieces(change.text):
                yield sse.FunctionArgumentsDelta(next(numbers), *place, piece)
        elif called.kind == CUSTOM and change.kind == "start":
            self._custom_input = CustomInput()
        elif called.kind == CUSTOM and change.kind == "stop":
            yield sse.CustomInputDone(next(numbers), *place, CustomInput().push(block.text))
        elif called.kind == CUSTOM and (text := self._custom_input.push(change.text)):
            for piece in pieces(text):
                yield sse.CustomInputDelta(next(numbers), *place, piece)


def _status(block: Block) -> str:
    return "incomplete" if block.cut else "completed"


def _output_text(block: Block) -> OutputText:
    return OutputText(block.text, logprobs=_entries(block.logprobs))


def _entries(positions: Iterable[Position]) -> list[Raw]:
    return [Raw(entry) for (entry,) in positions]


@describes("Count the tokens of a conversation", ResponseRequest, items.InputTokens)
async def count_tokens(request: Request) -> Response:
    """Return the number of input tokens that /v1/responses would read."""
    service: ServiceState = request.app.state.service
    task_of = partial(items.task_of, sees=service.frontend.sees)
    asked, _, (task, toolbox) = await read(request, ResponseRequest, task_of, timely=False)
    service.check_name(asked.model)
    with _own_field_names(asked, toolbox):
        prompt = await service.in_thread_for(task.messages, encoded, service.frontend, task)
    return Response(encode(items.InputTokens(len(prompt.token_ids))), media_type="application/json")


@describes("Not available: responses are not stored")
async def stored(request: Request) -> Response:
    """Refuse requests for a stored response."""
    hint = "the server is stateless: send the whole conversation as input"
    raise NotFound("responses are not stored", hint)


@describes("Not available: compaction is not supported")
async def compact(request: Request) -> Response:
    """Refuse to compact, and say what to do instead."""
    raise NotFound("compaction is not supported", COMPACT_YOURSELF)


async def websocket(request: Request) -> Response:
    """Refuse a WebSocket with 426: agents that ask for one first then go on over HTTP at once."""
    if request.headers.get("upgrade", "").lower() != "websocket":
        raise HTTPException(405, headers={"allow": "POST"})
    hint = "send the request by POST over HTTP, with stream set to true for its events"
    raise HTTPRefusal(426, "WebSockets are not supported", hint, headers={"upgrade": "HTTP/1.1"})


ROUTES = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses", websocket, methods=["GET"], include_in_schema=False),
    Route("/v1/responses/compact", compact, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses/{response_id}", stored, methods=["GET", "DELETE"]),
    Route("/v1/responses/{response_id}/cancel", stored, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", stored, methods=["GET"]),
]
