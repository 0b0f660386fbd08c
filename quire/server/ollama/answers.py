"""Ollama's /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.frontend import Encoded, Frontend
from quire.sampling_params import SamplingParams
from quire.server.chat_task import ChatEvent, ChatRun, ChatTask, Finish, fitted, start_chat
from quire.server.errors import OllamaErrorBody
from quire.server.event_stream import EventStream, encode
from quire.server.field_names import renaming_fields
from quire.server.generation_fields import end_infill, response_warnings
from quire.server.logprob_json import ChatLogprobs, LogprobCursor, Position, keep, num_new
from quire.server.ollama import protocol
from quire.server.ollama.protocol import (
    OllamaChatReply,
    OllamaChatRequest,
    OllamaFunction,
    OllamaGenerateReply,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaReply,
    OllamaRequest,
    OllamaTask,
    OllamaToolCall,
)
from quire.server.openapi import describes
from quire.server.request import ServerRequest, handle_of, offloaded, read
from quire.server.service import ServiceState
from quire.text.answer import AnswerParser, CallArguments, CallStart, Content, Reasoning
from quire.text.infill import Gap


class JsonLines(EventStream):
    """A stream of one JSON object per line. Without keep-alives: clients expect objects."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(lines, _error_line, end=b"", keep_alive=b"")


def _error_line(error: Exception) -> bytes:
    return encode(OllamaErrorBody.of(error)) + b"\n"


@describes(
    "Continue a conversation, in Ollama's form", OllamaChatRequest, OllamaChatReply, streams=OllamaChatReply
)
async def chat(request: Request) -> Response:
    """Stream the answer to a conversation, or return it."""
    return await _answer(request, OllamaChatRequest, protocol.chat_task, _chat_reply)


@describes(
    "Answer a prompt, in Ollama's form",
    OllamaGenerateRequest,
    OllamaGenerateReply,
    streams=OllamaGenerateReply,
)
async def generate(request: Request) -> Response:
    """Stream the answer to a prompt, or return it."""
    return await _answer(request, OllamaGenerateRequest, protocol.generate_task, _generate_reply)


async def _answer(
    request: Request, type_: type[R], task_of: Callable[[R, ServiceState], OllamaTask], make_reply: MakeReply
) -> Response:
    service: ServiceState = request.app.state.service
    asked, unknown, task = await read(request, type_, lambda asked: task_of(asked, service))
    handle = handle_of(request)
    model, handle.adapter = service.check_name(asked.model)
    make_reply = partial(make_reply, model=model)
    if task.chat is None:  # clients send this to have the model loaded
        line = make_reply(NewOutput(), done=True, done_reason="load")
        return Response(encode(line), media_type="application/json")
    with renaming_fields(protocol.NAMES):
        run = await _start(handle, task.chat, task.raw, task.suffix)
    shape = ChatLogprobs(run.tokenizer, asked.top_logprobs or 0, as_ids=False) if asked.logprobs else None
    cursor = LogprobCursor(run.output.outputs[0], shape)
    answer = OllamaAnswer(run, cursor, make_reply, response_warnings(request, unknown, task.chat.warnings))
    if asked.stream is not False:
        return JsonLines(answer.lines())
    del asked, task  # which may hold images, for as long as the answer takes
    return Response(await answer.whole(), media_type="application/json")


async def _start(handle: ServerRequest, task: ChatTask, raw: str | None, suffix: str | None) -> ChatRun:
    if raw is None:
        return await start_chat(handle, task)
    frontend, sampling = handle.service.frontend, dict(task.sampling)
    if suffix:
        end_infill(sampling, frontend)
    params = SamplingParams.from_dict(sampling, {"max_tokens": None, **frontend.default_params})
    prompt = await handle.service.in_thread(_verbatim, frontend, raw, suffix, params)
    await handle.submit([prompt], [params])
    return ChatRun(handle, [AnswerParser()])


def _verbatim(frontend: Frontend, text: str, suffix: str | None, params: SamplingParams) -> Encoded:
    """Encode a raw prompt, written in full with its control tokens, or the text before a suffix."""
    if suffix:
        prompt = frontend.encode_infill(Gap(text, suffix))
    else:
        prompt = frontend.encode({"prompt": text, "trusted": True})
    return fitted(prompt, None, params, frontend)


