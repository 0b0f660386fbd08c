"""llama.cpp's /completion and /infill."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.frontend import Encoded, Frontend
from quire.outputs import CompletionOutput, Logprob
from quire.sampling_params import SamplingParams
from quire.server import llama_options
from quire.server.chat_task import fitted
from quire.server.errors import HTTPRefusal, LlamacppErrorBody
from quire.server.event_stream import EventStream, encode, grouped, id_groups, pieces
from quire.server.generation_fields import prompt_list, response_warnings
from quire.server.llamacpp import protocol
from quire.server.llamacpp.line_ends import LineEnds
from quire.server.llamacpp.protocol import (
    Continuation,
    ContinuationRequest,
    InfillRequest,
    LlamacppCompletionRequest,
    PartialContinuation,
    Timings,
    params_of,
)
from quire.server.logprob_json import ChatLogprobs, LogprobCursor, Position, keep, num_new
from quire.server.openapi import describes
from quire.server.prompt_run import PromptRun
from quire.server.request import ServerRequest, handle_of, offloaded, read
from quire.server.timings import generation_ms
from quire.text.infill import Gap, OtherFile


@describes(
    "Continue one or several prompts, in llama.cpp's form",
    LlamacppCompletionRequest,
    Continuation | list[Continuation],
    streams=PartialContinuation | Continuation,
)
async def completion(request: Request) -> Response:
    """Return a continuation of each prompt, or the stream of them."""
    return await _continue(request, LlamacppCompletionRequest, _encode)


@describes(
    "Fill in the text between two others, in llama.cpp's form",
    InfillRequest,
    Continuation,
    streams=PartialContinuation | Continuation,
)
async def infill(request: Request) -> Response:
    """Return the text between two others, or the stream of it; what does not fit in the context is cut."""
    frontend = handle_of(request).service.frontend
    if frontend.infill is None:
        hint = "it has no tokens such as <|fim_prefix|>; code models have, like Qwen2.5-Coder"
        raise HTTPRefusal(501, "this model does not fill in text between two others", hint)
    return await _continue(request, InfillRequest, _encode_infill)


R = TypeVar("R", bound=ContinuationRequest)


async def _continue(
    request: Request, type_: type[R], encode: Callable[[Frontend, R, SamplingParams], list[Encoded]]
) -> Response:
    handle = handle_of(request)
    service = handle.service
    convert = partial(params_of, frontend=service.frontend)
    asked, unknown, params = await read(request, type_, convert)
    model, handle.adapter = service.check_name(asked.model)
    prompts = await service.in_thread(encode, service.frontend, asked, params)
    with protocol.named():
        await handle.submit(prompts, [params] * len(prompts))
    idle = llama_options.without_effect(asked) + protocol.without_effect(asked)
    run = LlamacppCompletionRun(asked, handle, model, response_warnings(request, unknown, idle))
    if asked.stream:
        return EventStream(run.events(), _failed, b"")
    return Response(await run.whole(), media_type="application/json")


def _encode_infill(frontend: Frontend, asked: InfillRequest, params: SamplingParams) -> list[Encoded]:
    """Encode the prompt, with a quarter of the context for an answer without a limit."""
    context = frontend.max_model_len
    room = max(1, context - (context // 4 if params.max_tokens is None else params.max_tokens))
    files = [OtherFile(one.filename, one.text) for one in asked.input_extra or ()]
    gap = Gap(asked.input_prefix, asked.input_suffix, asked.prompt or "", files)
    return [fitted(frontend.encode_infill(gap, room), None, params, frontend)]


def _failed(error: Exception) -> bytes:
    return b"data: %s\n\n" % encode(LlamacppErrorBody.of(error))


def _encode(frontend: Frontend, asked: LlamacppCompletionRequest, params: SamplingParams) -> list[Encoded]:
    prompt = asked.prompt
    mixed = isinstance(prompt, list) and any(isinstance(item, int) for item in prompt)
    prompts = [prompt] if mixed else prompt_list(prompt, 1)
    return [fitted(_encode_one(frontend, one), None, params, frontend) for one in prompts]


def _encode_one(frontend: Frontend, prompt: Any) -> Encoded:
    """Encode a prompt, which callers of this interface write in full, including control tokens."""
    if isinstance(prompt, str):
        return frontend.encode({"prompt": prompt, "trusted": True})
    tokenizer, vocab_size, ids = frontend.need_tokenizer(), frontend.model.config.vocab_size, []
    for number, item in enumerate(prompt):
        if isinstance(item, str):
            frontend.check_length(item)
            ids += tokenizer.encode(item, add_special_tokens=not number, parse_special=True)
        elif type(item) is int and 0 <= item < vocab_size:
            ids.append(item)
        else:
            problem = f"a prompt consists of texts and token ids from 0 to {vocab_size - 1:,}"
            raise RequestError(problem, None, "prompt")
    return Encoded(tuple(ids))


class Probabilities(ChatLogprobs):
    """Log-probabilities in llama.cpp's form, [{id, token, bytes, logprob, top_logprobs}]."""

    def join(self, positions: Iterable[Position]) -> bytes:
        return b"[%s]" % b",".join(entry for (entry,) in positions)

    def _named(self, token_id: int, entry: Logprob) -> bytes:
        return b'{"id":%d,%s' % (token_id, super()._named(token_id, entry)[1:])


