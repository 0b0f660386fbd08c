"""The results of a soak of replicas, of one session or of several: promises, and a report in Markdown."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from endurance.trends import by_minute, fifths, slope, slope_range
from endurance.verdict import JUDGED_S, MB, NOISE_MB, Promise, processor
from quire.bench.metrics import percentile
from quire.bench.report import columns

Session = dict[str, Any]  # ReplicaSoak.state()


def judge(sessions: Sequence[Session], max_slope_mb: float) -> list[Promise]:
    """All promises, over all sessions."""
    num_wrong, num_hung = (sum(one[name] for one in sessions) for name in ("num_problems", "num_hung"))
    golden = [digest for one in sessions for _, digest in one["goldens"]]
    held = [number for one in sessions for number in one["held"]]
    faults = [fault for one in sessions for fault in one["faults"]]
    errors = [fault["error"] for fault in faults if fault["error"]]
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(f["kind"] for f in faults).items())
    last, tracebacks = sessions[-1]["exit_status"], sum(one["num_tracebacks"] for one in sessions)
    drained = "it has not ended" if last is None else f"exit status {last}"
    return [
        Promise("answers", not num_wrong, f"{num_wrong:,} wrong"),
        Promise("hung", not num_hung, f"{num_hung:,} requests without an end"),
        Promise("golden", len(set(golden)) == 1, f"{len(golden)} times, {len(set(golden))} different"),
        Promise(
            "blocks",
            bool(held) and not any(held),
            f"held at {len(held)} idle moments: {max(held, default=0)}",
        ),
        Promise(
            "faults",
            bool(faults) and not errors,
            f"{kinds or 'none'}{'; ' * bool(errors)}{'; '.join(errors)}",
        ),
        *_memory(sessions, max_slope_mb),
        Promise("drain", last == 0, drained),
        Promise("log", not tracebacks, f"{tracebacks} tracebacks"),
    ]


def _memory(sessions: Sequence[Session], max_slope_mb: float) -> list[Promise]:
    """The server's slope, of the longest session; it is judged by the least that it may be."""
    longest = max(sessions, key=lambda one: one["seconds"])
    points = by_minute(
        [
            (at_s, held["server"] / MB)
            for at_s, held in longest["rss"]
            if at_s >= longest["warm_up_s"] and "server" in held
        ]
    )
    per_s, between = slope(points), slope_range(points)
    if per_s is None or between is None:
        return []
    low, high = (3600 * one for one in between)
    span_s = points[-1][0] - points[0][0]
    is_kept = low <= max_slope_mb or low * span_s / 3600 <= NOISE_MB or span_s < JUDGED_S
    text = f"{3600 * per_s:+.2f} MB/h ({low:+.2f} to {high:+.2f}) over {span_s / 60:.0f} min "
    text += f"({points[0][1]:.1f} to {points[-1][1]:.1f} MB)"
    return [Promise("memory, server", is_kept, text)]


def report(sessions: Sequence[Session], max_slope_mb: float) -> tuple[list[Promise], str]:
    """The promises, and everything as Markdown."""
    promises = judge(sessions, max_slope_mb)
    broken = [promise.name for promise in promises if not promise.is_kept]
    verdict = f"broken: {', '.join(broken)}" if broken else "all kept"
    minutes = sum(one["seconds"] for one in sessions) / 60
    outcomes: Counter[tuple[str, str]] = Counter()
    for one in sessions:
        outcomes.update({(kind, came): count for kind, came, count in one["outcomes"]})
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(sessions[0]["begin_s"]))
    found = ", ".join(f"{one['capacity']:.1f}" for one in sessions)
    lines = [
        f"# Soak of replicas, {minutes:.0f} minutes: {verdict}",
        "",
        f"{when} UTC, {processor()}, {os.cpu_count()} cores. `{' '.join(sessions[0]['command'][3:-2])}`; "
        f"sessions: {len(sessions)}, capacities found: {found} requests a second, "
        f"load {sessions[0]['load']:g}: "
        f"{outcomes.total():,} requests, {sum(one['preemptions'] for one in sessions):,.0f} preemptions.",
        "",
        columns(
            [("promise", "", "found")]
            + [(p.name, "kept" if p.is_kept else "**broken**", p.found) for p in promises]
        ),
        "",
        "## Requests",
        "",
        columns(_outcome_rows(outcomes)),
        "",
        f"Time per token of chats by fifths of a session, ms: {_latencies(sessions, 'per_event', 1)}.",
        f"To the first token, ms: {_latencies(sessions, 'ttft', 0)}; 99th percentile: "
        f"{1e3 * percentile(sorted(s for one in sessions for _, s in one['ttft']) or [0.0], 99):.0f}.",
        "",
        "## Faults",
        "",
        columns(_fault_rows(sessions)),
    ]
    problems = [problem for one in sessions for problem in one["problems"]]
    if problems:
        lines += ["", "## What was wrong", "", *(f"- {problem}" for problem in problems)]
    return promises, "\n".join(lines) + "\n"


def _outcome_rows(outcomes: Counter[tuple[str, str]]) -> list[tuple[str, ...]]:
    ways = sorted({came for _, came in outcomes})
    kinds = sorted({kind for kind, _ in outcomes})
    return [("kind", *ways), *((kind, *(f"{outcomes[kind, came]:,}" for came in ways)) for kind in kinds)]


def _latencies(sessions: Sequence[Session], name: str, digits: int) -> str:
    words = []
    for one in sessions:
        parts = fifths(one[name], 0.0, one["seconds"])
        words.append(", ".join("none" if part is None else f"{1e3 * part:.{digits}f}" for part in parts))
    return " | ".join(words)


def _fault_rows(sessions: Sequence[Session]) -> list[tuple[str, ...]]:
    faults = [fault for one in sessions for fault in one["faults"]]
    rows: list[tuple[str, ...]] = [("fault", "times", "requests open", "all ready after, s: median", "most")]
    for kind in sorted({fault["kind"] for fault in faults}):
        some = [fault for fault in faults if fault["kind"] == kind]
        ready = sorted(fault["ready_after_s"] for fault in some)
        num_open = sum(fault["num_open"] for fault in some)
        rows.append((kind, f"{len(some)}", f"{num_open}", f"{median(ready):.1f}", f"{ready[-1]:.1f}"))
    return rows
