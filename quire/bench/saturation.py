"""Detection of saturation: requests wait ever longer for a server that does not keep up with their rate."""

from __future__ import annotations

import time
from collections.abc import Iterable

from quire.bench.http_client import Client
from quire.bench.metrics import Timeline

SATURATED = 0.1  # seconds that the wait for the first token grows with each second of load
_WARM_UP = 0.25  # of the requests, which find the server emptier than it will be
_FEWEST = 8  # requests that a trend can be read from
# A run is hopeless if its trend is this, after this time, with the last requests waiting this long.
_HOPELESS, _HOPELESS_AFTER_S, _HOPELESS_WAIT_S = 0.3, 5.0, 2.0
_HOPELESS_FAILURES = 0.1  # of the requests that have ended


def wait_growth(timelines: Iterable[Timeline]) -> float:
    """Return the trend of TTFT over the time of sending, by least squares: seconds in each second.

    A server that serves only a share s of the arrivals has a trend of 1/s - 1, one that keeps up has 0.
    Requests without a first token are left out: the later they were sent, the less they have waited so far.
    """
    points = sorted((one.sent_s, one.chunk_s[0] - one.sent_s) for one in timelines if one.chunk_s)
    points = points[int(_WARM_UP * len(points)) :]
    if len(points) < _FEWEST:
        return 0.0
    mean_sent = sum(sent for sent, _ in points) / len(points)
    mean_wait = sum(wait for _, wait in points) / len(points)
    square = sum((sent - mean_sent) ** 2 for sent, _ in points)
    product = sum((sent - mean_sent) * (wait - mean_wait) for sent, wait in points)
    return product / square if square else 0.0


class SaturationWatch:
    """Ends a run when it is certain that the server is saturated or refuses requests."""

    def __init__(self, client: Client) -> None:
        self.timelines: list[Timeline] = []  # of all requests that were sent
        self._client = client

    def is_hopeless(self) -> bool:
        now_s = time.perf_counter()
        if not self.timelines or now_s - self.timelines[0].sent_s < _HOPELESS_AFTER_S:
            return False
        ended = [one for one in self.timelines if one.end_s]
        if sum(bool(one.error) for one in ended) > max(_HOPELESS_FAILURES * len(ended), _FEWEST):
            return True
        waits = (now_s - one.sent_s for one in self.timelines if not (one.chunk_s or one.error))
        return max(waits, default=0.0) > _HOPELESS_WAIT_S and wait_growth(self.timelines) > _HOPELESS

    def abandon(self) -> None:
        self._client.give_up()
