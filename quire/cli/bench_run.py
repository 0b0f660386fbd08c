"""The run of `quire bench`: one load, several rates, or the search for a goal; and its report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quire.bench import charts, report, trial_report
from quire.bench.definitions import PERCENTILES, glossary
from quire.bench.driver import LoadRun
from quire.bench.http_client import Client
from quire.bench.load import LoadOptions
from quire.bench.openai_api import Unusable, get
from quire.bench.search import Trial
from quire.bench.target import Target
from quire.bench.trials import Outcome, Tester
from quire.environment import client_key, user_path
from quire.errors import ConfigError
from quire.goals import Goal
from quire.plots import Chart, page, preformatted, svg

SEARCHES = 3
MAX_TRACE_S = 3600
_PATHS = ("dataset_path", "arrivals")
_ONE_RATE = ("request_rate", "max_concurrency", "arrivals", "inject_long_prompt")


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The test to run: a search if there is a goal and no load is given."""

    load: LoadOptions
    goal: Goal
    rates: Sequence[float]
    repeats: int | None
    model: str | None
    searches: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> BenchPlan:
        """Return the test that the flags describe. Raises ConfigError."""
        given = {field.name: getattr(args, field.name) for field in fields(LoadOptions)}
        given = {name: value for name, value in given.items() if value is not None}
        given |= {name: user_path(given[name]) for name in _PATHS if name in given}
        fixed = [name for name in _ONE_RATE if name in given]
        if args.rates and fixed:
            flag = f"--{fixed[0].replace('_', '-')}"
            raise ConfigError(f"--rates and {flag} exclude each other", "give one of them")
        if args.goodput and args.goal:
            raise ConfigError("--goodput and --goal exclude each other", "a goal of --goal is counted, too")
        if args.repeats is not None and args.repeats < 1:
            raise ConfigError(f"--repeats {args.repeats} is out of range", "give at least 1")
        goodput = [pair for pairs in args.goodput or () for pair in _several(pairs)]
        searches = bool(args.goal) and not (args.rates or fixed)
        goal = args.goal or Goal.parse_pairs(goodput)
        return cls(LoadOptions(**given), goal, args.rates or (), args.repeats, args.model, searches)


def _several(pairs: str | Sequence[str]) -> Sequence[str]:
    """Return the pairs of one --goodput: of the command line a list, of a file one text."""
    return pairs.split() if isinstance(pairs, str) else pairs


@dataclass(frozen=True, slots=True)
class BenchFiles:
    """The files to write."""

    json: Path | None
    svg: Path | None
    html: Path | None
    trace: Path | None
    is_detailed: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> BenchFiles:
        """Return the files of the flags. Raises ConfigError for a folder that is not there."""
        json, svg, html, trace = map(_file, (args.json, args.svg, args.html, args.trace))
        return cls(json, svg, html, trace, bool(args.save_detailed))

    def write(self, title: str, text: str, chart: Chart, figures: dict[str, Any]) -> None:
        """Write the figures, the plot, and the page with both."""
        if self.json:
            report.write_json(self.json, figures)
        if self.svg:
            self.svg.write_text(svg(chart), "utf-8")
        if self.html:
            parts = [svg(chart), preformatted(text), preformatted(f"{glossary()}\n  ({PERCENTILES})")]
            self.html.write_text(page(title, parts), "utf-8")


def _file(name: str | None) -> Path | None:
    if name is None:
        return None
    path = user_path(name)
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}", "make it, or name another file")
    return path


