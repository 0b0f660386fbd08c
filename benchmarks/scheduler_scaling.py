"""The scheduler's own time a step, against the number of running and of waiting requests.

    python benchmarks/scheduler_scaling.py [--policy fcfs|priority|fair]

Every row is a decode step: one token a request, contexts of a few hundred tokens, so that a block fills
every 16th step. The queue must not matter (it is only looked at), the rows may. Below, what one add, one
peek and one abort cost while the queue is long. No model runs. Times are CPU time of this thread: other
work on the machine does not count, but a processor that is shared or clocked down still shows.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from pathlib import Path

from quire.engine.caches import BlockGroup
from quire.engine.policy import WaitingQueue
from quire.engine.scheduler import Scheduler
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, RowResult, StepResult

RUNNING = (1, 16, 64, 256, 1024)
WAITING = (0, 1_000, 100_000)
NUM_PROMPT_TOKENS = 200
NUM_WARMUP, NUM_REPEATS = 20, 200
PARAMS = SamplingParams(max_tokens=10_000, ignore_eos=True)


def make_request(index: int) -> NewRequest:
    prompt = (index, *range(1, NUM_PROMPT_TOKENS))  # no two share a block
    return NewRequest(
        f"request-{index}",
        prompt,
        PARAMS,
        eos_token_ids=(2,),
        tenant=f"tenant-{index % 50}",
        priority=index % 3,
    )


def make_scheduler(num_running: int, num_waiting: int, policy: str) -> Scheduler:
    """A scheduler with `num_running` requests that decode and `num_waiting` that find no slot."""
    scheduler = Scheduler(
        groups=[BlockGroup(num_running * 40 + 1000)],
        block_size=16,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * NUM_PROMPT_TOKENS,
        max_model_len=16_384,
        policy=policy,
    )
    for index in range(num_running):
        scheduler.add(make_request(index))
    advance(scheduler)  # all prompts at once
    for index in range(num_running, num_running + num_waiting):
        scheduler.add(make_request(index))
    return scheduler


def advance(scheduler: Scheduler) -> tuple[float, float]:
    """One step; the seconds that schedule and commit took."""
    begin_s = time.thread_time()
    step = scheduler.schedule(0.0)
    scheduled_s = time.thread_time()
    assert step is not None
    result = StepResult(
        tuple(RowResult((1000 + step.index % 999,) if row.sample else ()) for row in step.rows)
    )
    execute_s = time.thread_time()
    scheduler.commit(step, result, 0.0)
    return scheduled_s - begin_s, time.thread_time() - execute_s


def measure_steps(num_running: int, num_waiting: int, policy: str) -> tuple[Scheduler, list[float]]:
    """Medians, and the 99th percentile of the sum, in milliseconds."""
    scheduler = make_scheduler(num_running, num_waiting, policy)
    gc.collect()
    for _ in range(NUM_WARMUP):
        advance(scheduler)
    times = [advance(scheduler) for _ in range(NUM_REPEATS)]
    assert scheduler.num_running == num_running
    assert scheduler.num_waiting == num_waiting
    sums = sorted(a + b for a, b in times)
    columns = [t[0] for t in times], [t[1] for t in times], sums
    return scheduler, [1e3 * statistics.median(c) for c in columns] + [1e3 * sums[int(0.99 * len(sums))]]


def measure_queue(scheduler: Scheduler, count: int = 2000) -> list[float]:
    """Microseconds of one add, one peek and one abort at the length that the queue has."""
    requests = [make_request(10_000_000 + index) for index in range(count)]
    queue: WaitingQueue = scheduler._queue
    begin_s = time.thread_time()
    for request in requests:
        scheduler.add(request)
    added_s = time.thread_time()
    for _ in requests:
        queue.peek()
    peeked_s = time.thread_time()
    for request in requests:
        scheduler.abort(request.request_id, 0.0)
    aborted_s = time.thread_time()
    return [1e6 * t / count for t in (added_s - begin_s, peeked_s - added_s, aborted_s - peeked_s)]


def machine() -> str:
    """Processor, cores and Python, for the head of the table."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{name}, {os.cpu_count()} cores (one used), Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="fcfs", choices=("fcfs", "priority", "fair"))
    policy = parser.parse_args().policy
    print(f"{machine()}; policy {policy}; median of {NUM_REPEATS} decode steps, CPU milliseconds\n")
    print(f"{'running':>8} {'waiting':>8} {'schedule':>9} {'commit':>9} {'both':>9} {'p99 both':>9}")
    queue_lines = []
    for num_running in RUNNING:
        for num_waiting in WAITING:
            scheduler, times = measure_steps(num_running, num_waiting, policy)
            print(f"{num_running:>8,} {num_waiting:>8,} " + " ".join(f"{t:>9.3f}" for t in times), flush=True)
            if num_running == RUNNING[-1]:
                queue_lines.append((num_waiting, measure_queue(scheduler)))
    print(f"\nmicroseconds of one call\n{'waiting':>8} {'add':>9} {'peek':>9} {'abort':>9}")
    for num_waiting, micros in queue_lines:
        print(f"{num_waiting:>8,} " + " ".join(f"{t:>9.2f}" for t in micros))


if __name__ == "__main__":
    main()
