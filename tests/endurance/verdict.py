"""The results of a soak: promises kept and broken, and a report in Markdown."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from endurance.soaking import END_OF_STREAMS_S, Soak
from endurance.trends import drift, fifths, slope
from quire.bench.report import columns, spark

MB = 1 << 20
NOISE_MB = 1.0  # what a process may have grown in all before its slope says anything
SPARE_FDS = 2
JUDGED_S = 600.0  # shorter runs show memory and latency, but are not judged by them
SPARK_POINTS = 60


@dataclass(frozen=True, slots=True)
class Promise:
    """One line of the verdict."""

    name: str
    is_kept: bool
    found: str


def judge(soak: Soak) -> list[Promise]:
    """All promises."""
    found = soak.found
    golden = Counter(digest for _, digest in found.goldens)
    held = [max(idle.num_blocks_held, round(idle.cache_usage * 1e6)) for idle in found.idles]
    restarts = found.totals.get("quire:engine_restarts_total", 0.0)
    preemptions = found.totals.get("vllm:num_preemptions_total", 0.0)
    busy = [idle.num_requests for idle in found.idles]
    tracebacks = soak.log.count("Traceback (most recent call last)")
    return [
        Promise("answers", not found.num_problems, f"{found.num_problems:,} wrong"),
        Promise("hung", not found.num_hung, f"{found.num_hung:,} requests without an end"),
        Promise("golden", len(golden) == 1, f"{sum(golden.values())} times, {len(golden)} different"),
        Promise("blocks", not any(held) and not any(busy), f"held at {len(held)} idle moments: {max(held)}"),
        *_memory(soak),
        *_descriptors(soak),
        _latency(soak),
        _engine(soak, int(restarts)),
        Promise("preemption", preemptions > 0, f"{preemptions:,.0f} preemptions"),
        Promise("drain", soak.exit_status == 0, f"exit status {soak.exit_status}"),
        Promise("log", not tracebacks, f"{tracebacks} tracebacks"),
    ]


def _memory(soak: Soak) -> list[Promise]:
    promises = []
    for name in ("server", "engine"):
        points = rss_points(soak, name, soak.settings.warm_up_s)
        per_s = slope(points)
        if per_s is None or (name == "engine" and soak.found.kills):
            continue  # an engine that begins anew has no slope
        per_hour, span_s = 3600 * per_s, points[-1][0] - points[0][0]
        grown = per_s * span_s
        is_kept = per_hour <= soak.settings.max_slope_mb or grown <= NOISE_MB or span_s < JUDGED_S
        text = (
            f"{per_hour:+.2f} MB/h over {span_s / 60:.0f} min ({points[0][1]:.1f} to {points[-1][1]:.1f} MB)"
        )
        promises.append(Promise(f"memory, {name}", is_kept, text))
    return promises


def rss_points(soak: Soak, name: str, since_s: float) -> list[tuple[float, float]]:
    """(seconds, MB) of one process."""
    held = ((at_s, usage.get(name)) for at_s, usage in soak.found.samples if at_s >= since_s)
    return [(at_s, one.rss_bytes / MB) for at_s, one in held if one is not None]


def _descriptors(soak: Soak) -> list[Promise]:
    """Between the first idle moment, after the warm-up, and the last."""
    promises = []
    first, last = soak.found.idles[0], soak.found.idles[-1]
    for name in ("server", "engine"):
        a, b = first.usage.get(name), last.usage.get(name)
        if a is None or b is None:
            promises.append(Promise(f"descriptors, {name}", False, "it was not there"))
            continue
        is_kept = b.num_fds <= a.num_fds + SPARE_FDS and b.num_threads <= a.num_threads + SPARE_FDS
        text = f"{a.num_fds} to {b.num_fds} descriptors, {a.num_threads} to {b.num_threads} threads"
        promises.append(Promise(f"descriptors, {name}", is_kept, text))
    return promises


def _latency(soak: Soak) -> Promise:
    settings = soak.settings
    parts = fifths(soak.found.per_event, settings.warm_up_s, settings.seconds)
    change = drift(parts)
    shown = ", ".join("none" if part is None else f"{1e3 * part:.1f}" for part in parts)
    if change is None:
        return Promise("latency", settings.seconds < JUDGED_S, f"too few answers: {shown}")
    is_kept = change <= settings.max_drift or settings.seconds < JUDGED_S
    return Promise("latency", is_kept, f"{change:+.1%}; ms a token by fifths: {shown}")


def _engine(soak: Soak, restarts: int) -> Promise:
    kills, expected = soak.found.kills, soak.num_restarts_expected
    if not kills:
        return Promise("engine", restarts == 0, f"{restarts} restarts")
    slowest = max(kill.slowest_end_s for kill in kills)
    ready = sorted(kill.ready_after_s for kill in kills)
    streams = sum(kill.open_streams for kill in kills)
    text = (
        f"{len(kills)} kills, {restarts} restarts; {streams} open streams ended within {slowest:.2f} s; "
        f"ready after {ready[len(ready) // 2]:.2f} s, at most {ready[-1]:.2f}"
    )
    return Promise("engine", restarts == expected and slowest <= END_OF_STREAMS_S, text)


def report(soak: Soak, begin_s: float) -> tuple[list[Promise], str]:
    """The promises, and everything as Markdown."""
    promises = judge(soak)
    found, settings = soak.found, soak.settings
    total = sum(found.outcomes.values())
    broken = [promise.name for promise in promises if not promise.is_kept]
    command = " ".join(["quire", *soak.server.command[3:-2]])
    tokens = found.totals.get("vllm:generation_tokens_total", 0.0)
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(begin_s))
    verdict = f"broken: {', '.join(broken)}" if broken else "all kept"
    machine = f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    rows = [(p.name, "kept" if p.is_kept else "**broken**", p.found) for p in promises]
    lines = [
        f"# Soak of {settings.seconds / 60:g} minutes: {verdict}",
        "",
        f"{when} UTC, {machine}. `{command}`, {settings.streams} requests at once, seed {settings.seed}: "
        f"{total:,} requests, {tokens:,.0f} tokens generated.",
        "",
        *_pause_lines(soak),
        columns([("promise", "", "found"), *rows]),
        "",
        "## Requests",
        "",
        columns(_outcome_rows(soak)),
        "",
        "## Memory",
        "",
        *_memory_lines(soak),
        "",
        "## Idle moments",
        "",
        columns(_idle_rows(soak)),
    ]
    if found.kills:
        lines += ["", "## Kills", "", columns(_kill_rows(soak))]
    if found.problems:
        lines += ["", "## What was wrong", "", *(f"- {problem}" for problem in found.problems)]
    return promises, "\n".join(lines) + "\n"


def _pause_lines(soak: Soak) -> list[str]:
    pauses = soak.clock.pauses
    if not pauses:
        return []
    text = f"All stood still {len(pauses)} times, for {soak.clock.lost_s:,.0f} s; these do not count."
    return [text, ""]


def _outcome_rows(soak: Soak) -> list[tuple[str, ...]]:
    outcomes = soak.found.outcomes
    ways = sorted({came for _, came in outcomes})
    rows = [("kind", *ways)]
    for kind in sorted({kind for kind, _ in outcomes}):
        rows.append((kind, *(f"{outcomes[kind, came]:,}" for came in ways)))
    return rows


def _memory_lines(soak: Soak) -> list[str]:
    lines = []
    for name in ("server", "engine"):
        values = [value for _, value in rss_points(soak, name, 0.0)]
        if values:
            step = max(len(values) // SPARK_POINTS, 1)
            line = spark(values[::step], min(values) - 1)
            lines.append(f"- {name}: `{line}` {min(values):.1f} to {max(values):.1f} MB")
    return lines


def _idle_rows(soak: Soak) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("s", "requests", "blocks held", "server MB", "engine MB", "server fds", "engine fds")
    ]
    for idle in soak.found.idles:
        both = [idle.usage.get(name) for name in ("server", "engine")]
        memory = [f"{one.rss_bytes / MB:.1f}" if one else "" for one in both]
        fds = [f"{one.num_fds}" if one else "" for one in both]
        rows.append((f"{idle.at_s:.0f}", f"{idle.num_requests}", f"{idle.num_blocks_held}", *memory, *fds))
    return rows


def _kill_rows(soak: Soak) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("s", "open streams", "all ended after, s", "ready after, s")]
    for kill in soak.found.kills:
        ends = (f"{kill.slowest_end_s:.2f}", f"{kill.ready_after_s:.2f}")
        rows.append((f"{kill.at_s:.0f}", f"{kill.open_streams}", *ends))
    return rows


def processor() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
