"""Simulated clients: the requests of a load reach the engine at their moments, and outputs reach the clients.

What a client of the server sees is later than what the engine does, by delays that calibration measures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.bench.metrics import Timeline
from quire.bench.workload import Request
from quire.errors import RequestError
from quire.routing.scaling import Observed
from quire.sampling_params import SamplingParams
from quire.simulation.runner import TOKEN_ID
from quire.types import NewRequest, Output


class Delays(NamedTuple):
    """Time between a client and the engine, in seconds.

    `request_s`: from sending a request until the engine has it. `output_s`: for each output of a step up to
    its own, from the end of the step until the client has it.
    """

    request_s: float = 0.0
    output_s: float = 0.0


class Bounds(NamedTuple):
    """Bounds of a load and of the server's queue; None: no bound.

    Clients have at most `max_concurrency` requests open and send none after `until_s`. The server refuses a
    request when `max_queued_requests`, or `max_queued_tokens` of prompts, wait for their first token; for
    several replicas, that many for each.
    """

    max_concurrency: int | None = None
    until_s: float | None = None
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


NO_DELAYS, NO_BOUNDS = Delays(), Bounds()


class Clients:
    """All clients of a run.

    An open loop (`is_open`) sends each request at its moment, a closed loop when an earlier one has ended.
    """

    def __init__(
        self, requests: Iterable[Request], delays: Delays, bounds: Bounds, *, is_open: bool = True
    ) -> None:
        self.timelines: list[Timeline] = []  # in the order of sending
        self._requests: Iterator[Request] = iter(requests)
        self._next: Request | None = next(self._requests, None)
        self._delays, self._bounds, self._is_open = delays, bounds, is_open
        self._open: dict[str, Timeline] = {}
        self._num_queued = self._num_queued_tokens = 0
        self._num_prompt_tokens = self._num_started = self._num_cached_tokens = 0  # since the start
        self._num_ended = self._num_output_tokens = 0
        self._places: list[float] | None = None  # a heap: since when there is room for one more request
        if bounds.max_concurrency is not None:
            self._places = [0.0] * bounds.max_concurrency

    @property
    def num_open(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._open)

    def have_ended(self, count: int) -> bool:
        """Return True if the first `count` requests have ended."""
        return len(self.timelines) >= count and all(one.end_s for one in self.timelines[:count])

    @property
    def next_s(self) -> float | None:
        """When the next request reaches the engine; None if none will before another has ended."""
        sent_s = self._next_sent_s()
        return None if sent_s is None else sent_s + self._delays.request_s

    def _next_sent_s(self) -> float | None:
        if self._next is None or self._places == []:
            return None
        sent_s = self._places[0] if self._places else 0.0
        if self._is_open:
            sent_s = max(sent_s, self._next.at_s)
        until_s = self._bounds.until_s
        return None if until_s is not None and sent_s > until_s else sent_s

    def take(self) -> NewRequest:
        """Send the next request; return it as it reaches the engine at `next_s`."""
        request, sent_s = self._next, self._next_sent_s()
        assert request is not None
        assert sent_s is not None
        if self._places is not None:
            heapq.heappop(self._places)
        self._next = next(self._requests, None)
        prompt = tuple([one for one in request.content if isinstance(one, int)])
        if len(prompt) < len(request.content):
            raise TypeError("a simulated prompt is token ids")
        timeline = Timeline(sent_s, request.at_s if self._is_open else None)
        timeline.num_prompt_tokens = len(prompt)
        self._num_prompt_tokens += len(prompt)
        name = str(len(self.timelines))
        self.timelines.append(timeline)
        self._open[name] = timeline
        params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
        return NewRequest(name, prompt, params, sent_s + self._delays.request_s)

    def queue(self, new: NewRequest, num_replicas: int = 1) -> bool:
        """Take a place in the server's queue for a request; False, and its end, if the queue is full."""
        factor = max(num_replicas, 1)
        most, most_tokens = self._bounds.max_queued_requests, self._bounds.max_queued_tokens
        num_tokens = len(new.prompt_token_ids)
        full = most is not None and 0 < self._num_queued > factor * most - 1
        if most_tokens is not None and self._num_queued_tokens:
            full = full or self._num_queued_tokens + num_tokens > factor * most_tokens
        if full:
            self._end(new.request_id, new.arrival_s, "the queue is full").is_rejected = True
            return False
        self._num_queued += 1
        self._num_queued_tokens += num_tokens
        return True

    def refuse(self, new: NewRequest, error: RequestError) -> None:
        """End a request that the engine does not accept."""
        self._leave_queue(self._end(new.request_id, new.arrival_s, error.message))

    def receive(self, outputs: Sequence[Output], now_s: float) -> None:
        """Pass the outputs of a step that ended now to their clients."""
        opened, at_s, each_s = self._open, now_s, self._delays.output_s
        for output in outputs:
            at_s += each_s
            timeline = opened[output.request_id]
            if not timeline.chunk_s:
                self._leave_queue(timeline)
                self._num_started += 1
                self._num_cached_tokens += output.num_cached_tokens
                timeline.num_cached_tokens = output.num_cached_tokens
            timeline.chunk_s.append(at_s)
            if output.finish_reason is not None:
                timeline.num_output_tokens = len(timeline.chunk_s)
                self._num_ended += 1
                self._num_output_tokens += timeline.num_output_tokens
                self._end(output.request_id, at_s, output.error.message if output.error else "")

    def resume(self, new: NewRequest) -> NewRequest:
        """Return an open request as another replica continues it: with the tokens that its client has."""
        num_tokens = len(self._open[new.request_id].chunk_s)
        return replace(new, resumed=((TOKEN_ID,) * num_tokens,)) if num_tokens else new

    def observed(self, now_s: float, num_ready: int, starting_s: tuple[float, ...]) -> Observed:
        """Return the load as a scaler sees it."""
        return Observed(
            now_s,
            num_ready,
            starting_s,
            len(self.timelines),
            self._num_prompt_tokens,
            self._num_started,
            self._num_cached_tokens,
            self._num_ended,
            self._num_output_tokens,
            len(self._open),
            self._num_queued,
            self._num_queued_tokens,
        )

    def _leave_queue(self, timeline: Timeline) -> None:
        self._num_queued -= 1
        self._num_queued_tokens -= timeline.num_prompt_tokens

    def _end(self, name: str, at_s: float, error: str) -> Timeline:
        timeline = self._open.pop(name)
        timeline.end_s, timeline.error = at_s, error
        if self._places is not None:
            heapq.heappush(self._places, at_s)
        return timeline
