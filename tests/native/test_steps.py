"""Steps in the native core: in what order they compute, what fails with one that fails, how they end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowered import ISAS, plain, planned, tensors
from tiny import VOCAB, random_weights, tiny

from quire.backends.native import _core
from quire.backends.native.backend import NativeBackend
from quire.backends.native.weights import load_packed
from quire.backends.slots import Deferred
from quire.engine.caches import BlockGroup
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.errors import EngineDead
from quire.models import Model
from quire.program.passes import fuse
from quire.runner.runner import Runner
from quire.sampling_params import SamplingParams
from quire.types import Admission, Failure, Grant, NewRequest, Row, RowResult, Step, StepResult

BLOCK = 16
SPOILED = 5  # a token whose embedding is NaN, and which is never chosen
PARAMS = SamplingParams(
    temperature=1.2, seed=3, logprobs=-1, repetition_penalty=1.3, logit_bias={SPOILED: -100}
)
Masks = Mapping[int, Any]


def model() -> Model:
    return tiny("llama-dynamic")  # rope frequencies come with admissions


def backend(ahead: bool = True) -> NativeBackend:
    program = plain(fuse(model().program))
    weights = random_weights(program)
    weights["model.embed_tokens.weight"].array[SPOILED] = np.nan
    packed = load_packed(planned(program, tensors(weights, "f32")), isa=ISAS[0], nodes=_core.Nodes(2))
    return NativeBackend(
        program,
        packed.matrices,
        packed.vectors,
        num_blocks=[64],
        block_size=BLOCK,
        kv_cache_dtype="float32",
        isa=ISAS[0],
        nodes=_core.Nodes(2),
        max_num_seqs=4,
        ahead=ahead,
    )


@dataclass
class Plans:
    """Makes steps with promised tokens: every row gives one."""

    computed: dict[int, int] = field(default_factory=dict)  # by slot
    granted: dict[int, int] = field(default_factory=dict)
    index: int = 0

    def step(
        self,
        *slots: int,
        admit: Mapping[int, Sequence[int]] | None = None,
        release: tuple[int, ...] = (),
        drafted: Mapping[int, tuple[int, ...]] | None = None,
    ) -> Step:
        """A token for each of these slots, those admitted among them."""
        admitted = []
        for slot, prompt in (admit or {}).items():
            variant = model().context_variant(len(prompt) * 4)
            admitted.append(Admission(slot, f"r{slot}", 0, PARAMS, (), len(prompt), variant))
            self.computed[slot] = self.granted[slot] = 0
        rows, grants = [], []
        for slot in slots:
            known = tuple((admit or {}).get(slot, ()))
            guesses = (drafted or {}).get(slot, ())
            start, count = self.computed[slot], (len(known) or 1) + len(guesses)
            rows.append(Row(slot, start, count, known, True, 1 + len(guesses), guesses))
            self.computed[slot] = start + count
            grants += self.grants(slot, start + count)
        self.index += 1
        return Step(self.index - 1, tuple(rows), tuple(admitted), tuple(grants), release)

    def grants(self, slot: int, num_tokens: int) -> list[Grant]:
        """Of every slot's blocks the last comes first; whoever gets the slot gets the same."""
        first, end = self.granted[slot], -(-num_tokens // BLOCK)
        self.granted[slot] = end
        ids = tuple(16 * slot + 15 - i for i in range(first, end))
        return [Grant(slot, 0, first, ids)] if ids else []


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(SPOILED + 1, VOCAB, length).tolist()


def history() -> list[Step]:
    """Slots are taken, released and taken again in the very next step, and grow into new blocks."""
    plans = Plans()
    steps = [
        plans.step(0, 1, admit={0: prompt(31), 1: prompt(3, 1)}),
        plans.step(0, 1),
        plans.step(1, 2, 0, admit={2: prompt(40, 2)}),
        plans.step(0, 2, admit={0: prompt(9, 3)}, release=(0, 1)),
        plans.step(0, 1, 2, admit={1: prompt(17, 4)}),
    ]
    return steps + [plans.step(2, 1, 0) for _ in range(20)]


def one_by_one(steps: Sequence[Step], masks: Mapping[int, Masks] | None = None) -> list[Any]:
    """The rows' results, each step collected before the next is launched."""
    found, asked, own = [], masks or {}, backend(ahead=False)
    for step in steps:
        mask = asked.get(step.index)
        found.append(own.launch(step, None if mask is None else (lambda m=mask: m)).result().rows)
    return found


def mask_of(*token_ids: int) -> np.ndarray:
    return np.array([sum(1 << i for i in token_ids)], np.uint32)


def test_steps_in_flight_give_what_they_give_one_by_one() -> None:
    """To the bits of all log-probabilities: what a step brings is applied when it begins to compute."""
    steps = history()
    own = backend()
    pending = [own.launch(step) for step in steps]
    results = [one.result() for one in pending]
    assert [result.rows for result in results] == one_by_one(steps)
    ends = [0.0, *(result.ended_s for result in results)]
    assert all(end <= result.began_s < result.ended_s for end, result in zip(ends, results, strict=False))


def test_steps_after_one_with_masks_wait_for_it() -> None:
    steps, calls = history(), []
    masks = {4: {1: [mask_of(7, 9)]}, 6: {0: [mask_of(8)], 2: [mask_of(30, 31)]}}

    def of(index: int) -> Any:
        return lambda: calls.append(index) or masks[index]

    own = backend()
    pending = [own.launch(step, of(step.index) if step.index in masks else None) for step in steps[:8]]
    assert [isinstance(one, Deferred) for one in pending] == [False] * 4 + [True] * 4
    found = [one.result().rows for one in pending]
    assert calls == [4, 6]
    assert isinstance(own.launch(steps[8], of(6)), Deferred)
    assert calls == [4, 6]
    assert found == one_by_one(steps[:8], masks)
    assert found[4][1].token_ids[0] in (7, 9)
    assert found[6][0].token_ids == (8,)
    # When all that was deferred is collected, steps compute ahead again.
    own = backend()
    own.launch(steps[0], lambda: {0: [mask_of(7)]}).result()
    assert not isinstance(own.launch(steps[1]), Deferred)


def test_a_deferred_step_computes_after_those_launched_before() -> None:
    """Also if it is collected first."""
    steps, masks = history()[:4], {0: [mask_of(9, 10, 11)]}
    own = backend()
    *before, last = [own.launch(step) for step in steps[:3]] + [own.launch(steps[3], lambda: masks)]
    found = [last.result().rows, *(one.result().rows for one in before)]
    assert [*found[1:], found[0]] == one_by_one(steps, {3: masks})


def test_positions_without_a_mask_give_no_token() -> None:
    """Of a row with drafts whose grammar ends before them."""
    plans = Plans()
    own = backend()
    first = own.launch(plans.step(0, 1, admit={0: prompt(5), 1: prompt(5)})).result().rows
    guess = one_by_one([plans.step(2, admit={2: [*prompt(5), *first[0].token_ids]})])[0][0].token_ids
    drafted = {0: (*guess, 9), 1: (*guess, 9)}
    step = plans.step(0, 1, drafted=drafted)
    found = own.launch(step, lambda: {0: [mask_of(*guess, 8)]}).result().rows
    assert len(found[0].token_ids) == 1
    assert found[0].token_ids[0] in (*guess, 8)
    assert found[0].token_ids == found[1].token_ids[:1] == guess
    assert len(found[1].token_ids) >= 2


def test_a_row_without_a_mask_fails_alone() -> None:
    """Why its grammar cannot go on is told; a row of it that is in flight is computed for nothing."""
    steps, lost = history()[:4], Failure("no mask")
    own = backend()
    pending = [own.launch(steps[0]), own.launch(steps[1], lambda: {1: lost, 0: [mask_of(8)]})]
    pending += [own.launch(step) for step in steps[2:]]
    found = [one.result().rows for one in pending]
    assert found[1][1] == RowResult(error=lost)
    assert found[1][0].token_ids == (8,)
    assert all(row.token_ids for row in (*found[2], *found[3]))
    whole = one_by_one(steps, {1: {0: [mask_of(8)]}})
    assert found[2][1:] == whole[2][1:]


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="one bit per token"):
        backend().launch(history()[0], lambda: {0: [np.zeros(2, np.uint32)]}).result()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_row_in_flight_behind_one_that_failed_is_dropped(ahead: bool) -> None:
    """Logits that are not numbers are the error of their request alone, though more of it is in flight."""
    plans = Plans()
    own = backend(ahead)
    steps = [plans.step(0, 1, admit={0: [SPOILED], 1: prompt(3)}), plans.step(0, 1), plans.step(0, 1)]
    steps.append(plans.step(0, 1, admit={0: prompt(4)}, release=(0,)))
    found = [one.result().rows for one in [own.launch(step) for step in steps]]
    assert [row[0].error is None for row in found] == [False, False, False, True]
    assert "NaN" in found[0][0].error.message
    plans = Plans()
    alone = [plans.step(1, admit={1: prompt(3)}), *(plans.step(1) for _ in range(3))]
    assert [rows[1] for rows in found] == [rows[0] for rows in one_by_one(alone)]


