"""Time that counts: without the minutes in which the machine, or this process, stood still."""

from __future__ import annotations

import asyncio
import time

PAUSE_S = 5.0  # nobody has looked at the clock for so long: someone looks at least every two seconds


class Clock:
    """Seconds since the start. To be looked at often: a long time between two looks does not count."""

    def __init__(self) -> None:
        self.pauses: list[tuple[float, float]] = []  # (when it ended, by time.perf_counter; seconds)
        self._begin_s = self._last_s = time.perf_counter()

    @property
    def lost_s(self) -> float:
        """All that does not count."""
        return sum(seconds for _, seconds in self.pauses)

    def now_s(self) -> float:
        """The seconds that count."""
        now_s = time.perf_counter()
        if now_s - self._last_s > PAUSE_S:
            self.pauses.append((now_s, now_s - self._last_s))
        self._last_s = now_s
        return now_s - self._begin_s - self.lost_s

    def stood_still(self, begin_s: float, end_s: float) -> bool:
        """Return True if that happened between two moments of time.perf_counter."""
        self.now_s()
        return any(begin_s <= at_s and at_s - seconds <= end_s for at_s, seconds in self.pauses)

    async def watch(self) -> None:
        """Look at it for ever."""
        while True:
            self.now_s()
            await asyncio.sleep(1.0)
