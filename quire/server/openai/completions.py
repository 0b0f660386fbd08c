"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from secrets import token_hex
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import RequestError
from quire.frontend import Encoded, Frontend
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.chat_task import count_tokens, fitted
from quire.server.event_stream import EventStream, encode, grouped, id_groups, pieces
from quire.server.generation_fields import end_infill, prompt_list, response_warnings
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
from quire.server.openai.chunks import (
    NO_DETAILS,
    CompletionChunk,
    CompletionChunkChoice,
    event_of,
    head_of,
    take_drafting,
    token_details,
)
from quire.server.openai.protocol import Completion, CompletionChoice, CompletionRequest
from quire.server.openapi import describes
from quire.server.request import ServerRequest, handle_of, offloaded, read
from quire.text.infill import Gap

CHOICE_ENTRIES = 20  # log-probabilities that take as long to serialize as one choice
MAX_PARAMS_BYTES = 32 << 20  # parameters are sent with each prompt
DEFAULT_MAX_TOKENS = 16


@describes("Continue texts", CompletionRequest, Completion, streams=CompletionChunk)
async def completions(request: Request) -> Response:
    """Return continuations, or the stream of them."""
    handle = handle_of(request)
    service = handle.service
    convert = partial(params_of, frontend=service.frontend)
    asked, unknown, params = await read(request, CompletionRequest, convert)
    model, handle.adapter = service.check_name(asked.model)
    prompts, echoes = await service.in_thread(_encode, service.frontend, asked, params)
    with protocol.structure_named(asked):
        await handle.submit(prompts, [params] * len(prompts))
    head = head_of(service, f"cmpl-{token_hex(12)}", model)
    run = CompletionRun(asked, handle, echoes, head, response_warnings(request, unknown))
    if asked.stream:
        return EventStream(run.chunks())
    return Response(await run.whole(), media_type="application/json")


def params_of(asked: CompletionRequest, frontend: Frontend) -> SamplingParams:
    """Return the request's parameters over the model's. Raises RequestError for contradictory fields."""
    protocol.check(asked, ("suffix",))
    sampling = protocol.sampling_of(asked)
    if asked.suffix:
        _check_suffix(asked)
        end_infill(sampling, frontend)
    if asked.max_tokens is None:
        sampling["max_tokens"] = DEFAULT_MAX_TOKENS
    elif asked.max_tokens == 0:
        if not asked.echo:
            raise RequestError("max_tokens = 0 asks for nothing", "set echo to true, too", "max_tokens")
        sampling["max_tokens"] = 1  # not part of the response
    if asked.logprobs is not None:
        sampling["logprobs"] = asked.logprobs
        if asked.echo and asked.prompt_logprobs != -1:
            sampling["prompt_logprobs"] = max(asked.logprobs, asked.prompt_logprobs or 0)
    return SamplingParams.from_dict(sampling, frontend.default_params)


def _check_suffix(asked: CompletionRequest) -> None:
    """Raise RequestError for what a prompt of two texts cannot have."""
    others = {
        "echo": asked.echo,
        "add_special_tokens": asked.add_special_tokens is False,
        "truncate_prompt_tokens": asked.truncate_prompt_tokens is not None,
        "prompt": not isinstance(asked.prompt, str) and not all(isinstance(one, str) for one in asked.prompt),
    }
    for name, given in others.items():
        if given:
            raise RequestError(f"suffix: {name} has another meaning then", "give texts alone", name)


def _encode(
    frontend: Frontend, asked: CompletionRequest, params: SamplingParams
) -> tuple[list[Encoded], list[str]]:
    """Return the prompts as token ids and, if they are echoed, as text."""
    prompts = []
    for one in prompt_list(asked.prompt, params.n):
        if asked.suffix:
            prompt = frontend.encode_infill(Gap(str(one), asked.suffix))
        else:
            prompt = _encode_one(frontend, one, asked.add_special_tokens is not False)
        limit, side = asked.truncate_prompt_tokens, asked.truncation_side
        prompt = fitted(prompt, limit, params, frontend, side=side)
        prompt = replace(prompt, priority=asked.priority or 0, cache_salt=asked.cache_salt or "")
        prompts.append(replace(prompt, report_drafting=protocol.reports_drafting(asked)))
    check_size(prompts * params.n, params, frontend.model.config.vocab_size)
    if len(prompts) * len(encode(params)) > MAX_PARAMS_BYTES:
        raise RequestError("the parameters are too long for so many prompts", "send fewer at once", "prompt")
    if not asked.echo:
        return prompts, [""] * len(prompts)
    decode, skip = frontend.need_tokenizer().decode, params.skip_special_tokens
    return prompts, [decode(p.token_ids, skip) if p.text is None else p.text for p in prompts]


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
    """One continuation: its index in the response, and the cursor over its tokens."""

    index: int
    output: CompletionOutput
    cursor: LogprobCursor
    begun: bool = False
    ended: bool = False


