"""/api/chat and /api/generate, as Ollama's clients speak them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.frontend import Encoded, Frontend
from quire.sampling_params import SamplingParams
from quire.server.chat_task import ChatEvent, ChatRun, ChatTask, Finish, fitted, start_chat
from quire.server.errors import NotFound, OllamaErrorBody
from quire.server.event_stream import EventStream, encode
from quire.server.field_names import renaming_fields
from quire.server.generation_fields import response_warnings
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

LATEST = ":latest"


class Lines(EventStream):
    """A stream of JSON objects, one a line. Nothing breaks silences: to clients every line is an object."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(lines, _failed, end=b"", keep_alive=b"")


def _failed(error: Exception) -> bytes:
    return encode(OllamaErrorBody.of(error)) + b"\n"


@describes(
    "An answer to a conversation, for clients of Ollama", OllamaChatRequest, OllamaChatReply, OllamaChatReply
)
async def chat(request: Request) -> Response:
    """The stream of an answer or, if that is not wanted, the answer."""
    serving: ServiceState = request.app.state.service
    convert = partial(protocol.chat_task, serving=serving)
    asked, unknown, task = await read(request, OllamaChatRequest, convert)
    return await _answer(request, asked, unknown, task, _chat_reply)


@describes(
    "An answer to a prompt, for clients of Ollama",
    OllamaGenerateRequest,
    OllamaGenerateReply,
    OllamaGenerateReply,
)
async def generate(request: Request) -> Response:
    """Likewise."""
    serving: ServiceState = request.app.state.service
    convert = partial(protocol.generate_task, serving=serving)
    asked, unknown, task = await read(request, OllamaGenerateRequest, convert)
    return await _answer(request, asked, unknown, task, _generate_reply)


def served(serving: ServiceState, name: str | None) -> str:
    """The name that an answer bears; clients add the tag ":latest" to one without. Raises NotFound."""
    try:
        return serving.check_model(name)
    except NotFound:
        if name is None or not name.endswith(LATEST):
            raise
        return serving.check_model(name.removesuffix(LATEST)) + LATEST


async def _answer(
    request: Request, asked: OllamaRequest, unknown: list[str], task: OllamaTask, reply: Writer
) -> Response:
    serving: ServiceState = request.app.state.service
    model = served(serving, asked.model)
    if task.chat is None:  # what clients ask to have the model loaded
        line = reply(Said(), model=model, done=True, done_reason="load")
        return Response(encode(line), media_type="application/json")
    with renaming_fields(protocol.NAMES):
        run = await _start(handle_of(request), task.chat, task.raw)
    told = LogprobCursor(run.output.outputs[0], _shape(run, asked))
    answer = OllamaAnswer(
        run, told, partial(reply, model=model), response_warnings(request, unknown, task.chat.warnings)
    )
    if asked.stream is False:
        return Response(await answer.whole(), media_type="application/json")
    return Lines(answer.lines())


async def _start(handle: ServerRequest, task: ChatTask, raw: str | None) -> ChatRun:
    if raw is None:
        return await start_chat(handle, task)
    frontend = handle.service.frontend
    params = SamplingParams.from_dict(task.sampling, {"max_tokens": None, **frontend.default_params})
    prompt = await handle.service.in_thread(_raw_prompt, frontend, raw, params)
    await handle.submit([prompt], [params])
    return ChatRun(handle, [AnswerParser()])


def _raw_prompt(frontend: Frontend, text: str, params: SamplingParams) -> Encoded:
    """A raw prompt is put together by its caller, control tokens and all."""
    return fitted(frontend.encode({"prompt": text, "trusted": True}), None, params, frontend)


def _shape(run: ChatRun, asked: OllamaRequest) -> ChatLogprobs | None:
    return ChatLogprobs(run.tokenizer, asked.top_logprobs or 0, as_ids=False) if asked.logprobs else None


@dataclass(slots=True)
class Said:
    """Text, reasoning and calls of the model since the last line."""

    content: str = ""
    thinking: str = ""
    calls: list[OllamaToolCall] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)


Writer = Callable[..., OllamaReply]  # what was said, and fields of the reply


def _chat_reply(said: Said, **fields: Any) -> OllamaReply:
    message = OllamaMessage(
        content=said.content, thinking=said.thinking or UNSET, tool_calls=said.calls or UNSET
    )
    return OllamaChatReply(message=message, **_common(said), **fields)


def _generate_reply(said: Said, **fields: Any) -> OllamaReply:
    return OllamaGenerateReply(
        response=said.content, thinking=said.thinking or UNSET, **_common(said), **fields
    )


def _common(said: Said) -> dict[str, Any]:
    entries = b",".join(entry for (entry,) in said.positions)
    return {"created_at": datetime.now(UTC), "logprobs": Raw(b"[%s]" % entries) if entries else UNSET}


class OllamaAnswer:
    """An answer that runs. A call is told when all of it is there, and not at all if it was cut."""

    def __init__(self, run: ChatRun, told: LogprobCursor, reply: Writer, warnings: list[str]) -> None:
        self._run, self._told, self._reply, self._warnings = run, told, reply, warnings
        self._finish = Finish("stop", None)
        self._call: CallStart | None = None
        self._arguments: list[str] = []

    async def whole(self) -> bytes:
        """The response, when the answer has ended."""
        said = Said()
        async for batch in self._run.batches():
            self._take(batch, said)
            await offloaded(num_new([self._told]), keep, [self._told])
        said.positions = self._told.kept
        return await offloaded(len(said.positions), self._last, said)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """A line for what is there together; the last says how it ended."""
        async for batch in self._run.batches():
            said = Said()
            self._take(batch, said)
            if line := await offloaded(num_new([self._told]), self._line, said):
                yield line
        yield self._last(Said()) + b"\n"

    def _line(self, said: Said) -> bytes:
        said.positions = self._told.advance()[1]
        return encode(self._reply(said)) + b"\n" if said != Said() else b""

    def _take(self, batch: Iterable[tuple[int, ChatEvent]], said: Said) -> None:
        for _, event in batch:
            match event:
                case Content(text):
                    said.content += text
                case Reasoning(text):
                    said.thinking += text
                case CallArguments(_, text):
                    self._arguments.append(text)
                case CallStart():
                    self._close(said)
                    self._call = event
                case Finish():
                    self._close(said)
                    self._finish = event

    def _close(self, said: Said) -> None:
        """The call that was open has all its arguments, or was cut."""
        text, call = "".join(self._arguments).encode(), self._call
        self._arguments, self._call = [], None
        if call is None:
            return
        try:
            msgspec.json.decode(text, type=dict[str, Raw])
        except (msgspec.DecodeError, RecursionError):
            return
        said.calls.append(OllamaToolCall(call.id, OllamaFunction(call.index, call.name, Raw(text))))

    def _last(self, said: Said) -> bytes:
        times, usage = self._run.timings(), self._run.usage()
        reply = self._reply(
            said,
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
    """Never 0: clients divide by it."""
    return max(1, round(time_ms * 1e6))


ROUTES = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
]
