"""/v1/responses, without state: the whole conversation comes in, nothing is kept of it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from itertools import zip_longest
from secrets import token_hex
from typing import Any

from msgspec import Raw
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.sampling_params import SamplingParams
from quire.server.answer_blocks import (
    CALL,
    REASONING,
    TEXT,
    Block,
    Blocks,
    Closed,
    Grown,
    Opened,
    Step,
    told_as,
)
from quire.server.body import read
from quire.server.chat_task import ChatRun, encoded, start_chat
from quire.server.errors import HTTPRefusal, NotFound, answer
from quire.server.event_stream import EventStream, encode, grouped, named, pieces
from quire.server.generation_fields import warned
from quire.server.logprob_json import ChatLogprobs, LogprobCursor, Position
from quire.server.openai import items, protocol
from quire.server.openai.history import COMPACT_YOURSELF
from quire.server.openai.items import OutputItem, ResponseObject, ResponseRequest
from quire.server.openai.response_tools import (
    CUSTOM,
    FUNCTION,
    FUNCTION_PLACE,
    SEARCH,
    SHELL,
    CustomInput,
    Toolbox,
)
from quire.server.openapi import describes
from quire.server.service import ServiceState

# What the text of a block is called in events, and the prefix of an item's id.
_STREAMED = {TEXT: "output_text", REASONING: "reasoning_text"}
_PREFIXES = {TEXT: "msg", REASONING: "rs", FUNCTION: "fc", CUSTOM: "ctc", SEARCH: "tsc", SHELL: "lsh"}
_NAMES = {
    r"^messages(\[\d+\][\w.]*)?|^prompt$": "input",
    r"\.function\.": ".",
    r"^max_tokens\b": "max_output_tokens",
}


@describes("A response to a conversation", ResponseRequest, ResponseObject, streams=True)
async def create(request: Request) -> Response:
    """A response, or the stream of one."""
    serving: ServiceState = request.app.state.serving
    asked, unknown, (task, toolbox) = await read(request, ResponseRequest, items.read_conversation)
    model = serving.check_model(asked.model)
    response_id = f"resp_{token_hex(12)}"
    structure = "tools" if asked.text is None or asked.text.format is None else "text.format"
    with told_as({FUNCTION_PLACE: toolbox.place, **_NAMES, "^structured_outputs": structure}):
        run = await start_chat(serving, task, request_id=response_id)
    params = run.generation.readers[0].request.params
    response = _begun(asked, serving, params, response_id, model)
    sources = serving.frontend.chat_template.templates.values()
    idle = items.without_effect(asked, any("reasoning_effort" in source for source in sources))
    if warnings := warned(request, unknown, task.warnings + idle):
        response.warnings = warnings
    shape = None if params.logprobs is None else ChatLogprobs(run.tokenizer, params.logprobs, False)
    told = LogprobCursor(run.output.outputs[0], shape)
    if asked.stream:
        stream = ResponseStream(response, run, told, toolbox)
        return EventStream(stream.events(), stream.failed, b"")
    blocks = Blocks()
    async for batch in run.batches():
        for _ in blocks.take_all((event for _, event in batch), told):
            pass  # the blocks are what is wanted
    finish(response, run, blocks, toolbox)
    return Response(encode(response), media_type="application/json")


def _begun(
    asked: ResponseRequest, serving: ServiceState, params: SamplingParams, response_id: str, model: str
) -> ResponseObject:
    text = asked.text or items.TextOptions()
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        model=model,
        system_fingerprint=serving.fingerprint,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=asked.metadata or {},
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        reasoning=asked.reasoning or items.ReasoningOptions(),
        temperature=params.temperature,
        text=items.TextOptions(format=text.format or items.Format(type="text"), verbosity=text.verbosity),
        tool_choice="auto" if asked.tool_choice is None else asked.tool_choice,
        tools=asked.tools or [],
        top_logprobs=params.logprobs or 0,
        top_p=params.top_p,
        user=asked.user,
    )


def finish(response: ResponseObject, run: ChatRun, blocks: Blocks, toolbox: Toolbox) -> None:
    """Write down how it ended and what came of it."""
    usage = run.usage()
    if blocks.finish.reason == "length":
        response.status, response.incomplete_details = "incomplete", {"reason": "max_output_tokens"}
    else:
        response.status, response.completed_at = "completed", int(time.time())
    response.output = _output(response, blocks, toolbox)
    response.usage = items.ResponseUsage(
        usage.prompt_tokens,
        protocol.PromptDetails(usage.cached_tokens),
        usage.completion_tokens,
        protocol.CompletionDetails(usage.reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )
    response.timings = run.generation.timings()


class ResponseStream:
    """The events of a response: it begins, item by item with its parts and their deltas, it ends.

    The first ones are sent when there is a first token.
    """

    def __init__(self, response: ResponseObject, run: ChatRun, told: LogprobCursor, toolbox: Toolbox) -> None:
        self._response = response
        self._run = run
        self._tokens = told
        self._toolbox = toolbox
        self._input = CustomInput()  # of the last call of a custom tool
        self._blocks = Blocks()
        self._number = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events; those that are ready together come in one piece."""
        async for batch in self._run.batches():
            steps = self._blocks.take_all((event for _, event in batch), self._tokens)
            yield self._opening() + b"".join(part for step in steps for part in self._told(step))
        finish(self._response, self._run, self._blocks, self._toolbox)
        yield self._whole(self._response.status)

    def failed(self, error: Exception) -> bytes:
        """What ends a response which failed while it ran."""
        opening = self._opening()
        self._response.status = "failed"
        self._response.error = {"code": "server_error", "message": answer(error).message}
        self._response.output = _output(self._response, self._blocks, self._toolbox)
        return opening + self._whole("failed")

    def _opening(self) -> bytes:
        """The events before all others, once."""
        return b"" if self._number else self._whole("created") + self._whole("in_progress")

    def _whole(self, kind: str) -> bytes:
        return self._event(kind, response=self._response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named(f"response.{kind}", sequence_number=number, **fields)

    def _told(self, step: Step) -> Iterator[bytes]:
        """The events of one step."""
        block = step.block
        item_id = _item_id(self._response, block, self._toolbox)
        place: dict[str, Any] = {"item_id": item_id, "output_index": block.index}
        if isinstance(step, Opened):
            item = _item(item_id, block, "in_progress", self._toolbox, whole=False)
            yield self._event("output_item.added", output_index=block.index, item=item)
        if block.kind == CALL:
            yield from self._told_of_call(step, place)
        else:
            yield from self._told_of_text(step, {**place, "content_index": 0})
        if isinstance(step, Closed):
            item = _item(item_id, block, _status(block), self._toolbox)
            yield self._event("output_item.done", output_index=block.index, item=item)

    def _told_of_text(self, step: Step, place: dict[str, Any]) -> Iterator[bytes]:
        block = step.block
        streamed, is_text = _STREAMED[block.kind], block.kind == TEXT
        match step:
            case Opened():
                yield self._event("content_part.added", **place, part=_part(block, ""))
            case Grown(_, text, logprobs):
                for piece, group in zip_longest(pieces(text), grouped(logprobs)):
                    extra = {"logprobs": _entries(group or ())} if is_text else {}
                    yield self._event(f"{streamed}.delta", **place, delta=piece or "", **extra)
            case Closed():
                extra = {"logprobs": _entries(block.logprobs)} if is_text else {}
                yield self._event(f"{streamed}.done", **place, text=block.text, **extra)
                yield self._event("content_part.done", **place, part=_part(block, block.text))

    def _told_of_call(self, step: Step, place: dict[str, Any]) -> Iterator[bytes]:
        """Of functions the arguments come in deltas, of custom tools the text; other calls come whole."""
        block, called = step.block, self._toolbox.called(step.block.name)
        if called.kind not in (FUNCTION, CUSTOM):
            return
        is_text = called.kind == CUSTOM
        streamed = "custom_tool_call_input" if is_text else "function_call_arguments"
        match step:
            case Opened():
                self._input = CustomInput()
            case Grown(_, text, _):
                text = self._input.push(text) if is_text else text
                for piece in pieces(text) if text else ():
                    yield self._event(f"{streamed}.delta", **place, delta=piece)
            case Closed() if is_text:
                whole = CustomInput().push(block.text)
                yield self._event(f"{streamed}.done", **place, input=whole)
            case Closed():
                yield self._event(f"{streamed}.done", **place, name=called.name, arguments=block.text)


def _item_id(response: ResponseObject, block: Block, toolbox: Toolbox) -> str:
    kind = toolbox.called(block.name).kind if block.kind == CALL else block.kind
    return f"{_PREFIXES[kind]}_{response.id.removeprefix('resp_')}{block.index:02x}"


def _output(response: ResponseObject, blocks: Blocks, toolbox: Toolbox) -> list[OutputItem]:
    return [_item(_item_id(response, block, toolbox), block, _status(block), toolbox) for block in blocks.all]


def _status(block: Block) -> str:
    return "incomplete" if block.cut else "completed"


def _item(item_id: str, block: Block, status: str, toolbox: Toolbox, whole: bool = True) -> OutputItem:
    """The item of a block, or what is there of it when it begins."""
    text = block.text if whole else ""
    if block.kind == CALL:
        return toolbox.called(block.name).item(item_id, status, block.call_id, text)
    if block.kind == REASONING:
        return items.ReasoningItem(item_id, status, [items.ReasoningText(text)] if whole else [])
    return items.OutputMessage(item_id, status, [_text(block, text)] if whole else [])


def _part(block: Block, text: str) -> items.OutputText | items.ReasoningText:
    return items.ReasoningText(text) if block.kind == REASONING else _text(block, text)


def _text(block: Block, text: str) -> items.OutputText:
    return items.OutputText(text, logprobs=_entries(block.logprobs))


def _entries(positions: Iterable[Position]) -> list[Raw]:
    return [Raw(entry) for (entry,) in positions]


@describes("How many tokens a conversation has", ResponseRequest, items.InputTokens)
async def count_tokens(request: Request) -> Response:
    """As many as /v1/responses would read."""
    serving: ServiceState = request.app.state.serving
    asked, _, (task, toolbox) = await read(request, ResponseRequest, items.read_conversation)
    serving.check_model(asked.model)
    with told_as({FUNCTION_PLACE: toolbox.place, **_NAMES}):
        prompt = await serving.in_thread(encoded, serving.frontend, task)
    return Response(encode(items.InputTokens(len(prompt.token_ids))), media_type="application/json")


@describes("None is kept")
async def kept(request: Request) -> Response:
    """What there would be to do with a response that had been stored."""
    hint = "the server is stateless: send the whole conversation as input"
    raise NotFound("no response is kept between requests", hint)


@describes("No conversation is compacted")
async def compact(request: Request) -> Response:
    """Refuse, and say what to do instead."""
    raise NotFound("no conversation is compacted here", COMPACT_YOURSELF)


async def websocket(request: Request) -> Response:
    """Agents that ask for a WebSocket first go on over HTTP at once where the status is 426."""
    if request.headers.get("upgrade", "").lower() != "websocket":
        raise HTTPException(405, headers={"allow": "POST"})
    hint = "POST the request, and set stream to true for its events"
    raise HTTPRefusal(426, "responses come over HTTP alone", hint, headers={"upgrade": "HTTP/1.1"})


ROUTES = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses", websocket, methods=["GET"], include_in_schema=False),
    Route("/v1/responses/compact", compact, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses/{response_id}", kept, methods=["GET", "DELETE"]),
    Route("/v1/responses/{response_id}/cancel", kept, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", kept, methods=["GET"]),
]
