"""Shared state of all endpoints: admission control, and a thread pool for tokenization and rendering."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from quire.config import EngineConfig, ServerConfig
from quire.engine.client import EngineClient
from quire.errors import EngineDead, Overloaded
from quire.frontend import Encoded, Frontend
from quire.sampling_params import SamplingParams
from quire.server.errors import NotFound
from quire.server.generation import Generation, Part
from quire.server.metrics import Metrics
from quire.text.tools import OutputFormat
from quire.types import NewRequest

NUM_TEXT_THREADS = 4  # tokenizers and grammars compute outside Python's lock
MANY_TOKENS = 1 << 15  # of prompts: so many are not looked at on the event loop
MANY_PROMPTS = SUBMITTED_AT_ONCE = 32
MAX_RETRY_AFTER_S = 60
MAX_MODEL_NAME = 256  # characters of a name that only a pattern serves; answers repeat it
P = ParamSpec("P")
T = TypeVar("T")


class Crowd(NamedTuple):
    """Why there is no room: too many `of` "requests" or "tokens", and how many wait, in words."""

    of: str
    words: str


@dataclass(slots=True, eq=False)
class Exchange:
    """One HTTP request: when it came, whose it is, and what it has started, which ends with it."""

    arrival_s: float
    tenant: str = ""
    generations: list[Generation] = field(default_factory=list)


EXCHANGE: ContextVar[Exchange] = ContextVar("EXCHANGE")  # the one that the running task answers


@dataclass(slots=True, eq=False)
class ServiceState:
    """One model, its engine or several behind a router, and the queue in front of them.

    A request is queued until its first output. The queue is bounded by requests, those that still are text
    among them, and by prompt tokens.
    """

    config: ServerConfig
    engine_config: EngineConfig
    frontend: Frontend
    engine: EngineClient
    metrics: Metrics
    names: tuple[str, ...]
    keyed: bool  # API keys are asked for
    output_format: OutputFormat  # how the model writes tool calls and reasoning
    draining: bool = False  # not ready any more
    refusing: bool = False  # nothing new is taken in
    exchanges: set[Exchange] = field(default_factory=set)
    num_queued_requests: int = 0
    num_queued_tokens: int = 0
    created_s: int = field(default_factory=lambda: int(time.time()))
    _num_in_threads: int = 0
    _queue_s: float = 1.0  # how long requests have waited lately
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_TEXT_THREADS, "quire-text")
    )

    @property
    def fingerprint(self) -> str:
        """Names all that decides the bits of an answer, for `system_fingerprint`."""
        return self.engine.status.facts.fingerprint

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of names that are served in addition to `names`: see ServerConfig.served_model_name."""
        return tuple(name for name in self.config.served_model_name if _is_pattern(name))

    def problem(self) -> str | None:
        """Why no request can be served now, or None."""
        return "the server is shutting down" if self.draining else self.engine.healthy(time.monotonic())

    def check_model(self, name: str | None) -> str:
        """The name that an answer bears, that which was asked for. Raises NotFound where it is not served."""
        if name is None or name in self.names:
            return name or self.names[0]
        if 0 < len(name) <= MAX_MODEL_NAME and any(_matches(name, pattern) for pattern in self.patterns):
            return name
        raise NotFound(
            f"model {name[:200]!r} is not served here",
            f"served are {', '.join((*self.names, *self.patterns))}",
            "model",
            "model_not_found",
        )

    def check_room(self, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raise Overloaded unless so many more can be queued.

        One request that is larger than the whole queue is taken while nothing else waits.
        """
        if (crowd := self.crowd(num_requests, num_tokens)) is not None:
            raise self.overloaded(crowd)

    def crowd(self, num_requests: int = 1, num_tokens: int = 0) -> Crowd | None:
        """Who waits already, if so many more find no room."""
        waiting, tokens = self.num_queued_requests + self._num_in_threads, self.num_queued_tokens
        if waiting and waiting + num_requests > self.config.max_queued_requests:
            return Crowd("requests", f"{waiting} requests wait")
        if tokens and tokens + num_tokens > self.config.max_queued_tokens:
            return Crowd("tokens", f"{tokens:,} prompt tokens wait")
        return None

    def overloaded(self, crowd: Crowd) -> Overloaded:
        """The refusal of a request because of a crowd. It is counted."""
        self.metrics.rejected(crowd.of)
        retry_s = min(max(math.ceil(self._queue_s), 1), MAX_RETRY_AFTER_S)
        return Overloaded(f"the queue is full: {crowd.words}", f"ask again in {retry_s} s", retry_s)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Call a function that computes: tokenizing, rendering. Raises Overloaded when many wait."""
        self.check_room()
        self._num_in_threads += 1
        try:
            call = self._threads.submit(function, *args, **keywords)
            return await asyncio.wrap_future(call)
        finally:
            self._num_in_threads -= 1

    async def generate(
        self, prompts: Sequence[Encoded], params: Sequence[SamplingParams], *, request_id: str
    ) -> Generation:
        """Hand prompts to the engine, all or none. What it returns ends with the HTTP request.

        Raises Overloaded, EngineDead, or RequestError for what can never run.
        """
        exchange = EXCHANGE.get(None) or Exchange(time.monotonic())
        if (problem := self.engine.healthy(time.monotonic())) is not None:
            raise EngineDead(problem, "send the request again in a moment")
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.check_room(len(prompts), num_tokens)
        many = num_tokens > MANY_TOKENS or len(prompts) > MANY_PROMPTS
        if many or any(own.structured_outputs or own.bad_words for own in params):
            requests = await self.in_thread(self._complete, prompts, params, exchange)
        else:
            requests = self._complete(prompts, params, exchange)
        generation = Generation(request_id, exchange.arrival_s, [], self.metrics, self._started)
        exchange.generations.append(generation)
        self.num_queued_requests += len(requests)
        self.num_queued_tokens += num_tokens
        try:
            for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True), 1):
                if number % SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # others may have the event loop
                reader = self.frontend.read(request, prompt.text)
                generation.parts.append(Part(reader, self.engine.submit(request)))
        except BaseException:
            left = requests[len(generation.parts) :]
            self.num_queued_requests -= len(left)
            self.num_queued_tokens -= sum(len(request.prompt_token_ids) for request in left)
            generation.abort()
            raise
        return generation

    def _complete(
        self, prompts: Sequence[Encoded], params: Sequence[SamplingParams], exchange: Exchange
    ) -> list[NewRequest]:
        """Requests that can run. Their ids are numbers: what a client calls its own is its affair."""
        limits, requests = self.engine.status.facts.limits, []
        for prompt, own in zip(prompts, params, strict=True):
            if tenant := exchange.tenant:
                salt = f"{tenant}:{prompt.cache_salt}" if self.config.cache_per_key else prompt.cache_salt
                prompt = replace(prompt, tenant=tenant, cache_salt=salt)
            number, arrival_s = str(next(self._numbers)), exchange.arrival_s
            request = self.frontend.request(prompt, own, request_id=number, arrival_s=arrival_s)
            limits.check(request)
            requests.append(request)
        return requests

    def _started(self, part: Part) -> None:
        """A prompt has left the queue."""
        request = part.reader.request
        self.num_queued_requests -= 1
        self.num_queued_tokens -= len(request.prompt_token_ids)
        self._queue_s += 0.1 * (time.monotonic() - request.arrival_s - self._queue_s)

    def close(self) -> None:
        """Stop the threads and the process that renders templates."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.frontend.close()


def served_names(config: ServerConfig, model: str) -> tuple[str, ...]:
    """What clients call the model: as they were told, or by its id, or by the name of its folder.

    Patterns are no names: where nothing else is given, the model's own name is served beside them.
    """
    if names := tuple(name for name in config.served_model_name if not _is_pattern(name)):
        return names
    path = Path(model).expanduser()
    return (path.resolve().name if path.exists() and model != "demo" else model,)


def _is_pattern(name: str) -> bool:
    return "*" in name


def _matches(name: str, pattern: str) -> bool:
    """In a pattern, * stands for any characters, and all others for themselves."""
    return fnmatchcase(name, pattern.replace("[", "[[]").replace("?", "[?]"))
