"""LLM: the blocking API. Names and meanings follow vLLM's offline API."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral
from types import FrameType
from typing import Any, cast

from quire.build import Progress, build
from quire.config import EngineConfig
from quire.engine.client import EngineClient, LocalClient
from quire.errors import EngineDead, RequestError
from quire.frontend import Encoded, Frontend, Prompt, RequestReader
from quire.outputs import RequestOutput
from quire.progress import announce, generation_bar, loading_bar
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model in this process. Any number of threads may share it.

    `model` is a checkpoint folder, a hub id or "demo"; the other keywords are the fields of
    quire.config.EngineConfig. Raises ConfigError, with a hint, for anything that cannot be loaded.

        llm = LLM("demo")
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)
    """

    def __init__(self, model: str = "demo", *, progress: Progress | None = None, **options: Any) -> None:
        config = EngineConfig.from_keywords(model=str(model), **options)
        with loading_bar(config.model) as bar:
            built = build(config, progress or bar, announce)
        self.config = config
        self.chosen = built.chosen
        self.engine = built.engine
        memory = built.description.memory
        self.frontend = Frontend(
            built.description.folder,
            built.description.model,
            max_model_len=memory.max_model_len,
            longest_context=built.description.longest_context,
            seed=config.seed,
        )
        self._client: EngineClient = LocalClient(self.engine)
        self._lock = threading.Lock()  # the engine serves one thread at a time
        self._num_requests = 0
        self._open: dict[str, tuple[RequestReader, _Call]] = {}  # by request id
        self._abandoned: deque[str] = deque()  # ids of requests that nobody follows any more

    # The three ways to ask

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: text, token ids, {"prompt_token_ids": [...]}, or a list of these.

        All are computed together; outputs come in the order of the prompts. Lower `priority` goes first
        when scheduling_policy is "priority". Raises RequestError when a prompt or its parameters are
        wrong; then none is run.
        """
        encoded = [self.frontend.encode(prompt) for prompt in _listed(prompts)]
        if priority is not None:
            if len(priority) != len(encoded):
                problem = f"{len(priority)} priorities for {len(encoded)} prompts"
                raise RequestError(problem, "give one for each", "priority")
            encoded = [replace(one, priority=rank) for one, rank in zip(encoded, priority, strict=True)]
        return self._run(encoded, sampling_params, use_tqdm)

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
        """Stop the processes that render chat templates and compile grammars.

        The model's memory goes with this object.
        """
        self.frontend.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        chosen = (f"{name}: {value}" for name, value in self.chosen.items() if name != "model")
        return f"LLM({self.config.model!r}, {', '.join(chosen)})"

    def _encode_chats(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> list[Encoded]:
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError("messages is not a list of {'role': ..., 'content': ...}", None, "messages")
        if not messages:
            raise RequestError("the conversation has no messages", None, "messages")
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
        """Hand in all prompts or, when one is refused, none."""
        call = _Call()
        try:
            for prompt, own in zip(prompts, self._each(params, len(prompts)), strict=True):
                with self._lock:
                    self._submit_one(prompt, own, call)
        except BaseException:
            self._abort(call)
            raise
        return call

    def _submit_one(self, prompt: Encoded, params: SamplingParams, call: _Call) -> None:
        self._abort_abandoned()
        self._num_requests += 1
        name, now = str(self._num_requests - 1), self.engine.clock()
        request = self.frontend.request(prompt, params, request_id=name, arrival_s=now)
        reader = self.frontend.read(request, prompt.text)
        self._open[name] = (reader, call)
        call.readers.append(reader)
        self._client.submit(request)

    def _each(self, params: Any, count: int) -> list[SamplingParams]:
        """One SamplingParams for each prompt."""
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * count if isinstance(params, SamplingParams) else params
        if not isinstance(each, Sequence):
            each = [params]  # of a wrong type, which is named below
        elif len(each) != count:
            problem = f"{len(each)} sampling_params for {count} prompts"
            raise RequestError(problem, "give one for all, or one for each", "sampling_params")
        for own in each:
            if not isinstance(own, SamplingParams):
                problem = f"sampling_params holds a {type(own).__name__}"
                raise RequestError(problem, "give SamplingParams(...), or a list of them", "sampling_params")
        return list(each)

    def _follow(self, call: _Call) -> Iterator[RequestReader]:
        """Step the engine until a call's requests are done, yielding each that advanced.

        Several calls may be followed in turns: a step serves all, whoever takes it.
        """
        try:
            while call.news or not call.finished:
                with self._lock:
                    if not call.news and not call.finished:  # else another thread's step brought some
                        self._step()
                for name in list(call.news):
                    yield call.news.pop(name)
        finally:
            self._abort(call)

    def _step(self) -> None:
        """One step of the engine, its outputs handed to their readers: all of it or, on Ctrl-C, none."""
        with _interrupts_deferred():
            self._abort_abandoned()
            if not self._client.has_work:
                raise EngineDead(
                    "requests wait and the engine has no work", "this is a bug: please report it"
                )
            for output in self._client.outputs():
                if output.request_id not in self._open:
                    continue  # aborted
                reader, call = self._open[output.request_id]
                if reader.push(output):
                    self._client.abort(output.request_id, output.choice)
                call.news[output.request_id] = reader
                if reader.output.finished:
                    del self._open[output.request_id]
                    call.num_finished += 1

    def _abort(self, call: _Call) -> None:
        """Abort what a call left open, at once or, while a step is under way, before the next.

        Never waits: the garbage collector may end a forgotten stream in the middle of another's step.
        """
        self._abandoned += [reader.request.request_id for reader in call.readers]
        if self._lock.acquire(blocking=False):
            try:
                self._abort_abandoned()
            finally:
                self._lock.release()

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            name = self._abandoned.popleft()
            if self._open.pop(name, None) is not None:
                self._client.abort(name)


@dataclass(slots=True)
class _Call:
    """One call of generate or stream: its requests, and by id those with news for the caller."""

    readers: list[RequestReader] = field(default_factory=list)
    news: dict[str, RequestReader] = field(default_factory=dict)
    num_finished: int = 0

    @property
    def finished(self) -> bool:
        return self.num_finished == len(self.readers)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. Arrays of token ids count as lists of them."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, str | Mapping | Encoded):
        return [prompts]
    if not isinstance(prompts, Sequence):
        problem = f"prompts is a {type(prompts).__name__}"
        raise RequestError(problem, "give text, token ids, a dict, or a list of these", "prompt")
    if prompts and isinstance(prompts[0], Integral):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let a step end before Ctrl-C is raised: half a step would leave the engine in an unknown state."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # Ctrl-C is ignored, or ends the process: nothing to put off
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught:
            previous(*caught[0])
