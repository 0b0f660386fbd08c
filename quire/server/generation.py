"""Generation: what runs in the engine for one HTTP request, followed together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from quire.engine.client import Stream
from quire.errors import EngineDead, QuireError, RequestError
from quire.frontend import RequestReader
from quire.outputs import RequestOutput
from quire.server.metrics import Metrics
from quire.types import Failure, Output

MANY_ENTRIES = 2048  # log-probabilities: more are put into words beside the event loop
P = ParamSpec("P")
T = TypeVar("T")


class GenerationFailed(QuireError):
    """A request failed while it ran, alone: its numbers were none, or its grammar could not go on."""


@dataclass(slots=True)
class Part:
    """One prompt of the request: its stream from the engine, the text so far, and when things came."""

    reader: RequestReader
    stream: Stream
    queued: bool = True  # no output has come
    num_deliveries: int = 0
    first_s: float | None = None  # when the first token was here
    last_s: float = 0.0
    max_gap_s: float = 0.0

    @property
    def finished(self) -> bool:
        return self.reader.output.finished

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.reader.output.outputs)

    def take(self, outputs: list[Output], now: float, metrics: Metrics) -> None:
        """Read what came from the engine.

        Raises GenerationFailed for a choice that failed, RequestError where its parameters made it.
        """
        self.num_deliveries += 1
        num_tokens = sum(len(output.token_ids) for output in outputs)
        if self.first_s is None:
            metrics.first_tokens(self.reader.request, num_tokens, outputs[0].num_cached_tokens)
            self.first_s = now
        else:
            metrics.next_tokens(num_tokens, now - self.last_s)
            self.max_gap_s = max(self.max_gap_s, now - self.last_s)
        self.last_s = now
        for output in outputs:
            if self.reader.push(output):
                self.stream.abort(output.sequence)
            if output.finish_reason is not None:
                choice = self.reader.output.outputs[output.sequence]
                if choice.finish_reason == "error":
                    raise _raised(output.error or Failure("the request failed"))
                if choice.finish_reason == "abort":
                    raise EngineDead("the request was ended")


async def beside(num_entries: int, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that goes through so many log-probabilities: in a thread, if they are many."""
    if num_entries > MANY_ENTRIES:
        return await asyncio.to_thread(function, *args, **keywords)
    return function(*args, **keywords)


def _raised(failure: Failure) -> QuireError:
    return RequestError(failure.message) if failure.by_request else GenerationFailed(failure.message)


