"""AsyncLLM: the API for asyncio programs. Names and meanings follow vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from quire.adapters import LoRARequest
from quire.build import Progress
from quire.engine.in_process import EngineThread
from quire.errors import RequestError
from quire.frontend import Encoded, Prompt
from quire.loaded import LoadedModel, Message, check_messages
from quire.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.pooled_texts import text_of
from quire.request_reader import RequestReader
from quire.sampling_params import SamplingParams


class AsyncLLM(LoadedModel):
    """A model in this process. Requests of all tasks of an event loop are batched together.

    The constructor takes the arguments of LLM and, like it, loads the model before it returns: errors are
    raised there, and an AsyncLLM that exists is ready. To keep the event loop running meanwhile:
    `llm = await asyncio.to_thread(AsyncLLM, "demo")`.

        async with AsyncLLM("demo") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=50)):
                print(output.outputs[0].delta, end="", flush=True)

    The engine runs in one thread and tokenization in another, so the event loop blocks on neither. A slow
    reader does not slow the engine down: unread outputs are buffered.
    """

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        super().__init__(model, progress=progress, **options)
        self._client = EngineThread(self.engine, self._facts)
        self._text = ThreadPoolExecutor(1, "quire-text")  # one: requests are numbered in order (Frontend)
        self._num_requests = 0
        self._encoding: dict[str, bool] = {}  # requests by id: True once they were aborted
        weakref.finalize(self, self._client.stop)  # at the latest before the interpreter ends

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt: text, token ids or {"prompt_token_ids": [...]}. Yield after each advance.

        The same object is yielded each time, updated in place, with all output so far; `outputs[i].delta` is
        the new text. The last one is `finished`. Leaving the loop, an exception in it or cancelling its task
        aborts the request. Lower `priority` goes first when scheduling_policy is "priority". `lora_request`
        is an adapter, or the name of one that is loaded.

        The first iteration raises RequestError if the prompt or its parameters are invalid, or if
        `request_id` is in use; any iteration may raise EngineDead.
        """
        encode = partial(self._encode, prompt, priority)
        return self._follow(encode, sampling_params, request_id, lora_request)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, a list of {"role": ..., "content": ...}; see generate."""
        check_messages(messages)
        encode = self.frontend.encode_chat
        asked = partial(encode, messages, tools, add_generation_prompt, chat_template_kwargs)
        return self._follow(asked, sampling_params, request_id, lora_request)

    async def embed(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> EmbeddingRequestOutput:
        """Return the embedding of one text, or of token ids; see LLM.embed."""
        self.pooled.check_dimensions(dimensions)
        how: dict[str, Any] = {"prompt_name": prompt_name, "truncate": truncate_prompt_tokens}
        found = await self._pooled(partial(self.pooled.encode, text_of(prompt), **how), request_id)
        numbers = self.pooled.embedding(found.vector, dimensions)
        return EmbeddingRequestOutput(found.request_id, found.prompt_token_ids, EmbeddingOutput(numbers))

    async def score(
        self,
        query: str,
        document: str,
        request_id: str | None = None,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> ScoringRequestOutput:
        """Return the score of a pair of texts, of a model that reads both together; see LLM.score."""
        how: dict[str, Any] = {"instruction": instruction, "truncate": truncate_prompt_tokens}
        if self.pooled.pooling.task == "embed":
            raise RequestError("this model reads no pairs", "compare what AsyncLLM.embed returns", "model")
        found = await self._pooled(partial(self.pooled.encode_pair, query, document, **how), request_id)
        score = ScoringOutput(self.pooled.score(found.vector))
        return ScoringRequestOutput(found.request_id, found.prompt_token_ids, score)

    async def abort(self, request_id: str) -> None:
        """Abort a request: its last output has the finish reason "abort". Unknown ids are ignored."""
        if request_id in self._encoding:
            self._encoding[request_id] = True
        self._client.abort(request_id)

    async def close(self) -> None:
        """Stop the engine thread after the current step. Open requests raise EngineDead."""
        await self._client.close()
        self._text.shutdown(wait=False)  # what waits there raises EngineDead: its tasks are not cancelled
        self.frontend.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _follow(
        self,
        encode: Callable[[], Encoded],
        params: SamplingParams | None,
        request_id: str | None,
        lora_request: LoRARequest | str | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._client.check_alive()
        adapted = partial(self._encode_adapted, encode, lora_request)
        name = self._named(request_id)
        prepare = partial(self._prepare, adapted, self._checked(params), name)
        self._encoding[name] = False
        try:
            reader = await asyncio.get_running_loop().run_in_executor(
                self._text, prepare, self.engine.clock()
            )
        finally:
            is_aborted = self._encoding.pop(name, False)
        stream = self._client.submit(reader.request)
        if is_aborted:
            stream.abort()
        try:
            while not reader.output.finished:
                for output in await stream.get():
                    if reader.push(output):
                        stream.abort(output.sequence)
                reader.take_deltas()
                yield reader.output
        finally:
            stream.abort()

    async def _pooled(self, encode: Callable[[], Encoded], request_id: str | None) -> RequestOutput:
        async for output in self._follow(encode, SamplingParams(detokenize=False), request_id, None):
            found = output
        return found

    def _checked(self, params: Any) -> SamplingParams:
        if params is None:
            return self.get_default_sampling_params()
        if not isinstance(params, SamplingParams):
            problem = f"sampling_params is a {type(params).__name__}"
            raise RequestError(problem, "give SamplingParams(...)", "sampling_params")
        return params

    def _named(self, request_id: str | None) -> str:
        if request_id is None:
            self._num_requests += 1
            return f"quire-{self._num_requests - 1}"
        if not isinstance(request_id, str):
            raise RequestError(f"request_id is a {type(request_id).__name__}", "give a str", "request_id")
        return request_id

    def _encode(self, prompt: Prompt, priority: int | None) -> Encoded:
        encoded = self.frontend.encode(prompt)
        return encoded if priority is None else replace(encoded, priority=priority)

    def _encode_adapted(
        self, encode: Callable[[], Encoded], lora_request: LoRARequest | str | None
    ) -> Encoded:
        return self._adapted([encode()], lora_request)[0]

    def _prepare(
        self, encode: Callable[[], Encoded], params: SamplingParams, request_id: str, arrival_s: float
    ) -> RequestReader:
        self._client.check_alive()  # again: it may have been closed meanwhile
        prompt = encode()
        request = self.frontend.request(prompt, params, request_id=request_id, arrival_s=arrival_s)
        return RequestReader(request, prompt.text, self.frontend.tokenizer)
