"""The report of `quire plan`: tables, a plot in characters, the same as a chart, and as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.goals import MEASURES, Goal
from quire.memory import gigabytes
from quire.plots import Axis, Chart, Rule, Series
from quire.roofline.knobs import Knob, knobs
from quire.roofline.plan import LARGEST_BATCH, MachinePlan, Phase
from quire.roofline.serving import Serving, Workload, serving
from quire.roofline.shares import SPREAD, Span

BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (1024, 8192, 65536)
PROMPTS = (128, 1024, 8192)
NUM_DRAFTED, DRAFTING = 3, (1, 16, 64)  # tokens that a step verifies for each sequence; batches
PLOT_WIDTH, PLOT_HEIGHT = 61, 12  # characters


@dataclass
class Report:
    """Everything that is shown of one plan."""

    plan: MachinePlan
    workload: Workload
    goal: Goal

    @cached_property
    def serving(self) -> Serving | None:
        return serving(self.plan, self.workload)

    @cached_property
    def knobs(self) -> tuple[Knob, ...]:
        """The settings that reach the goal, if it is not kept already."""
        if not self.goal or (self.serving is not None and self.serving.keeps(self.goal)):
            return ()
        return knobs(self.plan, self.workload, self.goal)

    @property
    def verdict(self) -> str:
        """Say whether the goal is kept: at the slow end of the range, at the typical share, or not."""
        if self.serving is None:
            return "not reached: the model does not fit"
        for end, told in (("high", "kept"), ("typical", "kept at the typical share, not at the slow end")):
            if self.serving.keeps(self.goal, end):
                return told
        return "not reached, though possible at the roof" if self._possible() else "not reached"

    def _possible(self) -> bool:
        return self.serving is not None and self.serving.keeps(self.goal, "roof")

    def show(self) -> None:
        """Print everything for people."""
        console = Console(highlight=False)
        for line in self._heading():
            console.print(line, markup=False, soft_wrap=True)
        fits = self.plan.fit.fits
        console.print()
        console.print(self._decode_table())
        console.print(
            "tokens/s of all sequences, typical share; m: memory, c: caches, a: arithmetic, ", end=""
        )
        console.print("o: overhead binds; -: does not fit" if fits else "o: overhead binds; nothing fits")
        for line in _plot(self.plan, self.workload.prompt):
            console.print(line, markup=False, soft_wrap=True)
        console.print()
        console.print(self._prefill_table())
        if self.serving is not None:
            console.print()
            of = f"prompts of {self.workload.prompt:,} and answers of {self.workload.output:,} tokens"
            told = f"under load: {self.serving.batch:,} sequences at once, {of}, none waiting"
            console.print(told, soft_wrap=True)
            console.print(self._load_table(self.serving))
        for line in self._goal_lines():
            console.print(line, markup=False, soft_wrap=True)

    def _heading(self) -> list[str]:
        plan, fit = self.plan, self.plan.fit
        machine = plan.machine
        cards = f"{plan.cards} x " if plan.cards > 1 else ""
        measured = machine.measured
        age = (
            time.strftime(", ceilings of %Y-%m-%d %H:%M", time.localtime(measured.measured_at))
            if measured
            else ""
        )
        lines = [
            f"{plan.config.model} on {cards}{machine.name}{age}",
            f"weights {gigabytes(fit.weight_bytes)} ({plan.config.quantization or 'as stored'}), "
            f"KV cache {plan.description.kv_dtype}, "
            f"memory {gigabytes(fit.available_bytes)} available at {machine.bandwidth / 1e9:,.0f} GB/s",
        ]
        if not fit.fits:
            enough = fit.cards(machine) if machine.kind == "gpu" else 0
            more = f": {enough} x {machine.name} would hold it" if enough > plan.cards else ""
            return [*lines, f"does not fit{more}. Times are those of a machine with more memory."]
        full = fit.batch(fit.longest)
        room = f"{full:,} of {fit.longest:,}" if full else f"not one of {fit.longest:,}"
        total = self.workload.total
        lines.append(
            f"fits: sequences that the cache holds: {fit.batch(total):,} of {total:,} tokens, {room}"
        )
        turning = plan.turning_batch()
        told = f"B* = {turning:,}" if turning else f"more than {LARGEST_BATCH:,}"
        lines.append(f"batch at which decoding turns compute-bound: {told}")
        ratios = self._verifying()
        longer = ", ".join(f"{ratio:.2f} at batch {batch}" for batch, ratio in ratios.items())
        pays = ", ".join(f"{max(ratio - 1, 0):.2f}" for ratio in ratios.values())
        told = (
            f"a step that verifies {NUM_DRAFTED} drafted tokens a sequence is longer by a factor of {longer}"
        )
        return [*lines, f"{told}: drafts pay from {pays} accepted tokens on"]

    def _verifying(self) -> dict[int, float]:
        """Return how many times as long a step takes if it verifies drafts, by batch."""
        return {n: self.plan.verifying(n, self.workload.prompt, NUM_DRAFTED) for n in DRAFTING}

    def _decode_table(self) -> Table:
        contexts = _contexts(self.plan)
        table = Table("decode: batch", box=None, pad_edge=False)
        for context in contexts:
            table.add_column(f"context {context:,}", justify="right")
        for batch in BATCHES:
            cells = [
                _cell(self.plan.decode(batch, context))
                if batch <= self.plan.fit.batch(context) or not self.plan.fit.fits
                else "-"
                for context in contexts
            ]
            table.add_row(f"{batch:,}", *cells)
        return table

    def _prefill_table(self) -> Table:
        table = Table("prefill: prompt", "roof", "expected", box=None, pad_edge=False)
        cached = [0, *(context for context in _contexts(self.plan)[1:] if context < self.plan.fit.longest)]
        for before in cached:
            table.add_column(f"after {before:,}" if before else "tokens/s", justify="right")
        for tokens in _prompts(self.plan):
            phases = [self.plan.prefill(tokens, cached=before) for before in cached]
            seconds = phases[0].seconds
            table.add_row(f"{tokens:,}", _time(seconds.roof), _range(seconds), *map(_cell, phases))
        return table

    def _load_table(self, found: Serving) -> Table:
        table = Table("", "roof", "expected (p50)", "expected (p99)", box=None, pad_edge=False)
        for measure in MEASURES:
            usual, late = (found.times[measure, statistic] for statistic in ("p50", "p99"))
            table.add_row(measure, _time(usual.roof), _range(usual), _range(late))
            if measure == "ttft":
                half, last = found.wave.times(0.5), found.wave
                table.add_row("  all at once", _time(half.roof), _range(half), _range(last))
        rate = found.tokens_per_s
        table.add_row("tokens/s", _number(rate.roof), f"{_number(rate.low)} to {_number(rate.high)}", "")
        return table

    def _goal_lines(self) -> list[str]:
        if not self.goal:
            return []
        lines = ["", f"goal {self.goal}: {self.verdict}"]
        if self.knobs and all("machine" in knob.settings for knob in self.knobs):
            lines.append("  needs another machine:")
        for knob in self.knobs:
            rate = _number(knob.serving.tokens_per_s.typical)
            sure = "" if knob.surely else ", at the typical share"
            lines.append(f"  reached with {_in_flags(knob)} ({rate} tokens/s{sure})")
        if self.verdict.startswith("not") and not self.knobs:
            lines.append("  no setting, number of cards or machine of the catalogue reaches it")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers with full names. Times in seconds, rates in tokens/s."""
        plan, fit, found = self.plan, self.plan.fit, self.serving
        return {
            "model": plan.config.model,
            "machine": plan.machine.name,
            "num_devices": plan.cards,
            "spread": SPREAD,
            "memory": {
                "fits": fit.fits,
                "num_devices_needed": fit.cards(plan.machine),
                "available_bytes": fit.available_bytes,
                "weight_bytes": fit.weight_bytes,
                "activation_bytes": fit.activation_bytes,
                "cache_tokens": fit.tokens,
                "sequences": {tokens: fit.batch(tokens) for tokens in (*_contexts(plan), fit.longest)},
            },
            "turning_batch": plan.turning_batch(),
            "verifying": [
                {"batch": batch, "drafted_tokens": NUM_DRAFTED, "time_ratio": ratio}
                for batch, ratio in self._verifying().items()
            ],
            "decode": [
                {"batch": batch, "context": context, "fits": batch <= fit.batch(context)}
                | _as_dict(plan.decode(batch, context))
                for context in _contexts(plan)
                for batch in BATCHES
            ],
            "prefill": [{"prompt": tokens} | _as_dict(plan.prefill(tokens)) for tokens in _prompts(plan)],
            "serving": None
            if found is None
            else {
                "batch": found.batch,
                "prompt_tokens": self.workload.prompt,
                "output_tokens": self.workload.output,
                "tokens_per_s": found.tokens_per_s._asdict(),
                "wave_s": {"roof": found.wave.roof, "low": found.wave.low, "high": found.wave.high},
                **{end: found.figures(end) for end in ("roof", "low", "typical", "high")},
            },
            "goal": {
                "goal": str(self.goal),
                "verdict": self.verdict,
                "reached_with": [
                    {"settings": knob.settings, "surely": knob.surely}
                    | {"tokens_per_s": knob.serving.tokens_per_s.typical}
                    for knob in self.knobs
                ],
            }
            if self.goal
            else None,
        }