@dataclass(slots=True)
class NewOutput:
    """Text, reasoning and tool calls since the previous line."""

    content: str = ""
    thinking: str = ""
    calls: list[OllamaToolCall] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)


MakeReply = Callable[..., OllamaReply]  # of a NewOutput, and more fields of the reply
R = TypeVar("R", bound=OllamaRequest)


def _chat_reply(new: NewOutput, **fields: Any) -> OllamaReply:
    message = OllamaMessage(
        content=new.content, thinking=new.thinking or UNSET, tool_calls=new.calls or UNSET
    )
    return OllamaChatReply(message=message, **_common(new), **fields)


def _generate_reply(new: NewOutput, **fields: Any) -> OllamaReply:
    return OllamaGenerateReply(response=new.content, thinking=new.thinking or UNSET, **_common(new), **fields)


def _common(new: NewOutput) -> dict[str, Any]:
    entries = b",".join(entry for (entry,) in new.positions)
    return {"created_at": datetime.now(UTC), "logprobs": Raw(b"[%s]" % entries) if entries else UNSET}


class OllamaAnswer:
    """An answer that is being generated. A tool call is sent once it is complete; one cut off is not sent."""

    def __init__(
        self, run: ChatRun, cursor: LogprobCursor, make_reply: MakeReply, warnings: list[str]
    ) -> None:
        self._run, self._cursor, self._make_reply, self._warnings = run, cursor, make_reply, warnings
        self._finish = Finish("stop", None)
        self._call: CallStart | None = None
        self._arguments: list[str] = []

    async def whole(self) -> bytes:
        """Return the complete response."""
        new = NewOutput()
        async for batch in self._run.batches():
            self._collect(batch, new)
            await offloaded(num_new([self._cursor]), keep, [self._cursor])
        new.positions = self._cursor.kept
        return await offloaded(len(new.positions), self._final_reply, new)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield a line for all output available at a time. The last line has the reason it ended."""
        async for batch in self._run.batches():
            new = NewOutput()
            self._collect(batch, new)
            if line := await offloaded(num_new([self._cursor]), self._line, new):
                yield line
        yield self._final_reply(NewOutput()) + b"\n"

    def _line(self, new: NewOutput) -> bytes:
        new.positions = self._cursor.advance()[1]
        return encode(self._make_reply(new)) + b"\n" if new != NewOutput() else b""

    def _collect(self, batch: Iterable[tuple[int, ChatEvent]], new: NewOutput) -> None:
        for _, event in batch:
            match event:
                case Content(text):
                    new.content += text
                case Reasoning(text):
                    new.thinking += text
                case CallArguments(_, text):
                    self._arguments.append(text)
                case CallStart():
                    self._end_call(new)
                    self._call = event
                case Finish():
                    self._end_call(new)
                    self._finish = event

    def _end_call(self, new: NewOutput) -> None:
        """Add the open tool call to the output, if its arguments are complete."""
        text, call = "".join(self._arguments).encode(), self._call
        self._arguments, self._call = [], None
        if call is None:
            return
        try:
            msgspec.json.decode(text, type=dict[str, Raw])
        except (msgspec.DecodeError, RecursionError):
            return
        new.calls.append(OllamaToolCall(call.id, OllamaFunction(call.index, call.name, Raw(text))))

    def _final_reply(self, new: NewOutput) -> bytes:
        times, usage = self._run.timings(), self._run.usage()
        reply = self._make_reply(
            new,
            done=True,
            done_reason="length" if self._finish.reason == "length" else "stop",
            total_duration=_ns(times["total_ms"]),
            load_duration=_ns(times["queue_ms"]),
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=_ns(times["prefill_ms"]),
            eval_count=usage.completion_tokens,
            eval_duration=_ns(times["total_ms"] - times["queue_ms"] - times["prefill_ms"]),
            warnings=self._warnings or UNSET,
        )
        return encode(reply)


def _ns(time_ms: float) -> int:
    """Return nanoseconds, at least 1, as clients divide by them."""
    return max(1, round(time_ms * 1e6))


ROUTES = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
]
