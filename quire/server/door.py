"""The door: while the queue is full, requests are turned away by a look at their heads, past all layers.

Under overload most requests end here, while the engine keeps every core and its caches busy. Code that runs
now and then comes from memory then, so what counts is how little of it a refusal runs.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from starlette.types import Scope

from quire.errors import Overloaded
from quire.server.connection import Refusal
from quire.server.errors import written
from quire.server.exchange import GENERATING
from quire.server.limits import Check
from quire.server.logs import id_headers, request_id_of
from quire.server.service import ServiceState

LONGEST_HEAD = 8192  # bytes that the door looks at
TOLD_S = 1.0  # between two lines of the log, as there may be thousands of refusals
_HEAD = re.compile(
    rb"POST (?P<path>/[a-z0-9/]{1,40}) HTTP/1\.1\r\n"
    rb"(?P<headers>(?:[-!#$%&'*+.^_`|~0-9A-Za-z]+:[^\x00-\x1f\x7f]*\r\n){1,64})\r\n"
)
_UNUSUAL = frozenset({b"expect", b"origin", b"transfer-encoding", b"upgrade"})
_LENGTH = re.compile(rb"[0-9]{1,10}")
_LOG = logging.getLogger("quire.server.http")


class Door:
    """Refuses what finds no room, if its head is plain and no check has another reason to refuse it.

    All else goes the long way, where it is refused as well, or not: by h11 what is not proper HTTP, by its
    name what has no key, with headers for its browser what comes from one.
    """

    def __init__(self, serving: ServiceState, checks: Sequence[Check]) -> None:
        self._serving = serving
        self._checks = checks
        self._untold: Counter[str] = Counter()  # refusals by what there is too much of

    def refusal(self, data: bytes) -> Refusal | None:
        """For what begins with `data`, or None if it is not for the door to refuse."""
        crowd = self._serving.crowd()
        if crowd is None or self._serving.refusing or (found := _read(data)) is None:
            return None
        scope, num_to_come = found
        if num_to_come < 0 or any(check(scope) is not None for check in self._checks):
            return None
        full = self._serving.overloaded(crowd)
        self._count(scope["path"], crowd.of)
        head, body = _words(full.message, full.hint, full.retry_after_s, scope["path"])
        request_id = request_id_of(scope)
        named = "".join(f"{name}: {request_id}\r\n" for name in id_headers(scope["path"])).encode()
        return Refusal(b"%b%b\r\n%b" % (head, named, body), num_to_come)

    def _count(self, path: str, of: str) -> None:
        self._serving.metrics.http("POST", path, 503)
        if not self._untold:
            asyncio.get_running_loop().call_later(TOLD_S, self._tell)
        self._untold[of] += 1

    def _tell(self) -> None:
        for of, count in self._untold.items():
            _LOG.info("turned away", extra={"fields": {"status": 503, "too_many": of, "requests": count}})
        self._untold.clear()


def _read(data: bytes) -> tuple[Scope, int] | None:
    """What a plain head says, as far as checks ask for it, and how many bytes are missing after it."""
    head = _HEAD.match(data, 0, LONGEST_HEAD)
    if head is None or (path := head["path"].decode()) not in GENERATING:
        return None
    headers = []
    for line in head["headers"].split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        headers.append((name.lower(), value.strip()))
    lengths = [value for name, value in headers if name == b"content-length"]
    is_unusual = any(
        name in _UNUSUAL or (name == b"connection" and value.lower() != b"keep-alive")
        for name, value in headers
    )
    if is_unusual or len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
        return None
    scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "state": {}}
    return scope, int(lengths[0]) - (len(data) - head.end())


@lru_cache(64)
def _words(message: str, hint: str | None, retry_after_s: int, path: str) -> tuple[bytes, bytes]:
    return written(Overloaded(message, hint, retry_after_s), path)