def run(plan: BenchPlan, output: BenchFiles, url: str) -> int:
    """Run the test and report it. Returns 1 if no request succeeded."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a connection is a descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    client = Client(url, api_key=client_key(), timeout_s=plan.load.timeout)
    return asyncio.run(_test(plan, output, client, url))


async def _test(plan: BenchPlan, output: BenchFiles, client: Client, url: str) -> int:
    try:
        target = await Target.connect(client, plan.load, plan.model)
    except Unusable as problem:
        hint = problem.hint or "start one with: quire serve MODEL, or let this do it: quire bench MODEL"
        raise Unusable(f"{url}: {problem.message}", hint) from None
    try:
        await _check_recorded(client, output)
        begin_s = time.perf_counter()
        if plan.searches or plan.rates:
            status = await _trials(plan, output, target)
        else:
            await target.settle()
            status = _report_run(plan, output, target, await target.run(plan.load))
        if output.trace is not None:
            await _write_trace(client, output.trace, time.perf_counter() - begin_s)
        return status
    finally:
        client.close()


async def _check_recorded(client: Client, output: BenchFiles) -> None:
    """Raise ConfigError before the load if the server will have no trace of it."""
    if output.trace is not None and (await get(client, "/trace")).status == 404:
        hint = "start it with quire serve --record DIR, or let this do it: quire bench MODEL"
        raise ConfigError("--trace: the server keeps no trace", hint)


async def _write_trace(client: Client, path: Path, seconds: float) -> None:
    reply = await get(client, f"/trace?last={min(seconds + 1, MAX_TRACE_S):.0f}s")
    if reply.status != 200:
        raise ConfigError(f"--trace: the server gave none (status {reply.status})", "see its log")
    path.write_bytes(reply.body)
    print(f"\nwrote {path}: open it at https://ui.perfetto.dev")


async def _trials(plan: BenchPlan, output: BenchFiles, target: Target) -> int:
    """Run trials, printing each as it ends, and report them."""
    lines: list[str] = []
    trials: list[Trial] = []

    def show(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    def take(trial: Trial) -> None:
        trials.append(trial)
        show(trial_report.trial_line(trial))

    tester = Tester(target, plan.load, plan.goal, take)
    alone = await tester.alone()
    show(f"{_title(plan, target)}\n\n{trial_report.alone_line(alone)}\n")
    show(trial_report.trial_heading(plan.goal))
    outcome: Outcome | None = None
    if plan.searches:
        outcome = await tester.highest(alone, plan.repeats or SEARCHES)
        show(f"\n{trial_report.outcome_text(outcome, plan.goal)}")
    else:
        await tester.sweep(plan.rates, plan.repeats or 1)
    show(f"\n{glossary()}")
    chart = charts.rate_chart(trials, plan.goal, outcome.rate if outcome else None)
    figures = trial_report.trials_json(
        trials, plan.goal, _settings(plan, target), outcome, output.is_detailed
    )
    output.write(_title(plan, target), "\n".join(lines), chart, figures)
    return 0 if any(trial.summary.completed for trial in trials) else 1


def _report_run(plan: BenchPlan, output: BenchFiles, target: Target, run: LoadRun) -> int:
    text = f"{_title(plan, target)}\n\n{report.text(run, plan.goal)}\n{glossary()}"
    print(text)
    figures = report.as_json(run, plan.goal, _settings(plan, target), output.is_detailed)
    output.write(_title(plan, target), text, charts.percentile_chart(run, plan.goal), figures)
    return 0 if any(not one.error for one in run.timelines) else 1


def _title(plan: BenchPlan, target: Target) -> str:
    """Return the model and the load in words."""
    load = plan.load
    if load.arrivals or load.dataset_path:
        requests = f"requests of {load.arrivals or load.dataset_path}"
    else:
        requests = f"prompts of {load.random_input_len} tokens, answers of {load.random_output_len}"
    if plan.searches:
        arrivals = f"searching the highest rate that keeps {plan.goal}"
    elif plan.rates:
        arrivals = "at several rates"
    elif load.is_open:
        arrivals = f"{load.speed:g} times as fast" if load.arrivals else f"{load.request_rate:g} requests/s"
    else:
        arrivals = f"{load.max_concurrency} at a time" if load.max_concurrency else "all at once"
    return f"{target.model.name}: {requests}, {arrivals}"


def _settings(plan: BenchPlan, target: Target) -> dict[str, Any]:
    return {**asdict(plan.load), "model": target.model.name, "goal": str(plan.goal)}
