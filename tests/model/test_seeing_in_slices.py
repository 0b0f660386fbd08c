"""Images that are encoded in slices beside others' tokens: the same bits, and recordings of it replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from seeing import WORK, image
from test_engine_caches import BIRD, CAT, DOG, MOUSE, SEEING, VISION, look, make, one_by_one, see

from quire.backends.backend import Backend, Capacity
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.step_law import Stage, StepLaw
from quire.program import Program
from quire.program.features import LEADING
from quire.recording.chunks import ChunkKind, JournalLimits
from quire.recording.incident import GroupShape, Header, Incident, read_incident, write_incident
from quire.recording.journal import Journal, JournaledScheduler
from quire.recording.replay import replay
from quire.types import ImageSlice, NewRequest, Step

LAW = StepLaw(LEADING, (Stage((1e-3, 0, 0, 0), (0, 0, 1e-4, 0)),), (1e-4, 0, 0, 0), ())
NewBackend = Callable[[Program, Capacity], Backend]
BESIDE = {"max_num_batched_tokens": 24, "max_num_prefill_tokens": 7}
SCHEDULES: dict[str, dict[str, Any]] = {
    "slices": {},
    "two steps in flight": {"max_steps_in_flight": 2},
    "few blocks": {"num_blocks": 10, "num_spare_blocks": 0},
    "from the cache": {"enable_prefix_caching": True},
}
FIRST = image(VISION, 0, seed=5)  # before any text
REQUESTS = [look(), look(CAT), look(DOG, MOUSE), look(FIRST, BIRD), look(CAT, MOUSE)]


def slices_of(engine: Engine) -> list[ImageSlice]:
    """The slices of the steps that an engine will launch.

    They are small where others generate, whose first row here is of one token.
    """
    found: list[ImageSlice] = []
    launch = engine.runner.launch

    def watched(step: Step) -> Any:
        if (part := step.image_slice) is not None:
            found.append(part)
            assert part.end - part.begin <= (8 if step.rows[0].count == 1 else 24)
        return launch(step)

    engine.runner.launch = watched  # type: ignore[method-assign]
    return found


def answers(
    engine: Engine, requests: list[NewRequest], doing: Callable[[int], None] = lambda step: None
) -> Any:
    """The log-probabilities of all answers by request, which come one after the other."""
    found: dict[str, tuple[Any, ...]] = {one.request_id: () for one in requests}
    waiting, number = list(requests), 0
    while waiting or engine.has_work:
        if waiting and number % 3 == 0:
            engine.add(waiting.pop(0))
        doing(number)
        for output in engine.step():
            found[output.request_id] += output.logprobs
        engine.scheduler.check()
        number += 1
    return found


def each_alone(backend: NewBackend) -> dict[str, tuple[Any, ...]]:
    """What each request gets whose images are encoded at once."""
    return {
        output.request_id: output.logprobs
        for request in REQUESTS
        for output in one_by_one(make(SEEING, backend=backend), [request])
    }


def check_schedule(schedule: str, backend: NewBackend) -> None:
    limits = {"enable_prefix_caching": False} | BESIDE | SCHEDULES[schedule]
    engine = make(SEEING, backend=backend, **limits)
    slices = slices_of(engine)
    assert answers(engine, REQUESTS) == each_alone(backend)
    assert len(slices) > WORK // 8
    assert WORK in [one.end for one in slices]
    preempted = sum(record.num_preemptions for record in engine.records)
    assert (preempted > 0) == (schedule == "few blocks")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slices_in_any_schedule(schedule: str) -> None:
    check_schedule(schedule, see)


def test_aborted_while_its_image_is_encoded() -> None:
    engine = make(SEEING, backend=see, enable_prefix_caching=False, **BESIDE)
    slices, aborted = slices_of(engine), list[str]()

    def abort(_: int) -> None:
        if slices and slices[-1].end < WORK and len(aborted) < 2 and slices[-1].request_id not in aborted:
            aborted.append(slices[-1].request_id)
            engine.abort(aborted[-1])

    found, expected = answers(engine, REQUESTS, abort), each_alone(see)
    assert len(aborted) == 2
    assert all(found[name] == expected[name] for name in expected if name not in aborted)


def test_time_of_encoding_is_interference_for_others_only() -> None:
    """Their receipts have all of it, by prompts; the law of steps is not fitted with it."""
    engine = make(SEEING, backend=see, enable_prefix_caching=False, **BESIDE)
    engine.scheduler.calibrate(LAW)
    outputs = []
    engine.add(look())
    for _ in range(3):
        outputs += engine.step()
    engine.records.clear()
    engine.add(look(CAT))
    while engine.has_work:
        outputs += engine.step()
    spent_s = sum(record.image_s for record in engine.records)
    assert sum(record.image_s > 0 for record in engine.records) == WORK // 7 + 1
    text, seen = (o.metrics for o in outputs if o.finish_reason is not None and o.metrics is not None)
    assert spent_s > 0
    assert text.prefill_interference_s >= spent_s
    assert seen.prefill_interference_s == 0


@pytest.mark.parametrize("contents", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_recording_replays(contents: bool, in_flight: int, tmp_path: Path) -> None:
    """Also one that is redacted, from the beginning or from a later epoch."""
    limits = {"max_num_seqs": 8, "max_model_len": 300, "max_steps_in_flight": in_flight} | BESIDE
    chunks: list[tuple[bytes, ChunkKind]] = []
    journal = Journal(JournalLimits(3000, 1e9, contents), lambda *chunk: chunks.append(chunk), b"key")
    engine = make(SEEING, backend=see, **limits)
    groups = engine.scheduler.caches.groups
    scheduler = JournaledScheduler(journal, groups=groups, block_size=16, **limits)
    engine = Engine(scheduler, engine.runner)
    slices = slices_of(engine)
    requests = [replace(one, request_id=str(number)) for number, one in enumerate([*REQUESTS, *REQUESTS[1:]])]
    answers(engine, requests)
    journal.flush()
    assert len(slices) > 10
    begins = [index for index, (_, kind) in enumerate(chunks) if kind == "epoch"]
    assert len(begins) > 1
    for first in (begins[0], Random(0).choice(begins[1:])):
        header = Header(
            quire="", build="", arithmetic="", checkpoint="", contents=contents, config=EngineConfig(),
            groups=tuple(map(GroupShape.of, groups)), arguments=scheduler.arguments, vocab_size=64,
        )  # fmt: skip
        path = tmp_path / f"{first}.quire-incident"
        write_incident(
            path, Incident("test", 0.0), msgspec.msgpack.encode(header), [c for c, _ in chunks[first:]]
        )
        runner = make(SEEING, backend=see, **limits).runner if contents else None
        result = replay(read_incident(path), runner)
        assert result.equal, result.difference
        assert result.num_steps
