"""Measure the cost of recording: in a step's planning and results, and in tokens a second of a served model.

    python benchmarks/recording.py                                  # the scheduler alone, without a model
    python benchmarks/recording.py --model FOLDER --quantization int4 --rounds 10

With a model two engines in processes of their own, one recorded and one not, answer the same requests in
turns; the ratio of each turn is paired, as the machine may be busy.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from functools import partial
from typing import Any

from quire.config import EngineConfig
from quire.engine.caches import BlockGroup
from quire.engine.scheduler import Scheduler
from quire.recording.chunks import JournalLimits
from quire.recording.journal import Journal, JournaledScheduler
from quire.recording.recorder import Recorder
from quire.sampling_params import SamplingParams
from quire.server.remote import RemoteEngine
from quire.types import NewRequest, RowResult, StepResult

PROMPT, OUTPUT = 128, 256


def requests(number: int, start: int = 0) -> list[NewRequest]:
    """Return requests that generate OUTPUT tokens each."""
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=1, detokenize=False)
    return [
        NewRequest(f"{start}-{i}", tuple(range(10 + i, 10 + i + PROMPT)), params, time.monotonic())
        for i in range(number)
    ]


def scheduling_s(create: Any, num_streams: int) -> float:
    """Return the seconds that planning and committing a decode step takes, the least of several."""
    scheduler: Scheduler = create(
        groups=[BlockGroup(8000)],
        block_size=16,
        max_num_seqs=num_streams,
        max_num_batched_tokens=num_streams * PROMPT,
        max_model_len=4096,
    )
    for one in requests(num_streams):
        scheduler.add(one)
    result, times = StepResult((RowResult((5,)),) * num_streams), []
    while scheduler.has_work:
        begin_s = time.perf_counter()
        step = scheduler.schedule(begin_s)
        if step is None:
            raise RuntimeError("no step was planned")
        scheduler.commit(step, result, begin_s)
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def show_scheduling() -> None:
    """Print the time of a step, and the bytes it takes, for several numbers of streams."""
    print("a decode step: planning and results, median of 255, least of 7 runs")
    for num_streams in (1, 16, 64):
        plain = min(scheduling_s(Scheduler, num_streams) for _ in range(7))
        for contents in (False, True):
            sizes: list[int] = []
            limits = JournalLimits(1 << 30, 1e9, contents)
            journal = Journal(limits, lambda chunk, kind, sizes=sizes: sizes.append(len(chunk)), b"key")
            recorded = min(scheduling_s(partial(JournaledScheduler, journal), num_streams) for _ in range(7))
            print(
                f"{num_streams:3d} streams, {'contents' if contents else 'redacted'}: {plain * 1e6:6.1f} us, "
                f"recorded {recorded * 1e6:6.1f} us (+{(recorded - plain) * 1e6:5.1f} us), "
                f"{statistics.median(sizes):.0f} bytes a step"
            )


async def serve(engine: RemoteEngine, num_streams: int, start: int) -> tuple[float, float]:
    """Answer requests; return output tokens per second, and processor time of this process in a step."""

    async def follow(new: NewRequest) -> None:
        stream, ended = engine.submit(new), False
        while not ended:
            ended = any(output.finish_reason for output in await stream.get())

    begin_s, used_s, steps = time.perf_counter(), time.process_time(), engine.status.steps
    await asyncio.gather(*map(follow, requests(num_streams, start)))
    used_s = (time.process_time() - used_s) / (engine.status.steps - steps)
    return num_streams * OUTPUT / (time.perf_counter() - begin_s), used_s


async def show_served(config: EngineConfig, num_streams: int, num_rounds: int) -> None:
    """Print tokens per second with and without recording, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        plain = RemoteEngine(config)
        recorded = RemoteEngine(config, recorder=Recorder(f"{folder}/incidents"))
        await plain.start()
        await recorded.start()
        pairs = []
        for number in range(num_rounds + 1):
            order = (plain, recorded) if number % 2 else (recorded, plain)
            found = {engine: await serve(engine, num_streams, number) for engine in order}
            if number:  # the first round warms up
                pairs.append((found[plain], found[recorded]))
                print(f"  {found[plain][0]:7.1f} tokens/s, recorded {found[recorded][0]:7.1f}", flush=True)
        ratios = sorted(recorded_speed / speed for (speed, _), (recorded_speed, _) in pairs)
        added_s = sorted(recorded_s - plain_s for (_, plain_s), (_, recorded_s) in pairs)
        print(
            f"{num_streams} streams: recorded / plain {statistics.median(ratios):.4f} "
            f"(median of {len(ratios)} pairs, {ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
        print(
            f"processor time of the server's process a step: +{statistics.median(added_s) * 1e6:.1f} us "
            f"({added_s[0] * 1e6:.1f} to {added_s[-1] * 1e6:.1f})"
        )
        await plain.close()
        await recorded.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or Hub id; without it only the scheduler is measured")
    parser.add_argument("--quantization")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    show_scheduling()
    if args.model:
        config = EngineConfig(
            model=args.model, quantization=args.quantization, max_num_seqs=64, max_model_len=PROMPT + OUTPUT
        )
        asyncio.run(show_served(config, args.streams, args.rounds))


if __name__ == "__main__":
    main()
