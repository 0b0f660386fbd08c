"""Operations on replicas that take long: one at a time, in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from quire.errors import Conflict, QuireError

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Operation:
    """An operation, and how it ended. `seconds` are None until then; `error` says why it failed."""

    what: str
    began_s: float = field(default_factory=time.monotonic)
    seconds: float | None = None
    error: str | None = None


class Operations:
    """Runs operations; `last` is the one that runs or ran last."""

    def __init__(self) -> None:
        self.last: Operation | None = None
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise Conflict while an operation runs."""
        if self.last is not None and self.last.seconds is None:
            raise Conflict(f"{self.last.what} has not ended", "GET /replicas tells when it has")

    def begin(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Run an operation in the background. Raises Conflict while another one does."""
        try:
            self.check()
        except Conflict:
            work.close()
            raise
        self.last = Operation(what)
        self._task = asyncio.create_task(self._run(self.last, work), name="operation on replicas")

    async def _run(self, operation: Operation, work: Coroutine[Any, Any, None]) -> None:
        _LOG.info("%s: begun", operation.what)
        try:
            await work
        except QuireError as error:
            operation.error = error.message
            _LOG.error("%s: %s", operation.what, error.message)
        except Exception:
            operation.error = "an unexpected error; the log has the details"
            _LOG.exception("%s failed", operation.what)
        else:
            _LOG.info("%s: done", operation.what)
        finally:
            operation.seconds = time.monotonic() - operation.began_s

    async def close(self) -> None:
        """End what runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
