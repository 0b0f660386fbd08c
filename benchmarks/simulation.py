"""Errors of simulations: of published runs, a device that sleeps by a known law, and runs on this machine.

    python benchmarks/simulation.py --published     both runs of vLLM in ../shared/data/perf: fitted on the
                                                    first half of their requests, tested on the other
    python benchmarks/simulation.py --sleep         an engine on the machine's clock whose steps sleep
    python benchmarks/simulation.py --live          a server of s135 int4 at 0.3, 0.6 and 0.9 of saturation,
                                                    several times in turns: fitted on the first half of the
                                                    requests, tested on the other; the spread beside the error
    python benchmarks/simulation.py --speed         6,000 conversations of the Azure trace

Errors are those of mean latencies, simulated over measured.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import live_runs
from published_runs import RUNS, read_run
from sleeping_runner import SleepingRunner

from quire.bench.metrics import Timeline
from quire.bench.report import columns
from quire.bench.workload import (
    Lengths,
    Request,
    poisson,
    random_requests,
    read_trace,
    trace_requests,
)
from quire.engine.caches import BlockGroup
from quire.engine.engine import Engine, request_limits
from quire.engine.in_process import EngineThread
from quire.engine.scheduler import Scheduler
from quire.engine.status import Facts
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.sampling_params import SamplingParams
from quire.simulation.fit import Latency, relative_errors
from quire.simulation.prompts import BlockVocabulary
from quire.simulation.simulate import simulate
from quire.types import NewRequest

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
_FEATURES = (*LEADING, Feature("positions"))
# A step takes at least 20 ms, so that what the machine adds to a sleep is small beside it.
_STAGE = Stage((0.02, 0.0, 0.0, 0.0, 1e-6), (0.0, 0.0, 2e-4, 0.0, 0.0))
SLEEPING = StepLaw(_FEATURES, (_STAGE,), (1e-3, 3e-4, 0.0, 0.0, 0.0), (_STAGE,))
SLEEP_REQUESTS, SLEEP_RATE = 120, 4.0


def published() -> None:
    """Print the errors of both runs."""
    rows = [["run", "fitted", "TTFT", "TPOT", "measured TTFT, TPOT", "s simulated in"]]
    for name in RUNS:
        run = read_run(DATA, name)
        count = len(run.requests) // 2
        shares = run.fit(count)
        begin_s = time.perf_counter()
        done = run.simulate(shares)
        took_s = time.perf_counter() - begin_s
        found = [Latency.of(one) for one in done.timelines]
        for title, part in (("first half", slice(count)), ("other half", slice(count, None))):
            error = relative_errors(found[part], run.measured[part])
            means = _mean(run.measured[part])
            measured = f"{means.ttft_s:.2f} s, {1e3 * means.tpot_s:.1f} ms"
            shown = f"{done.end_s:.0f} in {took_s:.2f}"
            rows.append([name, title, f"{error.ttft_s:+.1%}", f"{error.tpot_s:+.1%}", measured, shown])
        print(f"{name}: {shares}", file=sys.stderr)
    print(columns(rows))


def _mean(latencies: Iterable[Latency]) -> Latency:
    return Latency(*(sum(values) / len(values) for values in zip(*latencies, strict=True)))


def _scheduler(max_steps_in_flight: int) -> Scheduler:
    return Scheduler(
        groups=[BlockGroup(4096)],
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=2048,
        max_steps_in_flight=max_steps_in_flight,
    )


def sleep() -> None:
    """Print the errors for one and two steps in flight, on the second half of the requests.

    The time between two steps is measured on the first half of the steps: it is the host's, not the device's.
    """
    drawn = random_requests(Lengths(150, 40, 0.5), BlockVocabulary(), 1)
    requests = list(islice(poisson(drawn, SLEEP_RATE, 1), SLEEP_REQUESTS))
    half = slice(SLEEP_REQUESTS // 2, None)
    rows = [["steps in flight", "TTFT", "TPOT", "measured TTFT, TPOT", "between two steps"]]
    for in_flight in (1, 2):
        engine = Engine(
            _scheduler(in_flight), SleepingRunner(SLEEPING, time.monotonic, time.sleep), num_records=10**6
        )
        live = [Latency.of(one) for one in asyncio.run(_ask(engine, requests))][half]
        idle = [record.idle_s for record in engine.records][: len(engine.records) // 2]
        law = SLEEPING._replace(host_s=sum(idle) / len(idle))
        found = [Latency.of(one) for one in simulate(_scheduler(in_flight), law, requests).timelines][half]
        error, means = relative_errors(found, live), _mean(live)
        measured = f"{1e3 * means.ttft_s:.1f} ms, {1e3 * means.tpot_s:.2f} ms"
        host = f"{1e6 * law.host_s:.0f} µs"
        rows.append([str(in_flight), f"{error.ttft_s:+.2%}", f"{error.tpot_s:+.2%}", measured, host])
    print(columns(rows))


async def _ask(engine: Engine, requests: list[Request]) -> list[Timeline]:
    """Send an open loop to an engine in a thread of its own."""
    client = EngineThread(engine, Facts({}, request_limits(engine.scheduler, None), 2048))
    begin_s = time.monotonic() + 0.1

    async def one(index: int, request: Request) -> Timeline:
        await asyncio.sleep(begin_s + request.at_s - time.monotonic())
        timeline = Timeline(time.monotonic())
        params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
        prompt = tuple(one for one in request.content if isinstance(one, int))
        stream = client.submit(NewRequest(str(index), prompt, params, timeline.sent_s))
        while timeline.num_output_tokens < request.num_output_tokens:
            for output in await stream.get():
                timeline.chunk_s.append(time.monotonic())
                timeline.num_output_tokens += len(output.token_ids)
        return timeline

    timelines = await asyncio.gather(*(one(*numbered) for numbered in enumerate(requests)))
    await client.close()
    return timelines


def speed() -> None:
    """Print how long a long trace takes."""
    trace = read_trace(DATA / "traces" / "AzureLLMInferenceTrace_conv.csv.gz")[:6000]
    run = read_run(DATA, next(iter(RUNS)))
    law = run.roof
    begin_s = time.perf_counter()
    requests = trace_requests(trace, BlockVocabulary(), 0, speed=1.0, longest=None)
    done = simulate(run.scheduler(), law, requests)
    took_s = time.perf_counter() - begin_s
    tokens = sum(one.num_output_tokens for one in done.timelines)
    print(
        f"{len(done.timelines):,} conversations, {done.num_steps:,} steps, {tokens:,} tokens: "
        f"{done.end_s:,.0f} s simulated in {took_s:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("published", "sleep", "live", "speed"):
        parser.add_argument(f"--{name}", action="store_true")
    live_runs.add_options(parser)
    options = parser.parse_args()
    if options.published:
        published()
    if options.sleep:
        sleep()
    if options.speed:
        speed()
    if options.live:
        live_runs.main(options)


if __name__ == "__main__":
    main()
