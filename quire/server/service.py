"""Shared state of all endpoints: admission control, and a thread pool for tokenization and rendering."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from quire.config import EngineConfig, ServerConfig
from quire.engine.client import EngineClient
from quire.engine.forecast import Forecast, mean_context
from quire.engine.status import AdapterFacts, EngineStatus, StepReport
from quire.environment import user_path
from quire.errors import Overloaded
from quire.frontend import Encoded, Frontend
from quire.images.prompt import has_images
from quire.sampling_params import SamplingParams
from quire.server.errors import NotFound
from quire.server.metrics import Metrics
from quire.text.tools import OutputFormat
from quire.types import NewRequest

if TYPE_CHECKING:
    from quire.cluster.several import Several
    from quire.recording.recorder import Recorder
    from quire.server.page.feed import Feed
    from quire.server.request import ServerRequest
    from quire.server.telemetry import Spans

NUM_TEXT_THREADS = 4  # tokenizers and grammars compute without Python's lock
MAX_RETRY_AFTER_S = 60
DRAIN_RETRY_S = 5
MAX_MODEL_NAME = 256  # characters of a name that only a pattern serves; answers repeat it
LATEST = ":latest"  # of names, for clients of Ollama
P = ParamSpec("P")
T = TypeVar("T")


class QueueFull(Overloaded):
    """No place in the queue is free: the client should retry later."""


@dataclass(slots=True, eq=False)
class ServiceState:
    """One model, its engine or several behind a router, and the queue in front of them.

    A request is queued from the end of its body until its first output. The queue is bounded by requests and
    by prompt tokens.
    """

    config: ServerConfig
    engine_config: EngineConfig
    frontend: Frontend
    engine: EngineClient
    metrics: Metrics
    names: tuple[str, ...]
    keyed: bool  # API keys are asked for
    output_format: OutputFormat  # how the model writes tool calls and reasoning
    recorder: Recorder | None = None
    replicas: Several | None = None  # the engine, where it is several
    spans: Spans | None = None  # where traces of requests go
    names_elsewhere: Callable[[], Collection[str]] = tuple  # those of the server's other models
    draining: bool = False  # not ready any more
    refusing: bool = False  # nothing new is taken in
    is_experimenting: bool = False  # a process of quire.experiments runs
    requests: set[ServerRequest] = field(default_factory=set)  # open ones
    num_uploading_bytes: int = 0  # of request bodies in transit
    num_queued_requests: int = 0
    num_queued_tokens: int = 0
    created_s: int = field(default_factory=lambda: int(time.time()))
    started_s: float = field(default_factory=time.monotonic)
    feed: Feed | None = None  # of those who watch the engine
    forecast: Forecast = field(init=False)
    _queue_s: float = 1.0  # smoothed waiting time of recent requests
    _tag_key: bytes = field(default_factory=partial(secrets.token_bytes, 32))
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_TEXT_THREADS, "quire-text")
    )

    _image_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "quire-images"))

    def __post_init__(self) -> None:
        self.forecast = Forecast(self.engine_config)

    @property
    def fingerprint(self) -> str:
        """Return `system_fingerprint`, which covers everything that decides the bits of an answer."""
        return self.engine.status.facts.fingerprint

    @property
    def first(self) -> int:
        """The number of the engine that is shown where one is: the first replica, or the only engine."""
        return next(iter(self.engine.statuses), 0)

    @property
    def first_status(self) -> EngineStatus:
        """The status of that engine."""
        return next(iter(self.engine.statuses.values()), self.engine.status)

    @property
    def num_slots(self) -> int:
        """The number of sequences that can be computed together, by engines that were not given up."""
        num_engines = sum(one.state != "stopped" for one in self.engine.statuses.values())
        return self.engine_config.max_num_seqs * max(1, num_engines)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of names that are served in addition to `names`: see ServerConfig.served_model_name."""
        return patterns_of(self.config)

    @property
    def is_over(self) -> bool:
        """True when the engine is given up, so that a supervisor can start the server anew."""
        return self.engine.status.state == "stopped"

    def end_feeds(self) -> None:
        """End the streams of those who watch the engine, who would stay."""
        if self.feed is not None:
            self.feed.close()

    def problem(self) -> str | None:
        """Return the reason why no request can be served now, or None."""
        return "the server is shutting down" if self.draining else self.engine.healthy(time.monotonic())

    def check_model(self, name: str | None) -> str:
        """Return the name for the response: the requested one. Raises NotFound when it is not served.

        Programs that list names as Ollama does add LATEST to them.
        """
        if name is None or is_served(name, self.names, self.patterns):
            return name or self.names[0]
        if is_served(name.removesuffix(LATEST), self.names, self.patterns):
            return name
        raise NotFound(
            f"model {name[:200]!r} is not served here",
            f"served are {', '.join((*self.names, *self.patterns))}",
            "model",
            "model_not_found",
        )

    @property
    def adapters(self) -> dict[str, AdapterFacts]:
        """The loaded adapters by name."""
        return {own.name: own for own in self.first_status.facts.adapters}

    def check_name(self, name: str | None) -> tuple[str, str]:
        """Return the name for the response, and what prompts have as `adapter` if it names one, else "".

        Raises NotFound when it is not served. The names of the model come before those of its adapters.
        """
        if name is not None and not {name, plain := name.removesuffix(LATEST)} & {*self.names}:
            for one in (name, plain):
                if (found := self.adapters.get(one)) is not None:
                    return name, found.adapter
        return self.check_model(name), ""

    def template_reads(self, variable: str) -> bool:
        """Return True if one of the model's chat templates names this variable."""
        return any(variable in source for source in self.frontend.chat_template.templates.values())

    def check_queue(self, num_requests: int = 1, num_tokens: int = 0, timely: bool = True) -> None:
        """Raise QueueFull unless so many more requests and prompt tokens can be queued, and be `timely`.

        One request that is larger than the whole queue is accepted while nothing else waits.
        """
        waiting, tokens = self.num_queued_requests, self.num_queued_tokens
        if waiting and waiting + num_requests > self.config.max_queued_requests:
            words = f"the queue is full: {waiting} requests wait"
            self._refuse("requests", words, self._queue_s, num_requests, num_tokens)
        if tokens and tokens + num_tokens > self.config.max_queued_tokens:
            words = f"the queue is full: {tokens:,} prompt tokens wait"
            self._refuse("tokens", words, self._queue_s, num_requests, num_tokens)
        if self.config.ttft_goal is not None and timely:
            self._check_ttft(self.config.ttft_goal, num_requests, num_tokens)

    def _check_ttft(self, goal_s: float, num_requests: int, num_tokens: int) -> None:
        """Raise QueueFull if requests would get their first token after the goal because of those ahead."""
        queued = self.forecast.uncached(self.num_queued_requests, self.num_queued_tokens)
        new, status = self.forecast.uncached(num_requests, num_tokens), self.engine.status
        num_engines = sum(one.state == "ready" for one in self.engine.statuses.values())
        running, context = status.num_running, mean_context(status)
        forecast = self.forecast.ttft_s(queued, new, running, context, max(1, num_engines))
        if forecast is None or not self.forecast.is_calibrated:
            return
        ttft_s, alone_s = forecast
        late_s = ttft_s - max(goal_s, alone_s)
        if late_s > 0:
            words = f"the first token would come in {ttft_s:.1f} s, and the goal is {goal_s:g} s"
            self._refuse("ttft_goal", words, late_s, num_requests, num_tokens)

    def _refuse(
        self, reason: str, words: str, retry_s: float, num_requests: int, num_tokens: int
    ) -> NoReturn:
        self.metrics.rejected(reason)
        if self.replicas is not None:
            self.replicas.load.refused(num_requests, num_tokens)
        retry_after = min(max(math.ceil(retry_s), 1), MAX_RETRY_AFTER_S)
        raise QueueFull(words, f"ask again in {retry_after} s", retry_after)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Call a function that computes, such as tokenization or rendering, off the event loop."""
        return await asyncio.wrap_future(self._threads.submit(function, *args, **keywords))

    async def in_thread_for(
        self,
        messages: Sequence[Any],
        function: Callable[P, T],
        *args: P.args,
        **keywords: P.kwargs,
    ) -> T:
        """Call a function that encodes these messages: those with images, which take long, one by one.

        So texts of other requests never wait for pictures.
        """
        threads = self._image_thread if has_images(messages) and self.frontend.sees else self._threads
        return await asyncio.wrap_future(threads.submit(function, *args, **keywords))

    def new_request(self, handle: ServerRequest, prompt: Encoded, params: SamplingParams) -> NewRequest:
        """Return the engine's request for a prompt. Raises RequestError when it can never run.

        Its id is a number, whatever the client calls its own.
        """
        if tenant := handle.tenant:
            salt = f"{tenant}:{prompt.cache_salt}" if self.config.cache_per_key else prompt.cache_salt
            prompt = replace(prompt, tenant=tenant, cache_salt=salt)
        if handle.adapter:
            prompt = replace(prompt, adapter=handle.adapter)
        number = str(next(self._numbers))
        request = self.frontend.request(prompt, params, request_id=number, arrival_s=handle.arrival_s)
        self.engine.status.facts.limits.check(request)
        return request

    def take_several(self, replicas: Several) -> None:
        """Note that the engine is several."""
        self.replicas = replicas
        self.metrics.watch_router(replicas.decisions)

    def take_report(self, report: StepReport) -> None:
        """Take in the report of a step of the engine."""
        self.metrics.of(report.replica).step(report)
        self.forecast.take_report(report)
        if self.feed is not None and (self.replicas is None or report.replica == self.first):
            self.feed.take_report(report)

    def tag(self, request_id: str) -> str:
        """Return what those who watch see in place of a request's id in the engine."""
        return hashlib.blake2b(request_id.encode(), key=self._tag_key, digest_size=4).hexdigest()

    def prompt_started(self, request: NewRequest, num_cached_tokens: int | None) -> None:
        """Note that a prompt has left the queue: with its first output, or (None) aborted."""
        num_tokens = len(request.prompt_token_ids)
        self.num_queued_requests -= 1
        self.num_queued_tokens -= num_tokens
        if num_cached_tokens is not None:
            self.forecast.started(num_tokens, num_cached_tokens)
        self._queue_s += 0.1 * (time.monotonic() - request.arrival_s - self._queue_s)

    def close(self) -> None:
        """Stop the threads and the process that renders templates."""
        for threads in (self._threads, self._image_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        self.frontend.close()
        if self.spans is not None:
            self.spans.close()


def served_names(config: ServerConfig, model: str) -> tuple[str, ...]:
    """Return the names of the model: the configured ones, or its hub id, or the name of its folder.

    Patterns are not names: where only patterns are configured, the model's own name is served as well.
    """
    if names := tuple(name for name in config.served_model_name if not _is_pattern(name)):
        return names
    path = user_path(model)
    return (path.resolve().name if path.exists() and model != "demo" else model,)


def patterns_of(config: ServerConfig) -> tuple[str, ...]:
    """Return the patterns among the names that are configured."""
    return tuple(name for name in config.served_model_name if _is_pattern(name))


def is_served(name: str, names: Collection[str], patterns: Iterable[str]) -> bool:
    """Return True if a name is one of these, or matches one of the patterns."""
    if name in names:
        return True
    return 0 < len(name) <= MAX_MODEL_NAME and any(_matches(name, pattern) for pattern in patterns)


def _is_pattern(name: str) -> bool:
    return "*" in name


def _matches(name: str, pattern: str) -> bool:
    """In a pattern, * stands for any characters, and all others for themselves."""
    return fnmatchcase(name, pattern.replace("[", "[[]").replace("?", "[?]"))
