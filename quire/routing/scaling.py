"""Scaling: how many replicas there should be. Pure: the same observations, the same answers.

One scaler runs in a simulation, in a Ray deployment, and wherever replicas can be added.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, Protocol


class Observed(NamedTuple):
    """The load on all replicas, as the router's side sees it.

    Counts of requests and tokens are since the start, but for the last three. Prompt tokens are counted when
    a request arrives; cached ones, of those, when it gets its first token; output tokens when it ends.
    `starting_s` are the times until the replicas that start will be ready.
    """

    at_s: float
    num_ready: int
    starting_s: tuple[float, ...] = ()
    num_arrived: int = 0
    num_prompt_tokens: int = 0
    num_started: int = 0
    num_cached_tokens: int = 0
    num_ended: int = 0
    num_output_tokens: int = 0
    num_open: int = 0  # now
    num_queued: int = 0  # now, without a first token
    num_queued_tokens: int = 0  # of their prompts

    @property
    def num_replicas(self) -> int:
        """Replicas that are ready or start."""
        return self.num_ready + len(self.starting_s)


class Scaler(Protocol):
    """Decides the number of replicas."""

    interval_s: float  # between two questions

    def target(self, observed: Observed) -> int:
        """Return the number of replicas that there should be, those that start included."""


class Highest:
    """The highest of the last values: what was needed lately is given up only when it was not for a while."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._values: deque[tuple[float, int]] = deque()  # falling

    @property
    def is_empty(self) -> bool:
        return not self._values

    def take(self, at_s: float, value: int) -> int:
        """Add a value; return the highest since `hold_s` ago."""
        values = self._values
        while values and values[-1][1] <= value:
            values.pop()
        values.append((at_s, value))
        while values[0][0] < at_s - self._hold_s:
            values.popleft()
        return values[0][1]


class QueueLengthScaler:
    """So many open requests for each replica, as Ray Serve and KEDA scale: what others do, for comparison.

    The number of open requests is averaged over `look_back_s`. More replicas are wanted once it was too high
    for `up_delay_s`, fewer once it was too low for `down_delay_s`.
    """

    def __init__(
        self,
        per_replica: float,
        *,
        interval_s: float = 10.0,
        look_back_s: float = 30.0,
        up_delay_s: float = 30.0,
        down_delay_s: float = 600.0,
    ) -> None:
        self.interval_s = interval_s
        self._per_replica, self._look_back_s = per_replica, look_back_s
        self._up_delay_s, self._down_delay_s = up_delay_s, down_delay_s
        self._seen: deque[tuple[float, int]] = deque()
        self._since: tuple[int, float] = 0, 0.0  # which way it has been wrong, and since when

    def target(self, observed: Observed) -> int:
        now_s, seen = observed.at_s, self._seen
        seen.append((now_s, observed.num_open))
        while seen[0][0] < now_s - self._look_back_s:
            seen.popleft()
        mean = sum([count for _, count in seen]) / len(seen)
        wanted, num_now = math.ceil(mean / self._per_replica), observed.num_replicas
        way = (wanted > num_now) - (wanted < num_now)
        if way != self._since[0]:
            self._since = way, now_s
        delay_s = self._up_delay_s if way > 0 else self._down_delay_s
        return wanted if way and now_s - self._since[1] >= delay_s else num_now
