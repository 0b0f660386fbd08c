"""The run of a batch: bounded concurrency, retries after an engine restart, and progress display."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from quire.cli.batch_input import BatchRequest, LineError, items, read_ahead
from quire.cli.batch_output import OutputLine, OutputResponse, StreamOutput
from quire.cli.terminal import counted, note
from quire.outputs import drafts_in_words
from quire.progress import REFRESH_S, in_terminal, progress_bar

if TYPE_CHECKING:
    from quire.server.local import LocalServer, Reply

NOTE_S = 30.0  # between two progress notes, if standard error is not a terminal
LONG_S = 100  # longer durations are given in minutes


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0  # in responses


class _Timings(msgspec.Struct):
    decode_ms: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafting_saved_ms: float = 0.0


class _Answer(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)
    timings: _Timings = msgspec.field(default_factory=_Timings)


class _Failure(msgspec.Struct):
    error: dict[str, Any]


_ANSWER, _FAILURE = msgspec.json.Decoder(_Answer), msgspec.json.Decoder(_Failure)


@dataclass(slots=True)
class Tally:
    """Counts of lines. `total` is None for a pipe; `num_before` were answered by earlier runs."""

    total: int | None
    num_before: int = 0
    answered: int = 0
    skipped: int = 0
    failed: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_s: float = 0.0
    drafting_saved_s: float = 0.0
    first_error: str = ""
    begin_s: float = field(default_factory=time.monotonic)
    end_s: float | None = None

    @property
    def seen(self) -> int:
        return self.answered + self.skipped + self.failed

    @property
    def num_others(self) -> int:
        """The number of answers in the output to requests that are not in the input."""
        return self.num_before - self.skipped

    @property
    def seconds(self) -> float:
        return max((self.end_s or time.monotonic()) - self.begin_s, 1e-9)

    def fail(self, message: str) -> None:
        self.failed += 1
        self.first_error = self.first_error or message

    def earlier(self, num_errors: int) -> str:
        """Summarize the results of earlier runs."""
        errors = f", {counted(num_errors, 'error')} to retry" if num_errors else ""
        return f"{counted(self.num_before, 'request')} answered already{errors}"

    def rates(self) -> str:
        lines = (self.answered + self.failed) / self.seconds
        return f"{lines:,.1f} requests/s · {self.tokens / self.seconds:,.0f} tokens/s"

    def progress(self) -> str:
        """Summarize the progress in one line, for a log."""
        whole = f" of {self.total:,}" if self.total is not None else ""
        words = [f"{self.seen:,}{whole} requests", counted(self.failed, "error"), self.rates()]
        done = self.answered + self.failed
        if self.total is not None and done:
            left_s = (self.total - self.seen) * self.seconds / done
            words.append(f"{_duration(left_s)} left")
        return " · ".join(words)

    def summary(self) -> str:
        """Summarize this run."""
        words = [f"{counted(self.answered, 'request')} answered", counted(self.failed, "error")]
        if self.skipped:
            words.append(f"{self.skipped:,} skipped (answered before)")
        words += [counted(self.tokens, "output token"), _duration(self.seconds), self.rates()]
        if self.drafted:
            drafting = self.accepted, self.drafted, self.decode_s, self.drafting_saved_s
            words.append(drafts_in_words(*drafting))
        return " · ".join(words)

    def answer(self, answer: _Answer) -> None:
        """Count an answer."""
        usage, timings = answer.usage, answer.timings
        self.answered += 1
        self.tokens += usage.completion_tokens or usage.output_tokens
        self.drafted += timings.drafted_tokens
        self.accepted += timings.accepted_tokens
        self.decode_s += timings.decode_ms / 1e3
        self.drafting_saved_s += timings.drafting_saved_ms / 1e3


def _duration(seconds: float) -> str:
    if seconds < LONG_S:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


async def answer_all(
    server: LocalServer, file: BinaryIO, output: StreamOutput, tally: Tally, max_in_flight: int
) -> None:
    """Answer all requests of a file that the output does not answer yet.

    Raises EngineDead if the engine cannot be restarted, and OSError.
    """
    places = asyncio.Semaphore(max_in_flight)
    tally.begin_s = time.monotonic()

    async def start_all(tasks: asyncio.TaskGroup, show: Callable[[], None]) -> None:
        async for item in read_ahead(items(file, output.done)):
            if isinstance(item, BatchRequest):
                await places.acquire()
                tasks.create_task(answer(item, show))
            elif isinstance(item, LineError):
                output.write(_refused_line(item, tally))
                show()
            else:
                tally.skipped += 1

    async def answer(request: BatchRequest, show: Callable[[], None]) -> None:
        try:
            reply = await _reply(server, request)
        finally:
            places.release()
        output.write(_output_line(request, reply, tally))
        show()

    try:
        with _shown(tally) as show:
            async with asyncio.TaskGroup() as tasks:
                await start_all(tasks, show)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        tally.end_s = time.monotonic()


async def _reply(server: LocalServer, request: BatchRequest) -> Reply:
    """Send a request, again and again while the engine restarts or is in a long step.

    Raises EngineDead if it cannot be restarted.
    """
    while True:
        reply = await server.post(request.url, request.body)
        if reply.status == 200:
            return reply
        server.check_alive()
        if reply.status != 503:
            return reply
        await asyncio.sleep(float(reply.headers.get("retry-after", "1")))


def _output_line(request: BatchRequest, reply: Reply, tally: Tally) -> OutputLine:
    """Count a reply and return its line."""
    error = None
    if reply.status == 200:
        tally.answer(_ANSWER.decode(reply.body))
    else:
        error = {**_FAILURE.decode(reply.body).error, "line": request.line}
        tally.fail(f"line {request.line}: {error['message']}")
    body = msgspec.Raw(reply.body.replace(b"\n", b" "))  # JSON strings contain no raw newlines
    response = OutputResponse(reply.status, reply.headers.get("x-request-id", ""), body)
    return OutputLine(_new_id(), request.custom_id, response, error)


def _refused_line(refused: LineError, tally: Tally) -> OutputLine:
    """Count an invalid line and return the line that reports it."""
    tally.fail(refused.message)
    error = {"code": refused.code, "message": refused.message, "param": refused.param, "line": refused.line}
    return OutputLine(_new_id(), refused.custom_id, None, error)


def _new_id() -> str:
    return f"batch_req_{token_hex(12)}"


@contextmanager
def _shown(tally: Tally) -> Iterator[Callable[[], None]]:
    """Show progress on standard error: a bar in a terminal, else a note every NOTE_S."""
    if not in_terminal():
        last_s = time.monotonic()

        def log() -> None:
            nonlocal last_s
            if (now := time.monotonic()) - last_s >= NOTE_S:
                last_s = now
                note(tally.progress())

        yield log
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    words = TextColumn("{task.fields[rates]}")
    columns = (BarColumn(20), MofNCompleteColumn(), words, TimeRemainingColumn())
    with progress_bar(*columns) as bar:
        total = None if tally.total is None else max(tally.total - tally.num_before, 0)
        task, shown_s = bar.add_task("", total=total, rates=""), 0.0

        def advance() -> None:
            nonlocal shown_s
            if (now := time.monotonic()) - shown_s >= REFRESH_S:
                shown_s = now
                done = tally.answered + tally.failed
                rates = tally.rates().replace(" requests/s", "/s")
                bar.update(task, completed=done, rates=f"{counted(tally.failed, 'error')} · {rates}")

        yield advance
