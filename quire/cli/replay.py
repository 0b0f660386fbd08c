"""`quire replay`: repeat a recorded run of a server's engine, and compare every step."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.option_types import DURATION, TEXT
from quire.cli.options import add_engine_flags, engine_options
from quire.cli.terminal import bold, counted
from quire.environment import user_path

if TYPE_CHECKING:
    from quire.recording.figures import Figures, StepTimes
    from quire.recording.incident import Recording
    from quire.recording.replay import ReplayResult

DESCRIPTION = """Replay an incident file of `quire serve --record DIR`: the scheduler gets the recorded calls
again, with the recorded times, and every step is compared with the recorded one. If the file has contents
(--record-contents), the model computes every step: tokens and log-probability bits are compared.

  quire replay DIR/20261122T180512-0.quire-incident
  quire replay FILE --times --svg times.svg      the times of the steps, without a replay
  quire replay FILE --trace run.pftrace          a trace of requests, slots and steps, for ui.perfetto.dev

Exit status: 0 if every step is equal, 1 if not, or if this build, instruction set or checkpoint
is another one than that of the recording.
"""
SLOWEST = 8


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "replay",
        help="repeat a recorded run of a server, and compare every step",
        usage="quire replay FILE [flags]",
        description=DESCRIPTION,
    )
    words = parser.add_argument_group("arguments", "FILE     incident file")
    words.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=TEXT, metavar="MODEL", help="where the recorded checkpoint is now")
    parser.add_argument("--times", action="store_true", help="show the recorded times of steps instead")
    parser.add_argument("--svg", type=TEXT, metavar="FILE", help="write a plot of the times to FILE")
    parser.add_argument("--trace", type=TEXT, metavar="FILE", help="write a trace of the run to FILE instead")
    parser.add_argument("--last", type=DURATION, metavar="TIME", help="trace only the last TIME, such as 30s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser, names=("num_threads",))
    parser.set_defaults(function=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Replay one file, or show its times."""
    if len(args.words) != 1:
        args.parser.refuse("one incident file is needed" if not args.words else "give one FILE")
    if args.last is not None and not args.trace:
        args.parser.refuse("--last is for traces", "give --trace FILE as well")
    if args.times and args.trace:
        args.parser.refuse("--times and --trace both stand for the replay", "give one, then the other")
    from quire.recording.figures import figures_of
    from quire.recording.incident import read_incident

    recording = read_incident(user_path(args.words[0]))
    figures = figures_of(recording)
    if not args.json:
        _show_contents(recording, figures)
    if args.svg:
        _plot(figures.steps, Path(args.svg))
    if args.trace:
        return _trace(recording, figures, Path(args.trace), args.last, quiet=args.json)
    if args.times:
        if args.json:
            print(json.dumps(_as_dict(recording, figures) | {"steps": [s._asdict() for s in figures.steps]}))
        else:
            _show_times(figures.steps)
        return 0
    changes = engine_options(args) | ({"model": args.model} if args.model else {})
    outcome = _replay(recording, figures, changes, quiet=args.json)
    if args.json:
        print(json.dumps(_as_dict(recording, figures) | _outcome_as_dict(outcome), indent=2))
    else:
        _show_outcome(outcome, recording.header.contents)
    return 0 if outcome.equal else 1


def _replay(recording: Recording, figures: Figures, changes: dict[str, Any], quiet: bool) -> ReplayResult:
    from quire.progress import loading_bar
    from quire.recording.rebuild import check_build, rebuild
    from quire.recording.replay import replay

    check_build(recording.header)
    runner, adapters = None, None
    if recording.header.contents:
        with loading_bar(recording.header.config.model) as show:
            built = rebuild(recording.header, changes, show)
            runner, adapters = built.runner, built.adapters
    with _step_bar(len(figures.steps), quiet) as show_steps:
        return replay(recording, runner, show_steps, adapters=adapters or ())


def _trace(recording: Recording, figures: Figures, path: Path, last_s: float | None, quiet: bool) -> int:
    from quire.errors import ConfigError
    from quire.recording.rebuild import check_build
    from quire.recording.replay import replay
    from quire.recording.run_trace import RunTrace

    check_build(recording.header)
    trace = RunTrace(figures.steps[-1].began_s - last_s if last_s and figures.steps else 0.0)
    with _step_bar(len(figures.steps), quiet) as show_steps:
        outcome = replay(recording, None, show_steps, trace)
    if outcome.difference is not None:
        raise ConfigError(f"the recording does not replay: {outcome.difference}")
    path.write_bytes(trace.encoded())
    if not quiet:
        print(f"wrote {path}: open it at https://ui.perfetto.dev")
    return 0


