"""Traces of random histories: the slices of a request last as long as its receipt says."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from hypothesis import HealthCheck, settings
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from test_recording import Recorded, RedactedMachine
from test_scheduler_machine import SchedulerMachine
from test_track_events import slices_of

from quire.engine.caches import BlockGroup
from quire.engine.epochs import EpochScheduler
from quire.recording.replay import replay
from quire.recording.run_trace import RunTrace
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, Output, RequestMetrics, RowResult, Step, StepResult

PHASES = ("queue", "prefill", "decode", "preempted")


class Watched(RunTrace):
    """A trace, and the receipts of what ended meanwhile."""

    def __init__(self, since_s: float = 0.0) -> None:
        super().__init__(since_s)
        self.receipts: dict[str, RequestMetrics] = {}

    def ended(self, outputs: Iterable[Output]) -> None:
        super().ended(outputs)
        for output in outputs:
            if output.metrics is not None:
                choice = f", choice {output.sequence}" if output.sequence else ""
                self.receipts[f"request {output.request_id}{choice}"] = output.metrics


def phases_of(receipt: RequestMetrics) -> dict[str, float]:
    """Return the seconds of each phase as the receipt states them."""
    end_s = receipt.finished_s
    assert end_s is not None
    admitted_s = end_s if receipt.admitted_s is None else receipt.admitted_s
    first_s = end_s if receipt.first_token_s is None else receipt.first_token_s
    early_s = receipt.prefill_preempted_s
    return {
        "queue": admitted_s - receipt.arrival_s,
        "prefill": first_s - admitted_s - early_s,
        "decode": end_s - first_s - (receipt.preempted_s - early_s),
        "preempted": receipt.preempted_s,
    }


class TracedMachine(RedactedMachine):
    def teardown(self) -> None:
        SchedulerMachine.teardown(self)
        if not hasattr(self, "scheduler"):
            return
        self.recorded.journal.flush()
        recorded: Recorded = self.recorded
        for recording in recorded.recordings(self.scheduler)[:1]:
            trace = Watched()
            assert replay(recording, None, observer=trace).equal
            self.check_trace(trace)

    def check_trace(self, trace: Watched) -> None:
        found = slices_of(Trace.FromString(trace.encoded()))
        sums: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
        nested: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))  # by lane
        for track, name, begin_ns, end_ns, depth in found:
            if track.startswith("lane") and depth:
                nested[track][name] += (end_ns - begin_ns) / 1e9
            elif track.startswith("lane"):
                sums[name] = nested.pop(track, sums[name])
        for name, receipt in trace.receipts.items():
            for phase, seconds in phases_of(receipt).items():
                assert math.isclose(sums[name][phase], seconds, abs_tol=1e-7), (name, phase, receipt)


TestTracedMachine = TracedMachine.TestCase
TestTracedMachine.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_a_row_is_that_of_the_sequence_it_was_planned_for():
    """With two steps in flight, the row too many of an ended one computes when its slot is given on."""
    scheduler = EpochScheduler(
        groups=[BlockGroup(20)],
        block_size=4,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=20,
        max_steps_in_flight=2,
    )
    params = SamplingParams(max_tokens=8)
    for number in range(2):
        scheduler.add(NewRequest(str(number), (1, 2, 3), params, eos_token_ids=(9,)))
    trace, planned, now = RunTrace(), list[Step](), 0.0
    while scheduler.has_work:
        while len(planned) < 2 and (step := scheduler.schedule(now)) is not None:
            trace.planned(now, step)
            planned.append(step)
        step, sequences = planned.pop(0), scheduler.oldest
        result = StepResult((RowResult((9,)),), now, now + 1)
        trace.committing(sequences, now + 1)
        outputs = scheduler.commit(step, result, now + 1)
        trace.committing(sequences, now + 1)
        trace.committed(now + 1, step, result, scheduler)
        trace.ended(outputs)
        now += 1
    rows = [
        (name, begin_ns // 10**9)
        for track, name, begin_ns, _, depth in slices_of(Trace.FromString(trace.encoded()))
        if track == "slot 0" and not depth
    ]
    assert rows == [("request 0", 0), ("request 1", 2)]