@dataclass(slots=True)
class _PromptCursor:
    """One prompt: its index in the request, its only sequence, cursors over its tokens and its lines."""

    index: int
    run: PromptRun
    choice: CompletionOutput
    cursor: LogprobCursor
    lines: LineEnds
    num_sent: int = 0  # characters
    ended: bool = False

    def look(self) -> None:
        """Look at new text, and end the sequence where that ends it."""
        self.lines.look(self.choice.text, generation_ms(self.run.output, self.run.deliveries)[1])
        if self.lines.reached and not self.run.finished:
            self.run.end()

    @property
    def text(self) -> str:
        """The text so far that belongs to the continuation."""
        open_ended = self.run.finished and not self.lines.reached
        return self.choice.text if open_ended else self.choice.text[: self.lines.num_certain]


class LlamacppCompletionRun:
    """Continuations of a request's prompts, as one response or as the events of a stream."""

    def __init__(
        self, asked: ContinuationRequest, handle: ServerRequest, model: str, warnings: list[str]
    ) -> None:
        self._silent = protocol.is_silent(asked)
        self._asked, self._handle, self._frontend = asked, handle, handle.service.frontend
        self._model, self._warnings = model, warnings
        tokenizer, k = self._frontend.need_tokenizer(), asked.n_probs
        self._prompts = []
        for index, prompt in enumerate(handle.prompts):
            (choice,) = prompt.output.outputs
            cursor = LogprobCursor(choice, Probabilities(tokenizer, k, as_ids=False) if k else None)
            limit_ms = asked.t_max_predict_ms or 0
            lines = LineEnds(asked.n_indent or 0, limit_ms if limit_ms > 0 else math.inf)
            self._prompts.append(_PromptCursor(index, prompt, choice, cursor, lines))

    async def whole(self) -> bytes:
        """Return the response: an object or, for several prompts, a list of them."""
        async for index, _ in self._handle:
            self._prompts[index].look()
            cursor = self._prompts[index].cursor
            await offloaded(num_new([cursor]), keep, [cursor])
        return await offloaded(sum(len(p.cursor.kept) for p in self._prompts), self._reply)

    def _reply(self) -> bytes:
        replies = []
        for prompt in self._prompts:
            reply = self._final_event(prompt)
            reply.prompt = self._text(prompt)
            if not self._silent:
                reply.content = prompt.text
                if self._asked.return_tokens:
                    reply.tokens = prompt.choice.token_ids
                if prompt.cursor.shape is not None:
                    reply.completion_probabilities = Raw(prompt.cursor.shape.join(prompt.cursor.kept))
            replies.append(self._chosen(reply))
        return encode(replies[0] if len(replies) == 1 else replies)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of all prompts. The last event of each has the reason it ended."""
        async for index, _ in self._handle:
            prompt = self._prompts[index]
            prompt.look()
            if events := await offloaded(num_new([prompt.cursor]), self._new_events, prompt):
                yield events

    def _new_events(self, prompt: _PromptCursor) -> bytes:
        events: list[Any] = [*self._partial_events(prompt)] if not self._silent else []
        if prompt.choice.finish_reason is not None and not prompt.ended:
            prompt.ended = True
            events.append(self._chosen(self._final_event(prompt)))
        return b"".join(b"data: %s\n\n" % encode(event) for event in events)

    def _partial_events(self, prompt: _PromptCursor) -> Iterator[PartialContinuation]:
        """Yield new text and tokens, in events of limited length."""
        token_ids, positions = prompt.cursor.advance()
        text = prompt.text[prompt.num_sent :]
        prompt.num_sent += len(text)
        texts = pieces(text) if text else ()
        for text, ids, group in zip_longest(texts, id_groups(token_ids), grouped(positions)):
            part = PartialContinuation(
                index=prompt.index,
                content=text or "",
                tokens=list(ids or ()),
                tokens_predicted=len(prompt.choice.token_ids),
                tokens_evaluated=len(prompt.run.output.prompt_token_ids),
            )
            if group and prompt.cursor.shape is not None:
                part.completion_probabilities = Raw(prompt.cursor.shape.join(group))
            if self._asked.timings_per_token:
                part.timings = self._timings(prompt)
            yield part

    def _final_event(self, prompt: _PromptCursor) -> Continuation:
        """Return the last event of a prompt: the reason it ended, counts and times."""
        choice, output = prompt.choice, prompt.run.output
        num_predicted = 0 if self._silent else len(choice.token_ids)
        max_model_len, params = self._frontend.max_model_len, prompt.run.request.params
        stop_type, num_tokens = "limit", len(output.prompt_token_ids) + len(choice.token_ids)
        if choice.finish_reason == "stop" and not self._silent and not prompt.lines.reached:
            stop_type = "word" if isinstance(choice.stop_reason, str) else "eos"
        return Continuation(
            index=prompt.index,
            content="",
            stop=True,
            tokens_predicted=num_predicted,
            tokens_evaluated=len(output.prompt_token_ids),
            tokens_cached=output.num_cached_tokens,
            model=self._model,
            generation_settings=protocol.settings_of(params, max_model_len),
            has_new_line="\n" in prompt.text,
            truncated=stop_type == "limit" and num_tokens >= max_model_len,
            stop_type=stop_type,
            stopping_word=str(choice.stop_reason) if stop_type == "word" else "",
            timings=self._timings(prompt),
            warnings=self._warnings or UNSET,
        )

    def _chosen(self, reply: Continuation) -> Continuation | dict[str, Any]:
        """Return a reply, or the fields of it that the request names."""
        if not self._asked.response_fields:
            return reply
        known, chosen = msgspec.json.decode(encode(reply)), {}
        for name in self._asked.response_fields:
            found = known
            for key in name.split("/"):
                found = found.get(key, UNSET) if isinstance(found, dict) else UNSET
            if found is not UNSET:
                chosen[name] = found
        return chosen

    def _timings(self, prompt: _PromptCursor) -> Timings:
        """Return the times of a prompt; rates without tokens are 0."""
        output = prompt.run.output
        prompt_ms, predicted_ms = generation_ms(output, prompt.run.deliveries)
        if not prompt_ms and prompt.run.deliveries.first_s is not None:  # known at the end of a sequence
            prompt_ms = (prompt.run.deliveries.first_s - self._handle.arrival_s) * 1e3
        num_prompt = len(output.prompt_token_ids) - output.num_cached_tokens
        num_predicted = 0 if self._silent else len(prompt.choice.token_ids)
        timings = Timings(
            output.num_cached_tokens,
            *_rates(num_prompt, prompt_ms),
            *_rates(num_predicted, predicted_ms),
        )
        if (times := prompt.choice.metrics) is not None and times.num_drafted:
            timings.draft_n, timings.draft_n_accepted = times.num_drafted, times.num_accepted
        return timings

    def _text(self, prompt: _PromptCursor) -> str:
        output = prompt.run.output
        if output.prompt is not None:
            return output.prompt
        return self._frontend.need_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)


def _rates(num_tokens: int, time_ms: float) -> tuple[int, float, float, float]:
    """Return tokens, milliseconds, milliseconds per token, tokens per second."""
    per_token = time_ms / num_tokens if num_tokens else 0.0
    return num_tokens, round(time_ms, 3), per_token, 1e3 * num_tokens / time_ms if time_ms > 0 else 0.0
