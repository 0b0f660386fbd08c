"""LLM: the blocking API. Names and meanings follow vLLM's offline API."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any, cast

from quire.build import Progress
from quire.engine.client import Stream
from quire.engine.in_process import SharedEngine
from quire.engine.open_request import OpenRequest
from quire.errors import QuireError, RequestError
from quire.frontend import Encoded, Prompt
from quire.loaded import LoadedModel, Lora, Message, check_messages
from quire.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.pooled_texts import cosine, pairs_of, text_of
from quire.progress import generation_bar
from quire.request_reader import RequestReader
from quire.sampling_params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(LoadedModel):
    """A model in this process. Any number of threads may share it.

    `model` is a checkpoint folder, a hub id or "demo"; the other keywords are the fields of
    quire.config.EngineConfig. Raises ConfigError, with a hint, for anything that cannot be loaded.

        llm = LLM("demo")
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)
    """

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        super().__init__(model, progress=progress, **options)
        self._client = SharedEngine(self.engine)
        self._numbering = threading.Lock()  # requests are numbered in the order of submission
        self._num_requests = 0

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora_request: Lora = None,
    ) -> list[RequestOutput]:
        """Complete prompts: text, token ids, {"prompt_token_ids": [...]}, or a list of these.

        All are batched together; outputs are in the order of the prompts. Lower `priority` goes first when
        scheduling_policy is "priority". `lora_request` is the adapter of all prompts, or one or None for
        each: a LoRARequest, or the name of one that is loaded. Raises RequestError if a prompt or its
        parameters are invalid; then none is run.
        """
        encoded = [self.frontend.encode(prompt) for prompt in _listed(prompts)]
        if priority is not None:
            ranks = list(priority) if isinstance(priority, Iterable) else [priority]
            if len(ranks) != len(encoded):
                problem = f"{len(ranks)} priorities for {len(encoded)} prompts"
                raise RequestError(problem, "give one for each", "priority")
            encoded = [replace(one, priority=rank) for one, rank in zip(encoded, ranks, strict=True)]
        return self._run(self._adapted(encoded, lora_request), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Lora = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several: lists of {"role": ..., "content": ...}."""
        encoded = self._encode_chats(messages, tools, add_generation_prompt, chat_template_kwargs)
        return self._run(self._adapted(encoded, lora_request), sampling_params, use_tqdm)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, lora_request: Lora = None
    ) -> Iterator[RequestOutput]:
        """Like generate, but yield each request whenever it has advanced, while all keep running.

        A request is yielded as the same object each time, updated in place; `outputs[i].delta` is the new
        text. Leaving the loop aborts the unfinished requests.
        """
        encoded = [self.frontend.encode(prompt) for prompt in _listed(prompts)]
        return self._stream(self._adapted(encoded, lora_request), sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Lora = None,
    ) -> Iterator[RequestOutput]:
        """Like chat, for one conversation, yielding as it advances (see stream)."""
        encoded = self._encode_chats(messages, tools, True, chat_template_kwargs)
        return self._stream(self._adapted(encoded, lora_request), sampling_params)

    # Vectors and scores

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of texts, or of token ids, in their order.

        `prompt_name` is one of the model's own prompts, which is put before each text. A text that is too
        long is an error, unless `truncate_prompt_tokens` cuts it to so many tokens (-1: as many as the model
        reads). `dimensions` keeps the first numbers, for models trained for it. Raises RequestError.
        """
        self.pooled.check_dimensions(dimensions)
        how: dict[str, Any] = {"prompt_name": prompt_name, "truncate": truncate_prompt_tokens}
        encoded = [self.pooled.encode(text_of(prompt), **how) for prompt in _listed(prompts)]
        found = self._run(encoded, SamplingParams(detokenize=False), use_tqdm)
        vectors = [self.pooled.embedding(one.vector, dimensions) for one in found]
        return [
            EmbeddingRequestOutput(one.request_id, one.prompt_token_ids, EmbeddingOutput(vector))
            for one, vector in zip(found, vectors, strict=True)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs: of one text with each of `data_2`, or of the texts of both in turn.

        Those of an embedding model are cosines of embeddings. Raises RequestError.
        """
        pairs = pairs_of(data_1, data_2)
        params, limit = SamplingParams(detokenize=False), truncate_prompt_tokens
        if self.pooled.pooling.task == "embed":
            encoded = [self.pooled.encode(text, truncate=limit) for pair in pairs for text in pair]
            found = self._run(encoded, params, use_tqdm)
            both = list(zip(found[::2], found[1::2], strict=True))
            scores = [cosine(a.vector, b.vector) for a, b in both]
            ids = [a.prompt_token_ids + b.prompt_token_ids for a, b in both]
        else:
            how: dict[str, Any] = {"instruction": instruction, "truncate": limit}
            found = self._run([self.pooled.encode_pair(*pair, **how) for pair in pairs], params, use_tqdm)
            scores = [self.pooled.score(one.vector) for one in found]
            ids = [one.prompt_token_ids for one in found]
        return [
            ScoringRequestOutput(str(number), own, ScoringOutput(score))
            for number, (own, score) in enumerate(zip(ids, scores, strict=True))
        ]

    def close(self) -> None:
        """Stop the processes that render chat templates and compile grammars, and close the block store.

        The memory of the model is freed with this object.
        """
        self.frontend.close()
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode_chats(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> list[Encoded]:
        check_messages(messages)
        chats = [messages] if isinstance(messages[0], Mapping) else messages
        encode = self.frontend.encode_chat
        return [encode(chat, tools, add_generation_prompt, chat_template_kwargs) for chat in chats]

    def _run(self, prompts: list[Encoded], params: Params, use_tqdm: bool) -> list[RequestOutput]:
        call = self._submit(prompts, params)
        with generation_bar(len(call.readers), enabled=use_tqdm) as advance:
            for reader in self._follow(call):
                advance(reader.output)
        return [reader.output for reader in call.readers]

    def _stream(self, prompts: list[Encoded], params: Params) -> Iterator[RequestOutput]:
        for reader in self._follow(self._submit(prompts, params)):
            reader.take_deltas()
            yield reader.output

    def _submit(self, prompts: list[Encoded], params: Params) -> _Call:
        """Submit all prompts or, if one is refused, none."""
        call = _Call()
        try:
            for prompt, own in zip(prompts, self._each(params, len(prompts)), strict=True):
                with self._numbering:
                    self._submit_one(prompt, own, call)
        except BaseException:
            call.abort()
            raise
        return call

    def _submit_one(self, prompt: Encoded, params: SamplingParams, call: _Call) -> None:
        self._num_requests += 1
        name, now = str(self._num_requests - 1), self.engine.clock()
        request = self.frontend.request(prompt, params, request_id=name, arrival_s=now)
        reader = RequestReader(request, prompt.text, self.frontend.tokenizer)
        call.readers.append(reader)
        call.streams.append(self._client.submit(request, partial(self._take, reader, call)))

    def _each(self, params: Any, count: int) -> list[SamplingParams]:
        """Return one SamplingParams for each prompt."""
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * count if isinstance(params, SamplingParams) else params
        if not isinstance(each, Sequence):
            each = [params]  # of a wrong type: reported below
        elif len(each) != count:
            problem = f"{len(each)} sampling_params for {count} prompts"
            raise RequestError(problem, "give one for all, or one for each", "sampling_params")
        for own in each:
            if not isinstance(own, SamplingParams):
                problem = f"sampling_params holds a {type(own).__name__}"
                raise RequestError(problem, "give SamplingParams(...), or a list of them", "sampling_params")
        return list(each)

    def _take(self, reader: RequestReader, call: _Call, own: OpenRequest) -> None:
        """Read the new outputs of one request, whichever thread ran the step."""
        if own.error is not None:
            call.error = own.error
            return
        for output in own.take():
            if reader.push(output):
                self._client.abort(output.request_id, output.sequence)
        call.news[reader.request.request_id] = reader
        call.num_finished += reader.output.finished

    def _follow(self, call: _Call) -> Iterator[RequestReader]:
        """Step the engine until a call's requests are done, yielding each that advanced.

        Several calls may be followed concurrently: a step advances all of them, whichever thread runs it.
        """
        try:
            while call.news or not call.ended:
                self._client.step(call.waits)
                for name in list(call.news):
                    yield call.news.pop(name)
            if call.error is not None:
                raise call.error
        finally:
            call.abort()


@dataclass(slots=True)
class _Call:
    """One call of generate or stream: its requests, and those with new output, by id."""

    readers: list[RequestReader] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    news: dict[str, RequestReader] = field(default_factory=dict)
    num_finished: int = 0
    error: QuireError | None = None  # that ended all of them

    @property
    def ended(self) -> bool:
        return self.error is not None or self.num_finished == len(self.readers)

    def waits(self) -> bool:
        """True while there is nothing to yield before the next step."""
        return not self.news and not self.ended

    def abort(self) -> None:
        """Abort the unfinished requests."""
        for stream in self.streams:
            stream.abort()


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list. Arrays of token ids count as lists."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, str | Mapping | Encoded):
        return [prompts]
    if not isinstance(prompts, Sequence):
        problem = f"prompts is a {type(prompts).__name__}"
        raise RequestError(problem, "give text, token ids, a dict, or a list of these", "prompt")
    if prompts and isinstance(prompts[0], Integral):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
