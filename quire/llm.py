"""LLM: the blocking API. Names and meanings follow vLLM's offline API."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

from quire.build import Progress, build
from quire.config import EngineConfig
from quire.engine.client import LocalClient
from quire.errors import RequestError
from quire.frontend import Frontend, Prompt, RequestReader
from quire.outputs import RequestOutput
from quire.progress import generation_bar, loading_bar
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model in this process.

    `model` is a checkpoint folder, a hub id or "demo"; the other keywords are the fields of
    quire.config.EngineConfig. Raises ConfigError, with a hint, for anything that cannot be loaded.

        llm = LLM("demo")
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)
    """

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        config = EngineConfig.from_keywords(model=str(model), **options)
        with loading_bar(config.model) as bar:
            built = build(config, progress or bar)
        self.config = config
        self.chosen = built.chosen
        self.engine = built.engine
        memory = built.description.memory
        self.frontend = Frontend(
            built.description.folder,
            built.description.model,
            max_model_len=memory.max_model_len,
            seed=config.seed,
        )
        self._client = LocalClient(self.engine)
        self._num_requests = 0
        self._open: dict[str, RequestReader] = {}  # by request id

    # The three ways to ask

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: text, token ids, {"prompt_token_ids": [...]}, or a list of these.

        All are computed together; outputs come in the order of the prompts. Raises RequestError when a
        prompt or its parameters are wrong; then none is run.
        """
        return self._run([self.frontend.encode(p) for p in _listed(prompts)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several: lists of {"role": ..., "content": ...}."""
        encoded = self._encode_chats(messages, tools, add_generation_prompt, chat_template_kwargs)
        return self._run(encoded, sampling_params, use_tqdm)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> Iterator[RequestOutput]:
        """Like generate, but yields a request whenever it has advanced, while all go on running.

        What is yielded is up to date, not a copy; `outputs[i].delta` is the text that is new. Leaving the
        loop aborts what still runs.
        """
        return self._stream([self.frontend.encode(p) for p in _listed(prompts)], sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like chat, for one conversation, yielding while it runs (see stream)."""
        return self._stream(self._encode_chats(messages, tools, True, chat_template_kwargs), sampling_params)

    # What a model brings

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError when it has none."""
        return self.frontend.need_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What generate and chat use when no parameters are given: the model's generation_config.json."""
        return SamplingParams(**self.frontend.default_params)

    def close(self) -> None:
        """Stop the process that renders chat templates. The model's memory goes with this object."""
        self.frontend.chat_template.close()

    def _encode_chats(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> list[tuple[str | None, list[int]]]:
        if not messages:
            raise RequestError("the conversation has no messages", None, "messages")
        chats = [messages] if isinstance(messages[0], Mapping) else messages
        encode = self.frontend.encode_chat
        return [encode(chat, tools, add_generation_prompt, chat_template_kwargs) for chat in chats]

    def _run(
        self, prompts: list[tuple[str | None, list[int]]], params: Params, use_tqdm: bool
    ) -> list[RequestOutput]:
        readers = self._submit(prompts, params)
        with generation_bar(len(readers), enabled=use_tqdm) as advance:
            for reader in self._follow(readers):
                advance(reader.output)
        return [reader.output for reader in readers]

    def _stream(self, prompts: list[tuple[str | None, list[int]]], params: Params) -> Iterator[RequestOutput]:
        for reader in self._follow(self._submit(prompts, params)):
            reader.take_deltas()
            yield reader.output

    def _submit(self, prompts: list[tuple[str | None, list[int]]], params: Params) -> list[RequestReader]:
        """Hand in all prompts or, when one is refused, none."""
        default = self.get_default_sampling_params() if params is None else params
        each = [default] * len(prompts) if isinstance(default, SamplingParams) else list(default)
        if len(each) != len(prompts):
            problem = f"{len(each)} sampling_params for {len(prompts)} prompts"
            raise RequestError(problem, "give one for all, or one for each", "sampling_params")
        readers: list[RequestReader] = []
        try:
            for (text, token_ids), own in zip(prompts, each, strict=True):
                self._num_requests += 1
                name, now = str(self._num_requests - 1), self.engine.clock()
                request = self.frontend.request(token_ids, own, request_id=name, arrival_s=now)
                self._client.submit(request)
                readers.append(self.frontend.read(request, text))
                self._open[name] = readers[-1]
        except BaseException:
            self._abort(readers)
            raise
        return readers

    def _follow(self, readers: list[RequestReader]) -> Iterator[RequestReader]:
        """Step the engine until these requests are done, yielding each that advanced.

        Several may be followed in turns: a step serves all, whoever takes it.
        """
        waiting = list(readers)
        try:
            while waiting:
                for reader in [reader for reader in waiting if reader.advanced]:
                    reader.advanced = False
                    yield reader
                waiting = [reader for reader in waiting if reader.advanced or not reader.output.finished]
                if waiting and not any(reader.advanced for reader in waiting):
                    self._step()
        finally:
            self._abort(waiting)

    def _step(self) -> None:
        with _interrupts_deferred():
            outputs = self._client.outputs()
        for output in outputs:
            reader = self._open.get(output.request_id)
            if reader is None:
                continue
            if reader.push(output):
                self._client.abort(output.request_id, output.choice)
            if reader.output.finished:
                del self._open[output.request_id]

    def _abort(self, readers: Iterable[RequestReader]) -> None:
        for reader in readers:
            self._client.abort(reader.request.request_id)
            self._open.pop(reader.request.request_id, None)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let a step end before Ctrl-C is raised: half a step would leave the engine in an unknown state."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught and callable(previous):
            previous(*caught[0])
