"""One HTTP request from its arrival to its end: its place in the queue, its prompts, its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import EngineDead, Overloaded, QuireError
from quire.frontend import Encoded
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.body import LARGE_BYTES, MAX_BODY_BYTES, parse, too_large
from quire.server.errors import report, response_for
from quire.server.prompt_run import PromptRun
from quire.server.service import DRAIN_RETRY_S, ServiceState
from quire.server.timings import delivery_ms, logged, receipt_ms, server_timing
from quire.types import NewRequest, Output

MANY_TOKENS = 1 << 15  # of prompts: from here on they are checked in a thread, not on the event loop
MANY_PROMPTS = SUBMITTED_AT_ONCE = 32
MANY_ENTRIES = 2048  # log-probabilities: more are serialized in a thread
MAX_UPLOADS_BYTES = 16 * MAX_BODY_BYTES  # of all request bodies in transit
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class ServerRequest:
    """The handle of one HTTP request: admission, abort, events. Whatever it started ends with it.

    The middleware below creates it and calls `serve`. An endpoint reads its body with `read`, hands prompts
    in with `submit`, and iterates over it. A request holds a place in the queue for itself from the end of
    its body, and one for each of its prompts until that has its first output.
    """

    def __init__(self, service: ServiceState, tenant: str = "") -> None:
        self.service, self.tenant = service, tenant
        self.adapter = ""  # of its prompts
        self.arrival_s = time.monotonic()
        self.end_s: float | None = None
        self.prompts: list[PromptRun] = []
        self.failure: Exception | None = None  # reported to the client in place of an end
        self._num_held = 0  # places in the queue that no prompt has taken over
        self._num_body_bytes = 0
        self._ended: Exception | None = None
        self._closed = False

    # Admission

    def enter_queue(self, num_requests: int = 1, num_tokens: int = 0, timely: bool = True) -> None:
        """Take places in the queue. Raises Overloaded when it is full, or not `timely` as asked for."""
        self.service.check_queue(num_requests, num_tokens, timely)
        self.service.num_queued_requests += num_requests
        self.service.num_queued_tokens += num_tokens
        self._num_held += num_requests

    def leave_queue(self) -> None:
        """Give back the places that no prompt has taken over."""
        self.service.num_queued_requests -= self._num_held
        self._num_held = 0

    async def submit(self, prompts: Sequence[Encoded], params: Sequence[SamplingParams]) -> None:
        """Hand prompts to the engine, all or none.

        Raises Overloaded, EngineDead, or RequestError for a request that can never run.
        """
        service = self.service
        if (problem := service.engine.healthy(time.monotonic())) is not None:
            raise EngineDead(problem, "send the request again in a moment")
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.leave_queue()
        self.enter_queue(len(prompts), num_tokens)
        requests: list[NewRequest] = []
        try:
            build = service.new_request
            many = num_tokens > MANY_TOKENS or len(prompts) > MANY_PROMPTS
            pairs = zip(prompts, params, strict=True)
            if many or any(own.structured_outputs or own.bad_words for own in params):
                requests = await service.in_thread(lambda: [build(self, *pair) for pair in pairs])
            else:
                requests = [build(self, *pair) for pair in pairs]
            for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True), 1):
                if number % SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # let other requests have the event loop
                stream = service.engine.submit(request)
                self.prompts.append(PromptRun(request, prompt, service.frontend.tokenizer, stream))
                self._num_held -= 1
        except BaseException:
            service.num_queued_tokens -= sum(len(one.token_ids) for one in prompts[len(self.prompts) :])
            self.close()
            raise

    # Events

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (index of the prompt, its output) whenever one has advanced; its deltas are new.

        Raises GenerationFailed or RequestError when a sequence fails, EngineDead when the engine does.
        """
        try:
            if len(self.prompts) == 1:
                prompt = self.prompts[0]
                while not prompt.finished:
                    yield await self._advance(0, await prompt.stream.get())
            else:
                async for index, outputs in self._merged():
                    if not self.prompts[index].finished:
                        yield await self._advance(index, outputs)
            self.end_s = time.monotonic()
        except Exception as error:
            self.failure = error
            if self._ended is not None and isinstance(error, QuireError):
                self.failure = self._ended
                raise self._ended from None
            raise
        finally:
            self.close()

    async def _advance(self, index: int, outputs: list[Output]) -> tuple[int, RequestOutput]:
        prompt = self.prompts[index]
        self._start(prompt, outputs[0].num_cached_tokens)
        num_entries = sum(len(p) for output in outputs for p in (*output.prompt_logprobs, *output.logprobs))
        metrics = self.service.metrics.of(prompt.stream.replica)
        await offloaded(num_entries, prompt.take, outputs, time.monotonic(), metrics)
        return index, prompt.output

    async def _merged(self) -> AsyncIterator[tuple[int, list[Output]]]:
        """Yield outputs of all prompts in the order in which they come."""
        news: asyncio.Queue[tuple[int, list[Output] | Exception]] = asyncio.Queue()

        async def pump(index: int, prompt: PromptRun) -> None:
            num_open = prompt.request.params.num_sequences
            try:
                while num_open:
                    outputs = await prompt.stream.get()
                    num_open -= sum(output.finish_reason is not None for output in outputs)
                    news.put_nowait((index, outputs))
            except Exception as error:
                news.put_nowait((index, error))

        tasks = [asyncio.create_task(pump(i, prompt)) for i, prompt in enumerate(self.prompts)]
        try:
            while not all(prompt.finished for prompt in self.prompts):
                index, outputs = await news.get()
                if isinstance(outputs, Exception):
                    raise outputs
                yield index, outputs
        finally:
            for task in tasks:
                task.cancel()

    def _start(self, prompt: PromptRun, num_cached_tokens: int | None = None) -> None:
        """Note that a prompt has left the queue: its first output has come, or (None) it was aborted."""
        if prompt.is_queued:
            prompt.is_queued = False
            self.service.prompt_started(prompt.request, num_cached_tokens)

    def timings(self) -> dict[str, float | int]:
        """Return milliseconds from the arrival of the HTTP request, and counts of tokens.

        Of several prompts, deliveries are those of the slowest in each respect, `replica` (where there are
        several) that of the first, other times those of the choice that ends last; counts are sums so far.
        """
        end_s = self.end_s or time.monotonic()
        prompts = [(one.output, one.deliveries) for one in self.prompts]
        times: dict[str, float] = {}
        if prompts:
            gaps = [delivery_ms(*one, self.arrival_s, end_s) for one in prompts]
            times = {name: max(one[name] for one in gaps) for name in gaps[0]}
            times |= receipt_ms(prompts, self.arrival_s, end_s)
            if self.service.replicas is not None:
                times["replica"] = self.prompts[0].stream.replica
        outputs = [one.output for one in self.prompts]
        num_prompt = sum(len(one.prompt_token_ids) for one in outputs)
        num_cached = sum(one.num_cached_tokens for one in outputs)
        sequences = [sequence for output in outputs for sequence in output.outputs]
        metrics = [one.metrics for one in sequences if one.metrics is not None]
        return {name: round(value, 3) for name, value in times.items()} | {
            "prompt_tokens": num_prompt,
            "cached_tokens": num_cached,
            "computed_tokens": num_prompt - num_cached,
            "completion_tokens": sum(len(sequence.token_ids) for sequence in sequences),
            "drafted_tokens": sum(one.num_drafted for one in metrics),
            "accepted_tokens": sum(one.num_accepted for one in metrics),
            "preemptions": sum(one.num_preemptions for one in metrics),
            "continuations": sum(one.num_continuations for one in metrics),
        }

    @property
    def fingerprint(self) -> str:
        return "+".join(dict.fromkeys(one.stream.fingerprint for one in self.prompts))

    # The end

    def end(self, error: Exception) -> None:
        """Abort what runs, and report this error to the client."""
        self._ended = error
        for prompt in self.prompts:
            prompt.stream.abort()

    def close(self) -> None:
        """Abort what still runs and leave the queue. The engine frees blocks with its next step."""
        if self._closed:
            return
        self._closed = True
        self.leave_queue()
        for prompt in self.prompts:
            self._start(prompt)
            if not prompt.finished:
                prompt.stream.abort()
            if (first_s := prompt.deliveries.first_s) is not None:
                self.service.forecast.ended(prompt.deliveries.last_s - first_s)
            metrics = self.service.metrics.of(prompt.stream.replica)
            metrics.request_finished(prompt.request, prompt.output, self.failure is not None)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run an ASGI application that answers this request, and cancel it when the client leaves.

        So no endpoint needs to watch for that, whatever it waits for.
        """
        task, left, ended = asyncio.current_task(), asyncio.Event(), False
        watcher: asyncio.Task[None] | None = None

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not ended and task is not None:
                left.set()
                task.cancel()

        async def receive_body() -> Message:
            nonlocal watcher
            if watcher is not None:
                await left.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            self._count_body(len(message.get("body", b"")))
            if message["type"] == "http.disconnect":
                left.set()
            elif not message.get("more_body"):
                self._forget_body()
                watcher = asyncio.create_task(watch())
            return message

        async def send_on(message: Message) -> None:
            nonlocal ended
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            if message["type"] == "http.response.start" and self.prompts:
                timing = server_timing(self.timings(), all(one.finished for one in self.prompts))
                headers = MutableHeaders(scope=message)
                headers["server-timing"] = timing
                headers["x-quire-tag"] = self.service.tag(self.prompts[0].request.request_id)
            await send(message)

        self.service.requests.add(self)
        try:
            await app(scope, receive_body, send_on)
        except (ClientDisconnect, asyncio.CancelledError):
            if not left.is_set():
                raise
        finally:
            if watcher is not None:
                watcher.cancel()
                watcher = None  # else its traceback would hold this frame, and this frame the watcher
            self._forget_body()
            self.close()
            self.service.requests.discard(self)
            self._report(scope)
            scope["state"].pop("handle", None)

    def _count_body(self, num_bytes: int) -> None:
        """Bound bodies in transit, whatever their headers say."""
        self._num_body_bytes += num_bytes
        self.service.num_uploading_bytes += num_bytes
        if self._num_body_bytes > MAX_BODY_BYTES:
            raise too_large()
        if self.service.num_uploading_bytes > MAX_UPLOADS_BYTES:
            raise Overloaded("too many large requests are being uploaded")

    def _forget_body(self) -> None:
        self.service.num_uploading_bytes -= self._num_body_bytes
        self._num_body_bytes = 0

    def _report(self, scope: Scope) -> None:
        """Give the log and the trace what they may say of this request."""
        if not self.prompts:
            return
        if self.service.spans is not None:
            self.service.spans.record(scope, self)
        state = scope["state"]
        timings = self.timings()
        state["tokens"] = (timings["prompt_tokens"], timings["completion_tokens"])
        state["times"] = logged(timings)
        if self.failure is not None:
            state["error"] = report(self.failure).message
        if self.service.config.log_prompts:
            outputs = [prompt.output for prompt in self.prompts]
            state["prompt"] = "\n".join(output.prompt or "" for output in outputs)
            state["answer"] = "\n".join(sequence.text for output in outputs for sequence in output.outputs)


class RequestMiddleware:
    """ASGI middleware that gives each request with a body its ServerRequest: scope["state"]["handle"]."""

    def __init__(self, app: ASGIApp, service: ServiceState) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
        elif self._service.refusing:
            self._service.metrics.rejected("draining")
            refusal = Overloaded("the server is shutting down", "ask again", DRAIN_RETRY_S)
            await response_for(refusal, scope["path"])(scope, receive, send)
        else:
            handle = scope["state"]["handle"] = ServerRequest(self._service, scope["state"]["tenant"])
            await handle.serve(self._app, scope, receive, send)


def handle_of(request: Request) -> ServerRequest:
    """Return the handle of a POST."""
    handle: ServerRequest = request.state.handle
    return handle


async def read(
    request: Request,
    type_: type[S],
    convert: Callable[[S], Any] = lambda asked: None,
    *,
    queued: bool = True,
    timely: bool = True,
) -> tuple[S, list[str], Any]:
    """Return the body as a `type_`, the field names in it that the type does not know, and `convert(body)`.

    If it is `queued`, and so asks for work, a full queue refuses before the body is read; if it is `timely`,
    as what has a first token, so does one that is too long for the goal. Raises Overloaded, or RequestError,
    with `param`, for a body that is not JSON, not an object, or does not match the type.
    """
    handle = handle_of(request)
    if queued:
        handle.service.check_queue(timely=timely)
    body = b"".join([piece async for piece in request.stream()])  # request.body() would keep it
    if queued:
        handle.enter_queue(timely=timely)

    def parsed() -> tuple[S, list[str], Any]:
        asked, unknown = parse(body, type_)
        return asked, unknown, convert(asked)

    return await handle.service.in_thread(parsed) if len(body) >= LARGE_BYTES else parsed()


async def offloaded(num_entries: int, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that goes through so many log-probabilities: in a thread, if they are many."""
    if num_entries > MANY_ENTRIES:
        return await asyncio.to_thread(function, *args, **keywords)
    return function(*args, **keywords)