@contextmanager
def _step_bar(num_steps: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show the steps replayed, in a terminal; yield the function to call with their number."""
    from quire.progress import in_terminal

    if quiet or not in_terminal():
        yield lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from quire.progress import progress_bar

    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("", total=num_steps)
        yield lambda done: bar.update(task, completed=done)


def _written(recording: Recording) -> str:
    written = datetime.fromtimestamp(recording.incident.written_s, UTC)
    return written.strftime("%Y-%m-%d %H:%M:%S UTC")


def _show_contents(recording: Recording, figures: Figures) -> None:
    header = recording.header
    kind = "with contents" if header.contents else "redacted"
    print(f"{bold(recording.incident.reason)}, {_written(recording)} ({kind})")
    print(f"  Quire {header.quire}, build {header.build}, {header.config.model}, {header.arithmetic}")
    parts = (
        counted(figures.num_requests, "request"),
        counted(figures.num_aborts, "abort"),
        counted(figures.num_planned, "step"),
        f"{figures.span_s:,.1f} s in {counted(figures.num_epochs, 'epoch')}",
    )
    print(f"  {', '.join(parts)}")


def _show_outcome(outcome: ReplayResult, contents: bool) -> None:
    if outcome.difference is not None:
        print(f"{bold('different')} after {counted(outcome.num_steps, 'equal step')}: {outcome.difference}")
        return
    tokens = f", {counted(outcome.num_tokens, 'token')}" if contents else ""
    print(f"{counted(outcome.num_steps, 'step')}{tokens}: {bold('equal')}")
    if outcome.open_steps:
        steps = ", ".join(map(str, outcome.open_steps))
        ran = "computed now" if contents else "not computed, as there are no contents"
        print(f"planned and not ended when the recording ends: step {steps}, {ran}")
    if outcome.failure is not None:
        print(f"failed where the recording ends: {outcome.failure}")


def _show_times(steps: list[StepTimes]) -> None:
    if not steps:
        print("no step ended")
        return
    print(f"{'ms':>24}  {'p50':>9}  {'p90':>9}  {'p99':>9}  {'max':>9}")
    for name in ("device_s", "idle_s", "mask_s", "sampling_s", "core_wait_s"):
        values = sorted(getattr(step, name) * 1e3 for step in steps)
        at = [values[min(len(values) - 1, int(len(values) * share))] for share in (0.5, 0.9, 0.99, 1.0)]
        print(f"{name[:-2].replace('_', ' '):>24}  " + "  ".join(f"{ms:9.3f}" for ms in at))
    print(f"\n{'slowest step':>24}  {'rows':>9}  {'tokens':>9}  {'device':>9}  {'at s':>9}")
    for step in sorted(steps, key=lambda step: -step.device_s)[:SLOWEST]:
        since_s = step.began_s - steps[0].began_s
        print(
            f"{step.number:>24,}  {step.num_rows:>9,}  {step.num_tokens:>9,}  {step.device_s * 1e3:9.3f}"
            f"  {since_s:9.3f}"
        )


def _plot(steps: list[StepTimes], path: Path) -> None:
    from quire.plots import Axis, Chart, Series, svg

    begin_s = steps[0].began_s if steps else 0.0
    points = [(step.began_s - begin_s, step.device_s * 1e3) for step in steps]
    series = Series("step", points, line=False)
    chart = Chart("Times of steps", Axis("time", "s"), Axis("device time", "ms", low=0.0), (series,))
    path.write_text(svg(chart), "utf-8")


def _as_dict(recording: Recording, figures: Figures) -> dict[str, Any]:
    header, incident = recording.header, recording.incident
    return {
        "reason": incident.reason,
        "written_s": incident.written_s,
        "contents": header.contents,
        "quire": header.quire,
        "build": header.build,
        "arithmetic": header.arithmetic,
        "checkpoint": header.checkpoint,
        "num_requests": figures.num_requests,
        "num_aborts": figures.num_aborts,
        "num_planned_steps": figures.num_planned,
        "num_epochs": figures.num_epochs,
        "span_s": figures.span_s,
    }


def _outcome_as_dict(outcome: ReplayResult) -> dict[str, Any]:
    difference = outcome.difference
    return {
        "equal": outcome.equal,
        "num_steps": outcome.num_steps,
        "num_tokens": outcome.num_tokens,
        "difference": None if difference is None else difference._asdict(),
        "open_steps": outcome.open_steps,
        "failure": outcome.failure,
    }
