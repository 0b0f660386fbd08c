"""The report of a run as text (figures, a histogram of gaps, a timeline), and its figures as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.bench.definitions import MEASURES, OTHERS
from quire.bench.driver import LoadRun
from quire.bench.metrics import Spread, Summary, Timeline, bins, gaps_within, in_json, summarize
from quire.goals import Goal
from quire.outputs import drafts_in_words

SPARKS = " ▁▂▃▄▅▆▇█"
BAR = "█"
COLUMNS = 64  # of a timeline
BAR_WIDTH = 40
SHOWN = {**MEASURES, "rejection": OTHERS["rejection"], "lateness": OTHERS["lateness"]}


def text(run: LoadRun, goal: Goal) -> str:
    """Return the report."""
    summary = summarize(run.timelines, run.duration_s, goal)
    gaps = [end - begin for t in run.timelines if not t.error for begin, end in t.gaps()]
    parts = [heading(summary, run, goal), table(summary), histogram(gaps), timeline(run)]
    if run.injected:
        parts.append(injection(run))
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(summary: Summary, run: LoadRun, goal: Goal) -> str:
    """Return counts and throughput."""
    tokens = summary.num_output_tokens
    lines = [
        f"{summary.completed:,} requests in {summary.duration_s:.1f} s, at most {summary.max_concurrency} at "
        f"once; {summary.failed:,} failed",
        f"{summary.per_s(summary.completed):.2f} requests/s, {summary.per_s(tokens):,.1f} output tokens/s, "
        f"{summary.per_s(tokens + summary.num_prompt_tokens):,.1f} tokens/s with prompts",
        f"{tokens:,} output tokens; {summary.num_prompt_tokens:,} of prompts, "
        f"{summary.num_cached_tokens:,} of them from the server's cache",
    ]
    if summary.num_drafted:
        drafting = summary.num_accepted, summary.num_drafted, summary.decode_s, summary.drafting_saved_s
        lines.append(drafts_in_words(*drafting))
    if goal:
        share = summary.good / max(len(run.timelines), 1)
        lines.append(f"goodput {summary.per_s(summary.good):.2f} requests/s ({goal}: {share:.1%} kept it)")
        broken = ", ".join(map(str, goal.broken(summary.figures())))
        lines.append(f"the run as a whole {f'breaks {broken}' if broken else 'keeps the goal'}")
    if tokens and run.cpu_s:
        share = run.cpu_s / summary.duration_s
        lines.append(
            f"this client: {1e6 * run.cpu_s / tokens:.0f} µs of CPU a token, {share:.0%} of one core"
        )
    lines += [f"failed: {count:,} times {kind}" for kind, count in summary.errors.items()]
    return "\n".join(lines)


def table(summary: Summary) -> str:
    """Return the table of latencies in milliseconds."""
    heads = ("mean", "p50", "p90", "p95", "p99", "max")
    lines = [f"{'milliseconds':28}" + "".join(f"{name:>9}" for name in heads)]
    for name, definition in SHOWN.items():
        spread: Spread | None = getattr(summary, name)
        if spread:
            values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.largest)
            title = definition.title if name in OTHERS else f"{definition.name:5} {definition.title}"
            lines.append(f"{title:28}" + "".join(f"{shown_ms(value):>9}" for value in values))
    return "\n".join(lines)


def histogram(gaps_s: Sequence[float]) -> str:
    """Return a histogram of gaps; the width of its classes grows by half an octave."""
    positive = [1e3 * gap for gap in gaps_s if gap > 0]
    if not positive:
        return ""
    classes: dict[int, int] = {}
    for gap in positive:
        place = math.floor(2 * math.log2(gap))
        classes[place] = classes.get(place, 0) + 1
    lines = ["gaps between tokens, ms"]
    most = max(classes.values())
    for place in range(min(classes), max(classes) + 1):
        count = classes.get(place, 0)
        bar = BAR * round(BAR_WIDTH * count / most) or ("▏" if count else "")
        low, high = 2 ** (place / 2), 2 ** ((place + 1) / 2)
        lines.append(f"{shown_ms(low):>8} to {shown_ms(high):>7} {count:>9,} {bar}")
    return "\n".join(lines)


def timeline(run: LoadRun) -> str:
    """Return the run from left to right: tokens a second, open requests, the longest gap."""
    if run.duration_s <= 0 or not run.timelines:
        return ""
    pieces = bins(run.timelines, run.begin_s, run.end_s, COLUMNS)
    width_s = run.duration_s / COLUMNS
    rows = {
        "tokens/s": [piece.tokens / width_s for piece in pieces],
        "open requests": [float(piece.open) for piece in pieces],
        "longest gap, ms": [1e3 * piece.gap_s for piece in pieces],
    }
    lines = [f"{title:>16} {spark(values)} up to {max(values):,.0f}" for title, values in rows.items()]
    if run.injected:
        lines.append(f"{'long prompt':>16} {_marks(run)}")
    lines.append(f"{'':16} 0 s{f'{run.duration_s:.1f} s':>{COLUMNS - 3}}")
    return "\n".join(lines)


def spark(values: Sequence[float], lowest: float = 0.0) -> str:
    """Return values as a line of small bars. Anything above `lowest` is visible."""
    span = max(values, default=0.0) - lowest
    if span <= 0:
        return SPARKS[0] * len(values)
    heights = (math.ceil((value - lowest) / span * (len(SPARKS) - 1)) for value in values)
    return "".join(SPARKS[min(max(height, 0), len(SPARKS) - 1)] for height in heights)


def _marks(run: LoadRun) -> str:
    """Mark each injected prompt from sending it to its first token."""
    marks = [" "] * COLUMNS
    for sent in run.injected:
        begin, end = (
            min(max(int((at_s - run.begin_s) / run.duration_s * COLUMNS), 0), COLUMNS - 1)
            for at_s in (sent.sent_s, sent.chunk_s[0] if sent.chunk_s else sent.end_s)
        )
        marks[begin : end + 1] = "─" * (end + 1 - begin)
        marks[begin] = "▶"
    return "".join(marks)


def injection(run: LoadRun) -> str:
    """Compare streams during an injected prompt with the rest of the run."""
    lines = []
    for sent in run.injected:
        if sent.error:
            lines.append(f"the long prompt failed: {sent.error}")
            continue
        begin, end = sent.sent_s, sent.chunk_s[0]
        during = Spread.of(1e3 * gap for gap in gaps_within(run.timelines, begin, end))
        before = Spread.of(1e3 * gap for gap in gaps_within(run.timelines, run.begin_s, begin))
        lines.append(
            f"a prompt of {sent.num_prompt_tokens:,} tokens came at {begin - run.begin_s:.1f} s; "
            f"its first token took {end - begin:.2f} s"
        )
        lines += [_gap_line("before it", before), _gap_line("meanwhile", during)]
    return "\n".join(lines)


def _gap_line(title: str, spread: Spread | None) -> str:
    if spread is None:
        return f"  {title}: no gaps"
    values = f"p50 {shown_ms(spread.p50)}, p99 {shown_ms(spread.p99)}, max {shown_ms(spread.largest)}"
    return f"  gaps {title}: {values} ms"


def shown_ms(value: float) -> str:
    """Return milliseconds with three digits or so."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def as_json(run: LoadRun, goal: Goal, settings: dict[str, Any], detailed: bool = False) -> dict[str, Any]:
    """Return the figures under the names of `vllm bench serve --save-result`, and some of our own."""
    summary = summarize(run.timelines, run.duration_s, goal)
    tokens = summary.num_output_tokens
    result: dict[str, Any] = {
        "options": settings,
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "errors_by_kind": summary.errors,
        "total_input_tokens": summary.num_prompt_tokens,
        "total_output_tokens": tokens,
        "total_cached_tokens": summary.num_cached_tokens,
        "total_drafted_tokens": summary.num_drafted,
        "total_accepted_tokens": summary.num_accepted,
        "request_throughput": summary.per_s(summary.completed),
        "request_goodput": summary.per_s(summary.good) if goal else None,
        "output_throughput": summary.per_s(tokens),
        "total_token_throughput": summary.per_s(tokens + summary.num_prompt_tokens),
        "max_concurrent_requests": summary.max_concurrency,
        "client_cpu_us_per_token": 1e6 * run.cpu_s / tokens if tokens else None,
    }
    for name in SHOWN:
        result |= in_json(name, getattr(summary, name))
    if run.injected:
        result["injected"] = [_injected_json(run, sent) for sent in run.injected]
    if detailed:
        result["requests"] = [asdict(one) for one in run.timelines]
    return result


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write figures to a file; those that are not finite, which JSON cannot have, as null."""
    path.write_text(json.dumps(_finite(figures), indent=1, default=str, allow_nan=False) + "\n", "utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _injected_json(run: LoadRun, sent: Timeline) -> dict[str, Any]:
    end_s = sent.chunk_s[0] if sent.chunk_s else sent.end_s
    during = Spread.of(1e3 * gap for gap in gaps_within(run.timelines, sent.sent_s, end_s))
    return {
        "at_s": sent.sent_s - run.begin_s,
        "prompt_tokens": sent.num_prompt_tokens,
        "ttft_ms": 1e3 * (end_s - sent.sent_s),
        "error": sent.error,
    } | in_json("itl_meanwhile", during)


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its heading."""
    heading, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([heading, "|" + "---|" * (heading.count(" | ") + 1), *rest])
