"""The goal for the time between tokens, on a virtual clock: it is kept, and at no cost in throughput."""

from __future__ import annotations

import random

import pytest

from quire.bench.metrics import percentile
from quire.bench.workload import Request
from quire.engine.caches import BlockGroup
from quire.engine.scheduler import Scheduler
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.simulation.clients import Bounds
from quire.simulation.shares import slower
from quire.simulation.simulate import simulate

# About SmolLM2 135M in int4 on two cores: weights 2.3 ms, 0.35 ms a token, and attention.
FEATURES = (*LEADING, Feature("positions"), Feature("pairs"))
STAGES = (
    Stage((2.3e-3, 0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 3.5e-4, 0.0, 0.0, 0.0)),
    Stage((0.0, 0.0, 0.0, 0.0, 1e-6, 0.0), (0.0, 0.0, 0.0, 0.0, 0.0, 3e-7)),
)
LAW = StepLaw(FEATURES, STAGES, (3e-4, 1e-4, 0.0, 0.0, 0.0, 0.0), (), host_s=5e-4, tail=1.0)
NUM_STREAMS, CHUNKS = 16, (16, 32, 48, 64, 96, 112, 120, 128, 160, 256)


def load() -> list[Request]:
    """Streams, and prompts of 2,048 tokens with short answers, as one request in five."""
    drawn = random.Random(5)
    sizes = [(2048, 8) if index % 5 == 4 else (64, drawn.randint(100, 300)) for index in range(60)]
    return [Request([index] * size, count) for index, (size, count) in enumerate(sizes)]


def run(law: StepLaw, calibrated: StepLaw | None = None, **options) -> tuple[float, float]:
    """Return the 99th percentile of gaps and the tokens per second, of a machine whose steps follow `law`."""
    scheduler = Scheduler(
        groups=[BlockGroup(4096)],
        block_size=16,
        max_num_seqs=NUM_STREAMS + 1,
        max_num_batched_tokens=512,
        max_model_len=4096,
        enable_prefix_caching=False,
        **options,
    )
    if calibrated is not None:
        scheduler.calibrate(calibrated)
    done = simulate(scheduler, law, load(), bounds=Bounds(max_concurrency=NUM_STREAMS + 1), is_open=False)
    gaps = sorted(end - begin for one in done.timelines for begin, end in one.gaps())
    num_tokens = sum(one.num_prompt_tokens + one.num_output_tokens for one in done.timelines)
    return percentile(gaps, 99), num_tokens / done.end_s


@pytest.mark.parametrize("goal_s", [0.03, 0.06, 0.12])
def test_it_is_kept_with_the_throughput_of_the_best_fixed_chunk(goal_s):
    gap_s, per_s = run(LAW, itl_goal_s=goal_s, calibrated=LAW)
    assert gap_s <= goal_s
    fixed = [run(LAW, max_num_prefill_tokens=chunk) for chunk in CHUNKS]
    best = max(fixed_per_s for fixed_gap_s, fixed_per_s in fixed if fixed_gap_s <= goal_s)
    assert per_s >= 0.98 * best
    assert max(fixed_gap_s for fixed_gap_s, _ in fixed) > goal_s


def test_the_tail_makes_up_for_steps_slower_than_the_law():
    steps = slower(LAW, 1.3)
    assert run(steps, itl_goal_s=0.06, calibrated=LAW)[0] > 0.06
    assert run(steps, itl_goal_s=0.06, calibrated=LAW._replace(tail=1.3))[0] <= 0.06


def test_a_goal_too_short_for_all_sequences_is_kept_by_fewer():
    before_s, per_s = run(LAW, itl_goal_s=0.012)
    gap_s, kept_per_s = run(LAW, itl_goal_s=0.012, calibrated=LAW)
    assert before_s > 0.05
    assert 0.009 < gap_s <= 0.012
    assert kept_per_s > 0.75 * per_s
