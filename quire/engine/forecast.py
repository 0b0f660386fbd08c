"""Forecasts of the time to first token, by the law of the time of steps and what the queue holds."""

from __future__ import annotations

from typing import NamedTuple

from quire.config import EngineConfig
from quire.engine.budget import Budget
from quire.engine.status import EngineStatus, StepReport
from quire.engine.step_law import StepLaw

_SMOOTHING = 0.1
_CONTEXT_GRAIN = 128  # tokens, by which mean contexts are rounded


class Work(NamedTuple):
    """Requests that have no first token yet: the tokens of their prompts to be computed, and those cached."""

    num_requests: int
    num_tokens: float
    num_cached_tokens: float = 0.0

    def __add__(self, other: Work) -> Work:  # type: ignore[override]  # sums, not a longer tuple
        return Work(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def __sub__(self, other: Work) -> Work:
        return Work(self[0] - other[0], self[1] - other[1], self[2] - other[2])


class Forecast:
    """Predicts when a request would get its first token, from reports of steps and of requests.

    The caller keeps the queue. Two things take time: computing the prompts ahead and its own, as many tokens
    a step as the engine computes beside those that generate; and waiting for a slot, which each sequence
    holds for as long as those before it did. The longer of the two is the prediction, if
    there is a law.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._budget = Budget(config.max_num_batched_tokens, config.max_num_prefill_tokens, config.itl_goal)
        self._max_num_seqs = config.max_num_seqs
        self._num_computed = 0.0  # tokens of prompts that have no output yet
        self._cached_share = 0.0  # of the tokens of prompts
        self._generating_s = 0.0  # mean time from the first token of a request to its end
        self._num_ended = 0
        self._most: tuple[StepLaw, int, int] | None = None  # law, context, sequences

    @property
    def is_calibrated(self) -> bool:
        """True once the law of the engine's steps was measured, not only assumed."""
        return self._budget.law is not None and self._budget.law.tail > 0

    def take_report(self, report: StepReport) -> None:
        """Take in the report of a step."""
        if report.law is not None:
            self._budget.law = report.law
        if (record := report.record) is not None and record.num_tokens > record.num_rows:
            self._num_computed += record.num_tokens - record.num_rows + 1  # as if one row were a chunk

    def started(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Note the first output of a prompt of so many tokens."""
        self._cached_share += _SMOOTHING * (num_cached_tokens / num_tokens - self._cached_share)
        self._num_computed = max(0.0, self._num_computed - (num_tokens - num_cached_tokens))

    def ended(self, generating_s: float) -> None:
        """Note the end of a request, so long after its first token."""
        self._num_ended += 1
        weight = max(_SMOOTHING, 1 / self._num_ended)
        self._generating_s += weight * (generating_s - self._generating_s)

    def uncached(self, num_requests: int, num_tokens: int) -> Work:
        """Return the work of requests of which it is not known how much of their prompts is cached."""
        return Work(num_requests, num_tokens * (1.0 - self._cached_share))

    def ttft_s(
        self, queued: Work, new: Work, num_running: int, context: int, num_engines: int = 1
    ) -> tuple[float, float] | None:
        """Return the time to first token of new requests, and what it would be with nothing queued.

        `num_running` sequences run, with `context` tokens each. Of several engines each has its share.
        """
        law = self._budget.law
        if law is None:
            return None
        if not queued.num_requests:
            self._num_computed = 0.0
        context = context // _CONTEXT_GRAIN * _CONTEXT_GRAIN + _CONTEXT_GRAIN // 2
        waiting = queued._replace(num_tokens=max(0.0, queued.num_tokens - self._num_computed))
        if num_engines > 1:
            num_running //= num_engines
            waiting = Work(waiting.num_requests // num_engines, waiting.num_tokens / num_engines)
        num_generating = max(0, num_running - bool(waiting.num_tokens))
        num_slots = max(1, num_running, self._num_slots(law, context))
        later = min(num_slots, num_generating + waiting.num_requests)  # as the queue is worked off
        alone_s = self._prompts_s(law, new, num_generating, context)
        prompts_s = self._prompts_s(law, waiting + new, (num_generating + later) // 2, context)
        num_requests = waiting.num_requests + new.num_requests
        num_short = max(0, num_requests - max(0, num_slots - num_generating))
        slot_s = (self._generating_s + alone_s) * num_short / num_slots
        return max(prompts_s, slot_s + alone_s), alone_s

    def _prompts_s(self, law: StepLaw, work: Work, num_generating: int, context: int) -> float:
        """Return the time for computing prompts beside sequences that generate."""
        if work.num_tokens < 1:
            return 0.0
        rows = [(context, 1)] * num_generating
        middle = work.num_cached_tokens + work.num_tokens / 2  # attention is as if all were there
        start = int(middle / work.num_requests)
        num_tokens, time = self._budget.beside(rows)
        chunk = max(1, min(num_tokens - num_generating, int(work.num_tokens)))
        if time is not None:
            chunk = time.cut(start, chunk)
        found = law.plus(law.values(rows, num_generating), start, chunk, 1)
        return work.num_tokens / chunk * (law.seconds(found) + law.host_s)

    def _num_slots(self, law: StepLaw, context: int) -> int:
        """Return how many sequences the engine lets generate together."""
        if self._most is None or self._most[:2] != (law, context):
            _, time = self._budget.beside(())
            most = self._max_num_seqs
            if time is not None:
                most = next((count for count in range(most) if not time.admits(context)), most)
            self._most = law, context, most
        return self._most[2]


def mean_context(status: EngineStatus) -> int:
    """Return the mean number of tokens of a running sequence."""
    limits = status.facts.limits
    num_blocks = (status.num_blocks - status.num_free_blocks) // max(1, len(limits.groups))
    return num_blocks * limits.block_size // max(1, status.num_running)