# Where the time of a step goes


def test_the_time_of_masks_and_of_sampling_is_told() -> None:
    """By a step in the caller's thread, and by one ahead, which has no masks."""

    def masks() -> Masks:
        time.sleep(0.02)
        return {0: [mask_of(7)]}

    first, second = history()[:2]
    own = backend()
    deferred, ahead = own.launch(first, masks).result(), own.launch(second).result()
    assert deferred.mask_s >= 0.02 > ahead.mask_s
    for result in (deferred, ahead):
        assert result.sampling_s > 0
        assert result.mask_s + result.sampling_s < result.ended_s - result.began_s


BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@pytest.mark.parametrize("ahead", [True, False])
def test_a_core_that_another_program_takes_is_waited_for(ahead: bool) -> None:
    """Whichever of the threads loses it; what a thread sleeps or waits for others is not counted."""
    plans, own = Plans(), backend(ahead)
    admitted = plans.step(0, admit={0: prompt(1)})
    assert own.launch(admitted).result().core_wait_s < 60  # from when its threads began
    for core in sorted(os.sched_getaffinity(0)):
        with subprocess.Popen([sys.executable, "-c", BUSY, str(core)]) as busy:
            try:
                waited = steps_until_waited(own, plans)
            finally:
                busy.kill()
        assert waited.core_wait_s > 0.0005
        assert waited.core_wait_s <= waited.ended_s - waited.began_s - waited.mask_s