class Generation:
    """One HTTP request's prompts in the engine, one RequestReader each. Times count from `arrival_s`.

    Iterate over it, or await finish(). Whoever has one calls abort() in the end, whatever happened.
    `started` is called for each prompt when it waits no more: its first output is here, or it was aborted.
    """

    def __init__(
        self,
        request_id: str,
        arrival_s: float,
        parts: list[Part],
        metrics: Metrics,
        started: Callable[[Part], None],
    ) -> None:
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.parts = parts
        self.end_s: float | None = None
        self.failure: Exception | None = None  # what its client is told in place of an end
        self._metrics = metrics
        self._started = started
        self._ended: Exception | None = None
        self._closed = False

    @property
    def readers(self) -> list[RequestReader]:
        return [part.reader for part in self.parts]

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, its output) whenever one has advanced, deltas taken.

        Raises GenerationFailed or RequestError when a choice fails, EngineDead when the engine does.
        """
        try:
            if len(self.parts) == 1:
                part = self.parts[0]
                while not part.finished:
                    yield await self._advance(0, await part.stream.get())
            else:
                async for index, outputs in self._merged():
                    yield await self._advance(index, outputs)
            self.end_s = time.monotonic()
        except Exception as error:
            self.failure = error
            if self._ended is not None and isinstance(error, QuireError):
                self.failure = self._ended
                raise self._ended from None
            raise
        finally:
            self.abort()

    async def finish(self) -> list[RequestOutput]:
        """Wait for the end of all prompts."""
        async for _ in self:
            pass
        return [part.reader.output for part in self.parts]

    def abort(self) -> None:
        """End what still runs. The engine frees its blocks with its next step. Nothing, the second time."""
        if self._closed:
            return
        self._closed = True
        for part in self.parts:
            self._start(part)
            if not part.finished:
                part.stream.abort()
            failed = self.failure is not None
            self._metrics.request_finished(part.reader.request, part.reader.output, failed)

    def end(self, error: Exception) -> None:
        """Abort, and let whoever follows get this error."""
        self._ended = error
        for part in self.parts:
            part.stream.abort()

    async def _advance(self, index: int, outputs: list[Output]) -> tuple[int, RequestOutput]:
        part = self.parts[index]
        self._start(part)
        now = time.monotonic()
        positions = [p for output in outputs for p in (*output.prompt_logprobs, *output.logprobs)]
        await beside(sum(map(len, positions)), part.take, outputs, now, self._metrics)
        part.reader.take_deltas()
        return index, part.reader.output

    def _start(self, part: Part) -> None:
        if part.queued:
            part.queued = False
            self._started(part)

    async def _merged(self) -> AsyncIterator[tuple[int, list[Output]]]:
        """Outputs of all prompts, in the order in which they come."""
        news: asyncio.Queue[tuple[int, list[Output] | BaseException]] = asyncio.Queue()

        async def pump(index: int, part: Part) -> None:
            num_open = part.reader.request.params.num_sequences
            try:
                while num_open:
                    outputs = await part.stream.get()
                    num_open -= sum(output.finish_reason is not None for output in outputs)
                    news.put_nowait((index, outputs))
            except Exception as error:
                news.put_nowait((index, error))

        tasks = [asyncio.create_task(pump(i, part)) for i, part in enumerate(self.parts)]
        try:
            while not all(part.finished for part in self.parts):
                index, outputs = await news.get()
                if isinstance(outputs, BaseException):
                    raise outputs
                yield index, outputs
        finally:
            for task in tasks:
                task.cancel()

    def timings(self) -> dict[str, float | int]:
        """Milliseconds from the arrival of the HTTP request, and counts of tokens.

        Of several prompts, the slowest in each respect; counts are sums. Those of a request that has not
        ended say what is known so far.
        """
        times = [self.times(part) for part in self.parts]
        slowest = {name: round(max(one[name] for one in times), 3) for name in times[0]}
        outputs = [part.reader.output for part in self.parts]
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        choices = [choice for output in outputs for choice in output.outputs]
        return slowest | {
            "prompt_tokens": num_prompt,
            "cached_tokens": num_cached,
            "computed_tokens": num_prompt - num_cached,
            "completion_tokens": sum(len(choice.token_ids) for choice in choices),
            "preemptions": sum(c.metrics.num_preemptions for c in choices if c.metrics is not None),
        }

    def times(self, part: Part) -> dict[str, float]:
        """One prompt's, in milliseconds. A gap lies between two deliveries to this process."""
        now = self.end_s or time.monotonic()
        choices = part.reader.output.outputs
        first = part.first_s or now
        known = (choice.metrics.admitted_s for choice in choices if choice.metrics is not None)
        admitted = min((time_s for time_s in known if time_s is not None), default=first)
        num_tokens = max(len(choice.token_ids) for choice in choices)
        num_gaps = max(num_tokens, part.num_deliveries) - 1
        span = part.last_s - first if part.first_s else 0.0
        return {
            "queue_ms": (admitted - self.arrival_s) * 1e3,
            "prefill_ms": (first - admitted) * 1e3,
            "decode_ms": span * 1e3,
            "ttft_ms": (first - self.arrival_s) * 1e3,
            "mean_itl_ms": span / num_gaps * 1e3 if num_gaps > 0 else 0.0,
            "max_itl_ms": part.max_gap_s * 1e3,
            "total_ms": (now - self.arrival_s) * 1e3,
        }
