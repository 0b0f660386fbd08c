"""The parts of the time of an HTTP request: for answers, the Server-Timing header and the log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire.outputs import RequestOutput
from quire.types import RequestMetrics

_PARTS = ("queue", "prefill", "decode", "preempted", "total")
_RECEIPT = (
    "interference_prefill",
    "interference_decode",
    "grammar",
    "fetch",
    "cached_saved",
    "drafting_saved",
    "ideal",
)
_NOTHING = RequestMetrics(0.0)


@dataclass(slots=True)
class Deliveries:
    """The times, in seconds of `time.monotonic`, at which outputs of a prompt reached this process."""

    count: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    max_gap_s: float = 0.0

    def add(self, now: float) -> float | None:
        """Note a delivery; return the time since the one before, None for the first."""
        gap_s = None if self.first_s is None else now - self.last_s
        if gap_s is None:
            self.first_s = now
        else:
            self.max_gap_s = max(self.max_gap_s, gap_s)
        self.count += 1
        self.last_s = now
        return gap_s


def generation_ms(output: RequestOutput, deliveries: Deliveries) -> tuple[float, float]:
    """Return the milliseconds from admission to the first token, and from there to the last delivery."""
    if deliveries.first_s is None:
        return 0.0, 0.0
    first_s = deliveries.first_s
    admitted_s = _admitted_s(output)
    prompt_s = first_s - admitted_s if admitted_s is not None else 0.0
    return prompt_s * 1e3, (deliveries.last_s - first_s) * 1e3


def delivery_ms(
    output: RequestOutput, deliveries: Deliveries, arrival_s: float, end_s: float
) -> dict[str, float]:
    """Return the time to the first delivery, and those between deliveries, in milliseconds."""
    num_tokens = max(len(one.token_ids) for one in output.outputs)
    num_gaps = max(num_tokens, deliveries.count) - 1
    first_s = end_s if deliveries.first_s is None else deliveries.first_s
    span_s = deliveries.last_s - first_s if deliveries.first_s is not None else 0.0
    return {
        "ttft_ms": (first_s - arrival_s) * 1e3,
        "mean_itl_ms": span_s / num_gaps * 1e3 if num_gaps > 0 else 0.0,
        "max_itl_ms": deliveries.max_gap_s * 1e3,
    }


def receipt_ms(
    prompts: Iterable[tuple[RequestOutput, Deliveries]], arrival_s: float, end_s: float
) -> dict[str, float]:
    """Return where the time of a request went, in milliseconds: that of the choice that ends last.

    `queue_ms`, `prefill_ms`, `decode_ms` and `preempted_ms` are `total_ms`. Of a request that was ended
    before this process learned of its admission, all is queue.
    """
    output, deliveries = max(prompts, key=lambda one: _end_s(_last(one[0])))
    last = _last(output)
    times = last or _NOTHING
    first_s = times.first_token_s if last is not None else deliveries.first_s
    until_s = end_s if first_s is None else min(first_s, end_s)
    admitted_s = _admitted_s(output)
    queue_end_s = until_s if admitted_s is None else min(admitted_s, until_s)
    decode_preempted_s = times.preempted_s - times.prefill_preempted_s
    seconds = {
        "queue": queue_end_s - arrival_s,
        "prefill": until_s - queue_end_s - times.prefill_preempted_s,
        "decode": end_s - until_s - decode_preempted_s,
        "preempted": times.preempted_s,
        "total": end_s - arrival_s,
        "interference": times.prefill_interference_s + times.decode_interference_s,
        "interference_prefill": times.prefill_interference_s,
        "interference_decode": times.decode_interference_s,
        "grammar": times.grammar_s,
        "fetch": times.fetch_s,
        "cached_saved": times.cached_saved_s,
        "drafting_saved": times.drafting_saved_s,
        "ideal": times.ideal_s,
    }
    return {f"{name}_ms": value * 1e3 for name, value in seconds.items()}


def server_timing(timings: Mapping[str, float], complete: bool) -> str:
    """Return the Server-Timing header. While a request runs, it has only the parts that are over."""
    names = _PARTS if complete else ("queue", "prefill")
    others = [name for name in _RECEIPT if complete and timings[f"{name}_ms"]]
    return ", ".join(f"{name};dur={timings[f'{name}_ms']:g}" for name in (*names, *others))


def logged(timings: Mapping[str, float]) -> dict[str, float]:
    """Return the fields of a log line. What others added is there if it is anything."""
    fields = {f"{name}_ms": round(timings[f"{name}_ms"], 1) for name in _PARTS[:-1]}
    interference_ms = round(timings["interference_ms"], 1)
    fields |= {name: timings[name] for name in ("replica",) if name in timings}
    return fields | ({"interference_ms": interference_ms} if interference_ms else {})


def _last(output: RequestOutput) -> RequestMetrics | None:
    """Return the times of the choice that ended last, or has not; None if they are not known."""
    return max((one.metrics for one in output.outputs), key=_end_s)


def _end_s(times: RequestMetrics | None) -> float:
    return math.inf if times is None or times.finished_s is None else times.finished_s


def _admitted_s(output: RequestOutput) -> float | None:
    known = (one.metrics.admitted_s for one in output.outputs if one.metrics is not None)
    return min((time_s for time_s in known if time_s is not None), default=None)
