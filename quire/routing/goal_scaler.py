"""Scaling by the latency goal: as few replicas as are predicted to keep it when a new one would be ready.

The prediction is that of queueing theory with times from the law of steps: replicas compute the prompts that
wait in one line, as good routing makes it; how long one takes follows from how many others generate beside
it, which follows from the rate. So the number follows the load before anything waits, and the slack that it
leaves shrinks, relative to the load, where many replicas share the chance of arrivals.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.engine.budget import Budget
from quire.engine.step_law import StepLaw
from quire.routing.arrivals import Arrivals
from quire.routing.scaling import Highest, Observed

VIOLATIONS = 0.01  # the share of requests that may break the goal
MOST = 1 << 16  # replicas
FIXED_POINT_STEPS = 12
LEAST_SLACK = 0.1  # of the goal: where prompts alone take nearly all of it, no number of replicas helps


class LatencyGoal(NamedTuple):
    """Seconds that are not to be exceeded: to the first token (math.inf: no limit), and per token after it
    (0: no limit).
    """

    ttft_s: float
    tpot_s: float = 0.0


class Service(NamedTuple):
    """A replica under a steady load: times of a request, and how many generate at once."""

    prompt_s: float  # for computing a prompt, once it is its turn
    tpot_s: float
    num_generating: float


class ReplicaModel:
    """Predicts a replica under a steady load, by the law of its steps and the budget of its scheduler.

    At most `num_slots` sequences run at once, whose tokens are at most `num_cache_tokens` together.
    """

    def __init__(self, law: StepLaw, budget: Budget, num_slots: int, num_cache_tokens: int) -> None:
        self._law, self._budget = law, budget
        self._num_slots, self._num_cache_tokens = num_slots, num_cache_tokens

    def num_slots(self, num_prompt: float, num_output: float) -> int:
        """Return how many requests of such lengths can run at once."""
        fitting = int(self._num_cache_tokens / max(num_prompt + num_output / 2, 1.0))
        return max(1, min(self._num_slots, fitting))

    def service(self, rate: float, num_prompt: float, num_computed: float, num_output: float) -> Service:
        """Return what requests take that arrive at a rate, of whose prompts `num_computed` tokens are new."""
        context, most = int(num_prompt + num_output / 2), self.num_slots(num_prompt, num_output)
        generating, found = 0.0, Service(0.0, 0.0, 0.0)
        for _ in range(FIXED_POINT_STEPS):
            found = self._beside(min(generating, most), context, rate, num_computed)
            wanted = rate * num_output * found.tpot_s
            if abs(wanted - generating) < 0.01:
                break
            generating = (generating + wanted) / 2
        return found._replace(num_generating=rate * num_output * found.tpot_s)

    def _beside(self, generating: float, context: int, rate: float, num_computed: float) -> Service:
        """Return the times beside so many sequences that generate."""
        law, rows = self._law, [(context, 1)] * round(generating)
        num_tokens, time = self._budget.beside(rows)
        chunk = max(1, min(num_tokens - len(rows), int(num_computed)))
        start = int(num_computed / 2)
        if time is not None:
            chunk = time.cut(start, chunk)
        decoding = law.values(rows or [(context, 1)], max(len(rows), 1))
        step_s = law.seconds(decoding) + law.host_s
        mixed_s = law.seconds(law.plus(decoding, start, chunk, 1)) + law.host_s
        prompt_s = num_computed / chunk * mixed_s
        share = min(1.0, rate * prompt_s)  # of the time in which steps compute a chunk
        steps_share = share / mixed_s / (share / mixed_s + (1 - share) / step_s)
        return Service(prompt_s, steps_share * mixed_s + (1 - steps_share) * step_s, generating)


class GoalScaler:
    """As few replicas as are predicted to keep a latency goal for all but `VIOLATIONS` of the requests.

    It looks ahead as far as a new replica takes to start. What will wait then, because those that there are
    cannot compute it, is to be computed within the goal, or within the time of another start if that is
    longer. Fewer are wanted only after `hold_s` in which none of them was needed, and never fewer than the
    open requests fill. `most` are wanted where no number keeps the goal. The model and `start_up_s` may be
    replaced by better ones at any time.
    """

    def __init__(
        self,
        goal: LatencyGoal,
        model: ReplicaModel,
        *,
        start_up_s: float,
        most: int = MOST,
        interval_s: float = 5.0,
        hold_s: float = 180.0,
        violations: float = VIOLATIONS,
    ) -> None:
        self.interval_s = interval_s
        self.model, self.start_up_s = model, start_up_s
        self._goal, self._most = goal, most
        self._most_violations = violations
        self._arrivals = Arrivals()
        self._needed = Highest(hold_s)

    def target(self, observed: Observed) -> int:
        """Return the number of replicas that there should be, those that start included."""
        if self._needed.is_empty:
            self._needed.take(observed.at_s, observed.num_replicas)
        return self._needed.take(observed.at_s, self.needed(observed))

    def needed(self, observed: Observed) -> int:
        """Return the number that is needed for what is expected from now on."""
        self._arrivals.take(observed)
        rate, num_prompt, num_computed, num_output = expected = self._expected()
        num_slots = self.model.num_slots(num_prompt, num_output)
        count = max(1, -(-observed.num_open // num_slots))
        if not rate:
            return count
        while count < self._most and self.violations(count, *expected) > self._most_violations:
            count += max(1, count // 16)
        service = self.model.service(rate / count, num_prompt, num_computed, num_output)
        busy = rate * service.prompt_s  # replicas that compute prompts, on average
        waiting = observed.num_queued_tokens / max(num_prompt, 1.0) * service.prompt_s  # seconds of a replica
        left = waiting + (busy - observed.num_ready) * self.start_up_s
        return max(count, math.ceil(busy + max(0.0, left) / max(self._goal.ttft_s, self.start_up_s)))

    def expected_violations(self, count: int) -> float:
        """Return the share of requests that so many replicas are predicted to break the goal for."""
        expected = self._expected()
        return self.violations(count, *expected) if expected[0] else 0.0

    @property
    def expected_rate(self) -> float:
        """The requests a second that are expected when a new replica would be ready, at most."""
        return self._expected()[0]

    def _expected(self) -> tuple[float, float, float, float]:
        """Return rate, tokens of a prompt, those of them to compute, and tokens of an answer."""
        arrivals = self._arrivals
        rate = max(arrivals.rate(0.0), arrivals.rate(self.start_up_s + self.interval_s))
        num_prompt = arrivals.num_prompt_tokens
        num_computed = num_prompt * (1.0 - arrivals.cached_share)
        return rate + arrivals.uncertainty(), num_prompt, num_computed, max(arrivals.num_output_tokens, 1.0)

    def violations(
        self, count: int, rate: float, num_prompt: float, num_computed: float, num_output: float
    ) -> float:
        """Return the share of requests that break the goal, if they arrive at a rate at so many replicas."""
        goal, service = self._goal, self.model.service(rate / count, num_prompt, num_computed, num_output)
        if service.num_generating > self.model.num_slots(num_prompt, num_output):
            return 1.0
        if goal.tpot_s and service.tpot_s > goal.tpot_s:
            return 1.0
        if not service.prompt_s:
            return 0.0  # so far nobody told of a prompt
        slack_s = max(goal.ttft_s - service.prompt_s, LEAST_SLACK * goal.ttft_s)
        return waits_longer(count, rate * service.prompt_s, slack_s / service.prompt_s)


def waits_longer(count: int, busy: float, times: float) -> float:
    """Return the share of arrivals that wait longer than `times` their mean time of service (Erlang's C).

    They arrive at random, and wait in one line for `count` servers, of which `busy` are, on average.
    """
    if busy >= count:
        return 1.0
    blocked = 1.0  # Erlang's B, by its recursion
    for number in range(1, count + 1):
        blocked = busy * blocked / (number + busy * blocked)
    waiting = blocked / (1 - busy / count * (1 - blocked))
    return waiting * math.exp(-(count - busy) * times)
