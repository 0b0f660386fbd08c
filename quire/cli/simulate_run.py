"""The run of `quire simulate`: the law, the simulation, saturation, and the report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from quire.bench import report
from quire.bench.driver import LoadRun
from quire.bench.load import LoadOptions, load_requests
from quire.bench.workload import Request
from quire.cli.simulate_fleet import run_fleet, simulated_by
from quire.cli.simulate_law import known_law
from quire.config import EngineConfig, ServerConfig
from quire.engine.step_law import StepLaw
from quire.environment import user_path
from quire.errors import ConfigError
from quire.goals import Goal
from quire.simulation.clients import Bounds
from quire.simulation.law_file import KnownLaw, write_law
from quire.simulation.model import SimulatedModel
from quire.simulation.prompts import BlockVocabulary
from quire.simulation.saturation import (
    FULL_BATCHES,
    HIGH,
    MARGIN,
    Sensitivity,
    offered_rate,
    saturation_rate,
    sensitivities,
)
from quire.simulation.simulate import Simulated, simulate


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Simulate, print the report, and write files. Returns 1 if no request succeeded."""
    load = _load(args)
    setting = SimulatedModel.of(config, args.machine)
    known = known_law(setting, _path(args.law), _path(args.fit), calibrate=bool(args.calibrate))
    if args.save_law:
        write_law(user_path(args.save_law), known)
    runs = _Runs(setting, known, load, _queue(args))
    if args.is_fleet:
        options = {"bounds": runs.bounds, "is_open": load.is_open}
        simulated = simulated_by(setting, known, runs.requests, **options)
        return run_fleet(args, setting, known, _settings(load, config, args), simulated)
    begin_s = time.perf_counter()
    done = runs.at(known.law)
    took_s = time.perf_counter() - begin_s
    goal: Goal = args.goal or Goal()
    whole = LoadRun(0.0, done.end_s, 0.0, done.timelines)
    utilisation, sensitivity = runs.utilisation(), list[Sensitivity]()
    if utilisation is not None and utilisation > HIGH:
        sensitivity = sensitivities(runs.at, known.law, done)
    print(f"{_heading(setting, known, done, took_s)}\n\n{report.text(whole, goal)}")
    print(_saturation_text(runs, utilisation, sensitivity))
    if args.json:
        figures = report.as_json(whole, goal, _settings(load, config, args), bool(args.save_detailed))
        figures["simulation"] = {
            "law": known.source,
            "delays": known.delays._asdict(),
            "steps": done.num_steps,
            "preemptions": done.num_preemptions,
            "device_busy_s": done.busy_s,
            "utilisation": utilisation,
            "sensitivity": [asdict(one) for one in sensitivity],
        }
        report.write_json(user_path(args.json), figures)
    return 0 if any(not one.error for one in done.timelines) else 1


def _path(name: str | None) -> Path | None:
    return None if name is None else user_path(name)


def _load(args: argparse.Namespace) -> LoadOptions:
    given = {field.name: getattr(args, field.name, None) for field in fields(LoadOptions)}
    if given["arrivals"] is not None:
        given["arrivals"] = user_path(given["arrivals"])
    return LoadOptions(**{name: value for name, value in given.items() if value is not None})


def _queue(args: argparse.Namespace) -> Bounds:
    """Return the bounds of the server's queue."""
    default = ServerConfig()
    requests, tokens = args.max_queued_requests, args.max_queued_tokens
    return Bounds(
        max_queued_requests=default.max_queued_requests if requests is None else requests,
        max_queued_tokens=default.max_queued_tokens if tokens is None else tokens,
    )


def _settings(load: LoadOptions, config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    return {**asdict(load), "engine": asdict(config), "machine": args.machine, "goal": str(args.goal or "")}


class _Runs:
    """Simulations of one load by different laws."""

    def __init__(self, setting: SimulatedModel, known: KnownLaw, load: LoadOptions, queue: Bounds) -> None:
        self.setting, self.known, self.load = setting, known, load
        self.bounds = queue._replace(max_concurrency=load.max_concurrency, until_s=load.duration)
        if not load.is_open and load.duration and not load.num_prompts and not load.max_concurrency:
            raise ConfigError("--duration alone sends requests without end", "give --max-concurrency as well")

    def at(self, law: StepLaw) -> Simulated:
        """Simulate the load by a law."""
        return simulate(
            self.setting.scheduler(law),
            law,
            self.requests(),
            delays=self.known.delays,
            bounds=self.bounds,
            is_open=self.load.is_open,
        )

    def requests(self) -> Iterable[Request]:
        """Return the requests of the load."""
        return load_requests(self.load, BlockVocabulary(), "", self.setting.memory.max_model_len)

    def utilisation(self) -> float | None:
        """Return the rate of an open loop as a share of saturation."""
        if not self.load.is_open:
            return None
        law, offered = self.known.law, offered_rate(self._requests(self.load))
        enough = FULL_BATCHES * self.setting.config.max_num_seqs
        several = self.load if self.load.arrivals else replace(self.load, num_prompts=enough, duration=None)
        highest = saturation_rate(self.setting.scheduler(law), law, self._requests(several))
        return offered / highest if highest else None

    def _requests(self, load: LoadOptions) -> list[Request]:
        return list(load_requests(load, BlockVocabulary(), "", self.setting.memory.max_model_len))


def _heading(setting: SimulatedModel, known: KnownLaw, done: Simulated, took_s: float) -> str:
    where = f" on {setting.plan.machine.name}" if setting.plan else ""
    return (
        f"{setting.config.model}{where}, simulated: {done.num_steps:,} steps, {done.end_s:,.1f} s in "
        f"{took_s:.1f} s; {done.num_preemptions:,} preemptions\nlaw of steps: {known.source}"
    )


def _saturation_text(runs: _Runs, utilisation: float | None, found: Sequence[Sensitivity]) -> str:
    """Return the utilisation, and above HIGH the sensitivity."""
    if not runs.load.is_open:
        return "closed loop: the clients wait, so errors of the law are not amplified\n"
    if utilisation is None:
        return "saturation is not known: no request succeeds, or they are too few\n"
    lines = [f"{utilisation:.2f} of saturation"]
    for one in found:
        way = "slower" if one.factor > 1 else "faster"
        changes = [] if one.ttft is None else [f"TTFT {one.ttft - 1:+.0%}"]
        changes += [] if one.tpot is None else [f"TPOT {one.tpot - 1:+.1%}"]
        lines.append(f"if steps are {MARGIN:.0%} {way}: {', '.join(changes)} (means)")
    if found:
        lines.append("this near saturation, take the latencies as a range")
    return "\n".join(lines) + "\n"
