"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from secrets import token_hex
from typing import Any

from msgspec import UNSET, Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import RequestError
from quire.frontend import Encoded, Frontend
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.body import read
from quire.server.chat_task import count_tokens, fitted
from quire.server.event_stream import EventStream, encode, grouped, id_groups, pieces
from quire.server.generation import Generation, beside
from quire.server.generation_fields import warned
from quire.server.logprob_json import (
    CompletionLogprobs,
    LogprobCursor,
    Position,
    check_size,
    keep,
    num_new,
    prompt_logprobs,
)
from quire.server.openai import protocol
from quire.server.openai.chunks import NOTHING, OPEN, Chunks, added, details, finished, head_of
from quire.server.openai.protocol import Completion, CompletionChoice, CompletionRequest
from quire.server.openapi import describes
from quire.server.service import ServiceState

MAX_PROMPTS = 1024
MAX_CHOICES = 1024  # of all prompts together
CHOICE_ENTRIES = 20  # log-probabilities that are as much work as a choice of the response is
MAX_PARAMS_BYTES = 32 << 20  # each prompt takes the parameters along
DEFAULT_MAX_TOKENS = 16
_NOTHING = (b'"text":""', NOTHING)


@describes("Continuations of texts", CompletionRequest, Completion, streams=True)
async def completions(request: Request) -> Response:
    """Continuations, or the stream of them."""
    serving: ServiceState = request.app.state.serving
    convert = partial(params_of, frontend=serving.frontend)
    asked, unknown, params = await read(request, CompletionRequest, convert)
    model = serving.check_model(asked.model)
    prompts, echoes = await serving.in_thread(_encode, serving.frontend, asked, params)
    request_id = f"cmpl-{token_hex(12)}"
    with protocol.structure_named(asked):
        generation = await serving.generate(prompts, [params] * len(prompts), request_id=request_id)
    head, warnings = head_of(serving, request_id, model), warned(request, unknown)
    run = CompletionRun(asked, serving.frontend, generation, echoes, head, warnings)
    if asked.stream:
        return EventStream(run.events())
    return Response(await run.whole(), media_type="application/json")


def params_of(asked: CompletionRequest, frontend: Frontend) -> SamplingParams:
    """The request's parameters over the model's. Raises RequestError for fields that do not go together."""
    protocol.check(asked)
    sampling = protocol.sampling_of(asked)
    if asked.max_tokens is None:
        sampling["max_tokens"] = DEFAULT_MAX_TOKENS
    elif asked.max_tokens == 0:
        if not asked.echo:
            raise RequestError("max_tokens = 0 asks for nothing", "set echo to true, too", "max_tokens")
        sampling["max_tokens"] = 1  # which nobody is shown
    if asked.logprobs is not None:
        sampling["logprobs"] = asked.logprobs
        if asked.echo and asked.prompt_logprobs != -1:
            sampling["prompt_logprobs"] = max(asked.logprobs, asked.prompt_logprobs or 0)
    return SamplingParams.from_dict(sampling, frontend.default_params)


def _encode(
    frontend: Frontend, asked: CompletionRequest, params: SamplingParams
) -> tuple[list[Encoded], list[str]]:
    """The prompts as token ids and, if they are to be given back, as text."""
    prompts = []
    for one in listed(asked.prompt, params.n):
        prompt = _encode_one(frontend, one, asked.add_special_tokens is not False)
        limit, side = asked.truncate_prompt_tokens, asked.truncation_side
        prompt = fitted(prompt, limit, params, frontend, side=side)
        prompts.append(replace(prompt, priority=asked.priority or 0, cache_salt=asked.cache_salt or ""))
    check_size(prompts * params.n, params, frontend.model.config.vocab_size)
    if len(prompts) * len(encode(params)) > MAX_PARAMS_BYTES:
        raise RequestError("the parameters are too long for so many prompts", "send fewer at once", "prompt")
    if not asked.echo:
        return prompts, [""] * len(prompts)
    decode, skip = frontend.need_tokenizer().decode, params.skip_special_tokens
    return prompts, [decode(p.token_ids, skip) if p.text is None else p.text for p in prompts]