def chart(plan: MachinePlan, workload: Workload) -> Chart:
    """Return the plot of decoding: tokens/s over the batch, with the range and B*."""
    context = workload.prompt
    batches, phases = _curve(plan, context)
    rates = [phase.rate for phase in phases]
    points = [(float(batch), rate.typical) for batch, rate in zip(batches, rates, strict=True)]
    roof = [(float(batch), rate.roof) for batch, rate in zip(batches, rates, strict=True)]
    band = [(rate.low, rate.high) for rate in rates]
    rules = [
        Rule(float(value), label, vertical=True)
        for value, label in ((plan.turning_batch(), "B*"), (plan.fit.batch(context), "memory is full"))
        if value and batches[0] <= value <= batches[-1]
    ]
    return Chart(
        f"{plan.config.model} on {plan.machine.name}: decoding at a context of {context:,}",
        Axis("sequences computed together", log=True),
        Axis("output tokens per second", log=True),
        [Series("typical share, and range", points, band), Series("roof", roof, markers=False)],
        rules,
    )


def _curve(plan: MachinePlan, context: int) -> tuple[list[int], list[Phase]]:
    most = max(plan.fit.batch(context), 1) if plan.fit.fits else 256
    end = max(min(2 * most, 1024), 2)
    batches = [1 << power for power in range(end.bit_length())]
    return batches, [plan.decode(batch, context) for batch in batches]