@dataclass(slots=True)
class _Prompt:
    """One prompt: its result, and its text and log-probabilities if they are echoed."""

    output: RequestOutput
    echo: str
    choices: list[_Choice]
    positions: list[Position] | None = None

    @property
    def num_opening(self) -> int:
        """The number of the prompt's log-probabilities to serialize, once for each choice not begun."""
        num_new = sum(not choice.begun for choice in self.choices)
        return num_new and num_new * sum(len(p) for p in self.output.prompt_logprobs or () if p)


class CompletionRun:
    """Running prompts as a response, or as the chunks of a stream.

    Choices are numbered consecutively: those of the first prompt, then those of the next.
    """

    def __init__(
        self,
        asked: CompletionRequest,
        handle: ServerRequest,
        echoes: Sequence[str],
        head: dict[str, Any],
        warnings: list[str],
    ) -> None:
        self._asked, self._handle = asked, handle
        self._head, self._warnings = head, warnings
        self._options = asked.stream_options or protocol.StreamOptions()
        self._params = handle.prompts[0].request.params
        self._silent = asked.max_tokens == 0
        self._with_ids = asked.return_token_ids is True
        self._prompts: list[_Prompt] = []
        for prompt, echo in zip(handle.prompts, echoes, strict=True):
            begin = len(self._prompts) * self._params.n
            cursors = [LogprobCursor(one, self._shape(prompt.output, echo)) for one in prompt.output.outputs]
            choices = [_Choice(begin + i, cursor.output, cursor) for i, cursor in enumerate(cursors)]
            self._prompts.append(_Prompt(prompt.output, echo, choices))
        self._num_open = len(self._prompts) * self._params.n

    def _shape(self, prompt: RequestOutput | None, echo: str = "") -> CompletionLogprobs | None:
        """Return the shape for the tokens after a prompt, or for those of the prompt itself."""
        if self._asked.logprobs is None:
            return None
        as_ids = self._asked.return_tokens_as_token_ids is True
        before = prompt.prompt_token_ids if prompt else ()
        tokenizer, k = self._handle.service.frontend.need_tokenizer(), self._asked.logprobs
        return CompletionLogprobs(tokenizer, self._params, k, as_ids, before, len(echo))

    def _echoed(self, prompt: _Prompt) -> list[Position]:
        """Return the log-probabilities of a prompt that is echoed with them."""
        if prompt.positions is None:
            output, shape, prompt.positions = prompt.output, self._shape(None), []
            if self._asked.echo and shape is not None and output.prompt_logprobs is not None:
                prompt.positions = shape.positions(output.prompt_token_ids, output.prompt_logprobs)
        return prompt.positions

    def _usage(self, prompts: Sequence[_Prompt]) -> protocol.TokenCounts:
        usage = count_tokens([prompt.output for prompt in prompts])
        return protocol.usage_of(*(usage._replace(completion_tokens=0) if self._silent else usage))

    def _ending(self, output: CompletionOutput) -> tuple[str, str | int | None]:
        return ("length", None) if self._silent else (output.finish_reason or "stop", output.stop_reason)

    # The whole response

    async def whole(self) -> bytes:
        """Return the response when all choices have ended."""
        async for index, _ in self._handle:
            if self._params.logprobs is not None and not self._silent:
                cursors = [choice.cursor for choice in self._prompts[index].choices]
                await offloaded(num_new(cursors), keep, cursors)
        num_entries = CHOICE_ENTRIES * self._num_open + sum(prompt.num_opening for prompt in self._prompts)
        return await offloaded(num_entries, self._response)

    def _response(self) -> bytes:
        response = Completion(
            **self._head | {"system_fingerprint": self._handle.fingerprint},
            choices=[self._choice(prompt, choice) for prompt in self._prompts for choice in prompt.choices],
            usage=self._usage(self._prompts),
            timings=self._handle.timings(),
            warnings=self._warnings or UNSET,
        )
        return encode(response)

    def _choice(self, prompt: _Prompt, choice: _Choice) -> CompletionChoice:
        output, shape = choice.output, choice.cursor.shape
        text = prompt.echo + ("" if self._silent else output.text)
        logprobs = None if shape is None else Raw(shape.join(self._echoed(prompt) + choice.cursor.kept))
        found = CompletionChoice(choice.index, text, logprobs, *self._ending(output))
        if self._with_ids:
            found.token_ids = [] if self._silent else output.token_ids
            found.prompt_token_ids = prompt.output.prompt_token_ids
        if (k := self._asked.prompt_logprobs) is not None and prompt.output.prompt_logprobs is not None:
            found.prompt_logprobs = prompt_logprobs(prompt.output.prompt_logprobs, k)
        return found

    # The stream

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a stream; the last has `timings`. Continuous usage is that of one prompt."""
        chunk = CompletionChunk(**self._head, warnings=self._warnings or UNSET)
        async for index, _ in self._handle:
            prompt = self._prompts[index]
            num_entries = num_new(choice.cursor for choice in prompt.choices) + prompt.num_opening
            if events := await offloaded(num_entries, self._events, chunk, prompt):
                yield events
        if self._options.include_usage:
            yield event_of(chunk, [], self._usage(self._prompts), self._handle.timings())

    def _events(self, chunk: CompletionChunk, prompt: _Prompt) -> bytes:
        """Return the chunks of one delivery; none where its tokens have no text or details yet."""
        usage = self._usage([prompt]) if self._options.continuous_usage_stats else UNSET
        chunk.system_fingerprint = self._handle.fingerprint
        events: list[bytes] = []
        for choice in prompt.choices:
            if choice.ended:
                continue
            *parts, last = self._new_parts(prompt, choice)
            events += [event_of(chunk, [part], usage) for part in parts]
            choice.ended = choice.output.finish_reason is not None
            timings: dict[str, float] | UnsetType = UNSET
            if choice.ended:
                last.finish_reason, last.stop_reason = self._ending(choice.output)
                self._num_open -= 1
                if not self._num_open and not self._options.include_usage:
                    timings = self._handle.timings()
            if choice.ended or last.text or last.logprobs is not None or last.token_ids is not UNSET:
                events.append(event_of(chunk, [last], usage, timings))
        return b"".join(events)

    def _new_parts(self, prompt: _Prompt, choice: _Choice) -> Iterator[CompletionChunkChoice]:
        """Yield the new text and details of a choice, split to fit into chunks; at least one part."""
        if not choice.begun:
            choice.begun = True
            yield from self._opening(prompt, choice)
        if choice.output.drafting and not self._silent:
            tokenizer = self._handle.service.frontend.need_tokenizer()
            for drafting in take_drafting(choice.output, tokenizer):
                yield CompletionChunkChoice(choice.index, "", drafting=drafting)
        details = [] if self._silent else token_details(choice.cursor, self._with_ids)
        texts = pieces("" if self._silent else choice.output.delta)
        for text, detail in zip_longest(texts, details):
            logprobs, ids = detail or NO_DETAILS
            yield CompletionChunkChoice(choice.index, text or "", logprobs, token_ids=ids)

    def _opening(self, prompt: _Prompt, choice: _Choice) -> Iterator[CompletionChunkChoice]:
        """Yield what precedes the first token: the prompt, as far as the request asked for it."""
        echo = pieces(prompt.echo) if prompt.echo else ()
        shape = choice.cursor.shape
        logprobs = [Raw(shape.join(group)) for group in grouped(self._echoed(prompt))] if shape else []
        groups = id_groups(prompt.output.prompt_token_ids if self._with_ids else ())
        for text, entries, ids in zip_longest(echo, logprobs, groups):
            part = CompletionChunkChoice(choice.index, text or "", entries)
            yield part if ids is None else msgspec.structs.replace(part, prompt_token_ids=ids)


ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