def steps_until_waited(own: NativeBackend, plans: Plans) -> StepResult:
    """Compute prompts until a step has waited for a core."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        result = own.launch(
            plans.step(1, admit={1: prompt(200)}, release=(1,) * (1 in plans.computed))
        ).result()
        if result.core_wait_s > 0.0005:
            return result
    raise AssertionError("no step waited")


# A step that fails


def beyond(step: Step) -> Step:
    """The step with a row that computes an unknown token."""
    first, *others = step.rows
    return replace(step, rows=(first._replace(start=first.start + 1), *others))


@pytest.mark.parametrize("ahead", [True, False])
def test_steps_fail_after_one_that_failed(ahead: bool) -> None:
    """Slots are in an unknown state then; nobody waits forever, and nothing is computed of them."""
    steps, own = history(), backend(ahead)
    pending = [own.launch(beyond(step) if step.index == 2 else step) for step in steps[:5]]
    assert [one.result().rows for one in pending[:2]] == one_by_one(steps[:2])
    fresh = Plans().step(3, admit={3: prompt(4)})  # which could be computed
    later = [own.launch(fresh), own.launch(steps[5], dict)]
    for one in (*pending[2:], *later):
        with pytest.raises(IndexError, match="a row computes unknown tokens"):
            one.result()


def num_threads() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/task"))


class Spoiling:
    """A backend whose fourth step is spoiled."""

    name = "spoiling"

    def __init__(self) -> None:
        self.inner = backend()

    def launch(self, step: Step, masks: Any = None) -> Any:
        return self.inner.launch(beyond(step) if step.index == 3 else step, masks)

    def execute(self, batch: Any) -> Any:
        raise NotImplementedError


def test_an_engine_ends_with_the_error_of_its_step() -> None:
    before = num_threads()
    scheduler = Scheduler(
        groups=[BlockGroup(64)],
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        max_steps_in_flight=2,
    )
    engine = Engine(scheduler, Runner(Spoiling()))
    engine.add(NewRequest("a", tuple(prompt(5)), PARAMS))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert sum(len(output.token_ids) for output in outputs) == 3
    for _ in range(2):
        with pytest.raises(EngineDead, match="IndexError: a row computes unknown tokens"):
            engine.step()
    assert num_threads() > before
    del engine
    assert num_threads() == before


# The end


def test_dropping_a_backend_ends_its_threads() -> None:
    before = num_threads()
    own = backend()
    pending = [own.launch(step) for step in history()]
    pending[0].result()
    del own, pending
    assert num_threads() == before


SCRIPT = """
import sys
sys.path[:0] = {paths}
import conftest  # which may name another core
from test_steps import backend, history
own = backend()
pending = [own.launch(step) for step in history()]
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "pending[3].result()",
        "own.itself = own; own.pending = pending; del own, pending",
    ],
)
def test_a_program_ends_with_steps_in_flight(end: str) -> None:
    here = Path(__file__).parent
    paths = [str(folder) for folder in (here, here.parent / "model", here.parent)]
    code = SCRIPT.format(paths=paths, end=end)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