def listed(prompt: str | list[Any], n: int) -> list[str | int | list[int]]:
    """The prompts of a request one by one. Raises RequestError when they are none, or too many."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts: list[Any] = [prompt]
    else:
        prompts = prompt
    if not prompts:
        raise RequestError("prompt is an empty list", "give at least one prompt", "prompt")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{len(prompts):,} prompts are more than {MAX_PROMPTS:,}", None, "prompt")
    if len(prompts) * n > MAX_CHOICES:
        problem = f"{len(prompts):,} prompts with {n} choices each are more than {MAX_CHOICES:,} choices"
        raise RequestError(problem, "send several requests", "n")
    return prompts


def _encode_one(frontend: Frontend, prompt: str | int | list[int], add_special_tokens: bool) -> Encoded:
    if isinstance(prompt, int):
        raise RequestError("prompt mixes token ids and other prompts", None, "prompt")
    if isinstance(prompt, str):
        if add_special_tokens:
            return frontend.encode(prompt)
        frontend.check_length(prompt)
        return Encoded(tuple(frontend.need_tokenizer().encode(prompt, add_special_tokens=False)), prompt)
    vocab_size = frontend.model.config.vocab_size
    if not all(type(i) is int and 0 <= i < vocab_size for i in prompt):
        raise RequestError(f"token ids of a prompt are integers from 0 to {vocab_size - 1:,}", None, "prompt")
    return Encoded(tuple(prompt))


@dataclass(slots=True)
class _Choice:
    """One continuation: its place in the response, and what has been written of it."""

    index: int
    output: CompletionOutput
    told: LogprobCursor
    begun: bool = False
    ended: bool = False


@dataclass(slots=True)
class _Prompt:
    """One prompt: what came of it, and its text and logprobs if they are given back."""

    output: RequestOutput
    echo: str
    choices: list[_Choice]
    positions: list[Position] | None = None


class CompletionRun:
    """Prompts that run, in the words of this interface: as a whole, or as the chunks of a stream.

    Choices are numbered through: those of the first prompt, then those of the next.
    """

    def __init__(
        self,
        asked: CompletionRequest,
        frontend: Frontend,
        generation: Generation,
        echoes: Sequence[str],
        head: dict[str, Any],
        warnings: list[str],
    ) -> None:
        self._asked = asked
        self._head, self._warnings = head, warnings
        self._options = asked.stream_options or protocol.StreamOptions()
        self._chunks = Chunks({**head, "object": "text_completion"}, warnings)
        self._frontend = frontend
        self._generation = generation
        self._params = generation.readers[0].request.params
        self._silent = asked.max_tokens == 0
        self._with_ids = asked.return_token_ids is True
        self._prompts: list[_Prompt] = []
        for reader, echo in zip(generation.readers, echoes, strict=True):
            begin = len(self._prompts) * self._params.n
            tolds = [LogprobCursor(one, self._shape(reader.output, echo)) for one in reader.output.outputs]
            choices = [_Choice(begin + i, told.output, told) for i, told in enumerate(tolds)]
            self._prompts.append(_Prompt(reader.output, echo, choices))
        self._num_open = len(self._prompts) * self._params.n

    def _shape(self, prompt: RequestOutput | None, echo: str = "") -> CompletionLogprobs | None:
        """Of what follows a prompt, or of the prompt itself."""
        if self._asked.logprobs is None:
            return None
        as_ids = self._asked.return_tokens_as_token_ids is True
        before = prompt.prompt_token_ids if prompt else ()
        tokenizer, k = self._frontend.need_tokenizer(), self._asked.logprobs
        return CompletionLogprobs(tokenizer, self._params, k, as_ids, before, len(echo))

    def _echoed(self, prompt: _Prompt) -> list[Position]:
        """The logprobs of a prompt that is given back with them."""
        if prompt.positions is None:
            output, shape, prompt.positions = prompt.output, self._shape(None), []
            if self._asked.echo and shape is not None and output.prompt_logprobs is not None:
                prompt.positions = shape.positions(output.prompt_token_ids, output.prompt_logprobs)
        return prompt.positions

    def _usage(self, prompts: Sequence[_Prompt]) -> protocol.Usage:
        usage = count_tokens([prompt.output for prompt in prompts])
        return protocol.usage_of(*(usage._replace(completion_tokens=0) if self._silent else usage))

    async def whole(self) -> bytes:
        """The response, when all choices have ended."""
        async for index, _ in self._generation:
            prompt = self._prompts[index]
            if self._params.logprobs is not None and not self._silent:
                tolds = [choice.told for choice in prompt.choices]
                await beside(num_new(tolds), keep, tolds)
        num_entries = CHOICE_ENTRIES * self._num_open + sum(map(_num_opening, self._prompts))
        return await beside(num_entries, self._reply)

    def _reply(self) -> bytes:
        reply = Completion(
            **self._head,
            choices=[self._choice(prompt, choice) for prompt in self._prompts for choice in prompt.choices],
            usage=self._usage(self._prompts),
            timings=self._generation.timings(),
            warnings=self._warnings or UNSET,
        )
        return encode(reply)

    def _choice(self, prompt: _Prompt, choice: _Choice) -> CompletionChoice:
        output, shape = choice.output, choice.told.shape
        text = prompt.echo + ("" if self._silent else output.text)
        logprobs = None if shape is None else Raw(shape.join(self._echoed(prompt) + choice.told.kept))
        reply = CompletionChoice(choice.index, text, logprobs, *self._ending(output))
        if self._with_ids:
            reply.token_ids = [] if self._silent else output.token_ids
            reply.prompt_token_ids = prompt.output.prompt_token_ids
        if (k := self._asked.prompt_logprobs) is not None and prompt.output.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(prompt.output.prompt_logprobs, k)
        return reply

    def _ending(self, output: CompletionOutput) -> tuple[str, str | int | None]:
        if self._silent:
            return "length", None
        return output.finish_reason or "stop", output.stop_reason

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream; the last has `timings`. Continuous usage is that of one prompt."""
        options = self._options
        async for index, _ in self._generation:
            prompt = self._prompts[index]
            usage = added({"usage": self._usage([prompt])}) if options.continuous_usage_stats else b""
            num_entries = num_new(choice.told for choice in prompt.choices) + _num_opening(prompt)
            if chunks := await beside(num_entries, self._chunks_of, prompt, usage):
                yield chunks
        if options.include_usage:
            usage_of_all = {"usage": self._usage(self._prompts), "timings": self._generation.timings()}
            yield self._chunks.none(added(usage_of_all))

    def _chunks_of(self, prompt: _Prompt, usage: bytes) -> bytes:
        running = [choice for choice in prompt.choices if not choice.ended]
        return b"".join(chunk for choice in running for chunk in self._written(prompt, choice, usage))

    def _written(self, prompt: _Prompt, choice: _Choice, usage: bytes) -> Iterator[bytes]:
        """Chunks with what is new of a choice; none when there is nothing to say of its tokens yet."""
        *parts, (body, part) = self._news(prompt, choice)
        for before in parts:
            yield self._chunks.choice(choice.index, *before, OPEN, usage)
        choice.ended = choice.output.finish_reason is not None
        if choice.ended:
            finish = finished(*self._ending(choice.output))
            yield self._chunks.choice(choice.index, body, part, finish, usage + self._end())
        elif (body, part) != _NOTHING:
            yield self._chunks.choice(choice.index, body, part, OPEN, usage)

    def _end(self) -> bytes:
        """What the chunk that ends a choice says of the request, if nothing comes after it."""
        self._num_open -= 1
        if self._num_open or self._options.include_usage:
            return b""
        return added({"timings": self._generation.timings()})

    def _news(self, prompt: _Prompt, choice: _Choice) -> Iterator[tuple[bytes, bytes]]:
        """What is new of a choice: text and details of chunks; at least one."""
        if not choice.begun:
            choice.begun = True
            yield from self._opening(prompt, choice)
        parts = [NOTHING] if self._silent else details(choice.told, self._with_ids)
        for text, part in zip_longest(pieces("" if self._silent else choice.output.delta), parts):
            yield b'"text":%s' % encode(text or ""), part or NOTHING

    def _opening(self, prompt: _Prompt, choice: _Choice) -> Iterator[tuple[bytes, bytes]]:
        """What comes before the first token: the prompt, as far as it was asked for."""
        echo = pieces(prompt.echo) if prompt.echo else ()
        shape = choice.told.shape
        logprobs = [shape.join(group) for group in grouped(self._echoed(prompt))] if shape else []
        ids = id_groups(prompt.output.prompt_token_ids if self._with_ids else ())
        for text, entries, group in zip_longest(echo, logprobs, ids):
            part = b',"logprobs":%s' % (entries or b"null")
            part += added({"prompt_token_ids": group}) if group else b""
            yield b'"text":%s' % encode(text or ""), part


def _num_opening(prompt: _Prompt) -> int:
    """Log-probabilities of the prompt, once for each choice that has not begun."""
    num_open = sum(not choice.begun for choice in prompt.choices)
    return num_open and num_open * sum(len(p) for p in prompt.output.prompt_logprobs or () if p)


ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