def _plot(plan: MachinePlan, context: int) -> list[str]:
    """Return the chart in characters, both axes logarithmic."""
    batches, phases = _curve(plan, context)
    rates = [phase.rate for phase in phases]
    bottom, top = math.log(min(rate.low for rate in rates)), math.log(max(rate.roof for rate in rates))
    grid = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]

    def row(value: float) -> int:
        return round((math.log(value) - bottom) / (top - bottom or 1) * (PLOT_HEIGHT - 1))

    for column in range(PLOT_WIDTH):
        at = column / (PLOT_WIDTH - 1) * (len(rates) - 1)
        low, typical, high, roof = (_between([rate[i] for rate in rates], at) for i in range(4))
        for height in range(row(low), row(high) + 1):
            grid[height][column] = "░"
        grid[row(roof)][column] = "─"
        grid[row(typical)][column] = "●" if abs(at - round(at)) * (PLOT_WIDTH - 1) < len(rates) / 2 else "·"
    labels = {PLOT_HEIGHT - 1: math.exp(top), 0: math.exp(bottom)}
    lines = [f"\ndecoding at a context of {context:,}, tokens/s: ● typical, ░ range, ─ roof"]
    for height in reversed(range(PLOT_HEIGHT)):
        label = _number(labels[height]) if height in labels else ""
        lines.append(f"{label:>8} │{''.join(grid[height])}")
    return [*lines, f"{'':>8} └{'─' * PLOT_WIDTH}", _ruler(batches)]


def _ruler(batches: Sequence[int]) -> str:
    """Return the line of batches under the plot."""
    ruler = [" "] * (PLOT_WIDTH + 6)
    for index, batch in enumerate(batches):
        place = round(index / (len(batches) - 1) * (PLOT_WIDTH - 1))
        ruler[place : place + len(str(batch))] = str(batch)
    return f"{'batch':>8}  {''.join(ruler).rstrip()}"


def _between(values: Sequence[float], at: float) -> float:
    """Return the value between those beside `at`, on a logarithmic scale."""
    left = min(int(at), len(values) - 1)
    right = min(left + 1, len(values) - 1)
    return math.exp(math.log(values[left]) + (at - left) * math.log(values[right] / values[left]))


def _contexts(plan: MachinePlan) -> list[int]:
    longest = plan.fit.longest
    return sorted({min(context, longest) for context in CONTEXTS})


def _prompts(plan: MachinePlan) -> list[int]:
    return sorted({min(tokens, plan.fit.longest) for tokens in PROMPTS})


def _cell(phase: Phase) -> str:
    return f"{_number(phase.rate.typical)} {phase.bound[0]}"


def _as_dict(phase: Phase) -> dict[str, Any]:
    seconds = phase.seconds
    return {
        "roof_s": seconds.roof,
        "low_s": seconds.low,
        "typical_s": seconds.typical,
        "high_s": seconds.high,
        "tokens_per_s": phase.rate._asdict(),
        "bound": phase.bound,
    }


def _in_flags(knob: Knob) -> str:
    from quire.cli.options import in_flags

    if "machine" in knob.settings:
        return f'--machine "{knob.settings["machine"]}"'
    return in_flags(str(knob)).replace("num_devices", "--num-devices")


def _range(span: Span) -> str:
    low, high = _time(span.low), _time(span.high)
    unit = high.split()[1]
    return f"{low.removesuffix(f' {unit}')} to {high}"


def _time(seconds: float) -> str:
    for unit, size, limit in (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0)):
        if seconds < 0.9995 * limit:  # three digits round no more to the next unit
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
