"""Progress bars on standard error: for long work, in a terminal, and never in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.outputs import RequestOutput

if TYPE_CHECKING:
    from rich.console import Console

LONG_BYTES = 64_000_000  # loading less than this takes no time worth a bar


@contextmanager
def loading_bar(model: str) -> Iterator[Callable[[int, int], None]]:
    """Shows bytes loaded and bytes a second; yields what to call with (bytes done, in all)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=_console(), transient=True) as bar:
        task = bar.add_task(model, visible=False)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=total >= LONG_BYTES)

        yield advance


@contextmanager
def generation_bar(num_requests: int, enabled: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """Shows requests done and tokens a second; yields what to call with a request that advanced."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
    )
    lengths: dict[str, int] = {}
    with Progress(*columns, console=_console(), transient=True, disable=not enabled) as bar:
        task = bar.add_task("", total=num_requests, speed="")

        def advance(output: RequestOutput) -> None:
            lengths[output.request_id] = sum(len(choice.token_ids) for choice in output.outputs)
            elapsed = bar.tasks[0].elapsed or 1e-9
            speed = f"{sum(lengths.values()) / elapsed:,.0f} tok/s"
            bar.update(task, advance=int(output.finished), speed=speed)

        yield advance


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)
