"""Progress bars on standard error: for long operations, and only in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from quire.outputs import RequestOutput

if TYPE_CHECKING:
    from rich.progress import Progress

Advance = Callable[[str, int, int], None]  # (what is done, steps done, steps in total)

LONG_BYTES = 64_000_000  # loading less than this is too fast for a bar
REFRESH_S = 0.1


@contextmanager
def loading_bar(model: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes loaded and bytes a second; yield the function to call with (bytes done, total).

    The bar appears with the first call whose total is large.
    """
    with ExitStack() as stack:
        bar: Progress | None = None

        def advance(done: int, total: int) -> None:
            nonlocal bar
            if bar is None and total >= LONG_BYTES and in_terminal():
                from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

                text = TextColumn("loading {task.description}", markup=False)
                bar = stack.enter_context(
                    progress_bar(text, BarColumn(), DownloadColumn(), TransferSpeedColumn())
                )
                bar.add_task(model, total=total)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done, total=total)

        yield advance


def announce(line: str, nbytes: int) -> None:
    """Print to a terminal what is about to be loaded, if that takes a while."""
    if nbytes >= LONG_BYTES and in_terminal():
        print(line, file=sys.stderr)


@contextmanager
def generation_bar(num_requests: int, enabled: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """Show requests done and tokens a second; yield the function to call with a request that advanced."""
    if not enabled or not in_terminal():
        yield lambda output: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    speed = TextColumn("{task.fields[speed]}")
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), speed, TimeElapsedColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("", total=num_requests, speed="")
        count = TokenCount()
        start = shown = time.monotonic()

        def advance(output: RequestOutput) -> None:
            nonlocal shown
            count.take(output)
            if (now := time.monotonic()) - shown >= REFRESH_S or count.finished == num_requests:
                shown = now
                speed = f"{count.tokens / max(now - start, 1e-9):,.0f} tok/s"
                bar.update(task, completed=count.finished, speed=speed)

        yield advance


@contextmanager
def steps_bar(first: str, before: str = "") -> Iterator[Advance]:
    """Show what is done, after the words `before`, and how much of it; begin with `first`."""
    if not in_terminal():
        yield lambda name, done, total: None
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

    text = TextColumn(f"{before}{{task.description}}", markup=False)
    with progress_bar(text, BarColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(first, total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


class TokenCount:
    """Totals over running requests, updated incrementally: there may be thousands."""

    def __init__(self) -> None:
        self.tokens = self.finished = 0
        self._lengths: dict[str, int] = {}  # of running requests

    def take(self, output: RequestOutput) -> None:
        """Count the new tokens of one request."""
        length = sum(len(choice.token_ids) for choice in output.outputs)
        self.tokens += length - self._lengths.get(output.request_id, 0)
        self._lengths[output.request_id] = length
        if output.finished:
            self.finished += 1
            del self._lengths[output.request_id]


def in_terminal() -> bool:
    """Return True if a bar can be drawn. rich is imported only for a terminal: that takes a while."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    from rich.console import Console

    console = Console(stderr=True)
    return console.is_terminal and not console.is_dumb_terminal


def progress_bar(*columns: Any) -> Progress:
    """Make a bar on standard error that is gone when it ends."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True)
