"""Random incidents replay bit for bit: on the demo model with grammars, and on windows and states."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from compiled import compiled
from test_engine_caches import make, mixed
from tiny import VOCAB

from quire.build import build
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.recording.chunks import ChunkKind, JournalLimits
from quire.recording.identity import header_of
from quire.recording.incident import GroupShape, Header, Incident, Recording, read_incident, write_incident
from quire.recording.journal import Journal, JournaledScheduler
from quire.recording.rebuild import check_build, rebuild
from quire.recording.replay import replay
from quire.sampling_params import SamplingParams
from quire.types import Draft, NewRequest

TIMES = int(os.environ.get("QUIRE_TEST_TIMES", "1"))
REGEX = "(one|two|three)( and (one|two|three)){2,5}"
SHARED = tuple(Random(0).choices(range(3, 32), k=40))


@pytest.fixture(scope="module")
def grammar() -> str:
    """As the engine gets it."""
    return compiled(REGEX)


def pool(seed: int, grammar: str, eos_token_ids: tuple[int, ...], vocab_size: int) -> list[NewRequest]:
    """Requests to choose from: asked again, they find cached blocks, and their answers can be drafted."""
    rng = Random(seed)
    requests = []
    for number in range(6):
        own = rng.choices(range(3, vocab_size), k=rng.randint(1, 9))
        prompt = (*SHARED[: rng.choice((0, 8, 20, 37))], *own)
        params = SamplingParams(
            n=rng.choice((1, 1, 3)),
            temperature=rng.choice((0.0, 0.8, 1.5)),
            max_tokens=rng.randint(4, 24),
            seed=number,
            logprobs=rng.choice((None, 0, 3)),
            prompt_logprobs=rng.choice((None, None, 1)),
            repetition_penalty=rng.choice((1.0, 1.2)),
        )
        ruled = grammar if number < 2 else ""
        requests.append(
            NewRequest(
                "", prompt, params, 0.0, tenant=rng.choice("ab"), priority=rng.randint(-1, 1),
                cache_salt=rng.choice(("", "", "s")), eos_token_ids=eos_token_ids, grammar=ruled,
            )
        )  # fmt: skip
    return requests


class Incidents:
    """An engine that is recorded while requests come, are drafted for, and are aborted at random."""

    def __init__(self, seed: int, contents: bool) -> None:
        self.rng = Random(seed)
        self.chunks: list[tuple[bytes, ChunkKind]] = []
        limits = JournalLimits(self.rng.choice((2000, 6000, 1 << 20, 1 << 20)), 1e9, contents)
        self.journal = Journal(limits, lambda chunk, kind: self.chunks.append((chunk, kind)), b"key")
        self.limits: dict[str, Any] = {
            "max_num_seqs": self.rng.randint(1, 6),
            "max_num_batched_tokens": self.rng.choice((8, 24, 64)),
            "max_steps_in_flight": self.rng.randint(1, 2),
            "enable_prefix_caching": self.rng.random() < 0.7,
        }
        self.policy = self.rng.choice(("fcfs", "priority", "fair"))

    def run(self, engine: Engine, requests: list[NewRequest], num_steps: int = 40) -> None:
        answers: dict[tuple[int, int], list[int]] = {}
        chosen: list[int] = []
        begun: dict[tuple[int, int], list[int]] = {}
        for step in range(num_steps * 4):
            if step < num_steps and self.rng.random() < 0.6:
                chosen.append(self.rng.randrange(len(requests)))
                new = requests[chosen[-1]]
                engine.add(replace(new, request_id=str(len(chosen) - 1), arrival_s=float(step)))
            if chosen and step < num_steps and self.rng.random() < 0.15:
                engine.abort(str(self.rng.randrange(len(chosen))), self.rng.choice((None, 0, 1)))
            if not engine.has_work:
                continue
            for output in engine.step():
                key = int(output.request_id), output.sequence
                begun.setdefault(key, []).extend(output.token_ids)
                if output.finish_reason in ("stop", "length"):
                    answers[chosen[key[0]], key[1]] = begun[key]
            for key, token_ids in begun.items():
                known = answers.get((chosen[key[0]], key[1]), [])[len(token_ids) :][:4]
                if known and self.rng.random() < 0.5:
                    draft = Draft((*known, self.rng.randrange(3, 32)), "store", len(known))
                    engine.scheduler.draft(str(key[0]), key[1], (draft,))
        while engine.has_work:
            engine.step()
        self.journal.flush()
        assert any(answers.values())

    def recording(self, header: Header, folder: Path) -> Recording:
        """What a file with all epochs, or without the first ones, gives."""
        begins = [index for index, (_, kind) in enumerate(self.chunks) if kind == "epoch"]
        first = self.rng.choice(begins[: len(begins) // 4 + 1])
        path = folder / "x.quire-incident"
        path.unlink(missing_ok=True)
        content = msgspec.msgpack.encode(header)
        write_incident(path, Incident("test", 0.0), content, [chunk for chunk, _ in self.chunks[first:]])
        return read_incident(path)


def counts(incidents: Incidents, recording: Recording, scheduler: JournaledScheduler) -> Counter[str]:
    """What a recording has of each thing that makes replaying hard."""
    found = Counter(type(entry).__name__ for entry in recording.entries())
    if incidents.journal.limits.epoch_bytes == 1 << 20:  # else most preemptions are those of epochs
        found["preemptions"] = scheduler.num_preemptions
    found["several"] = scheduler.max_steps_in_flight > 1
    return found


def test_incidents_of_the_demo_model_replay(grammar: str, tmp_path: Path) -> None:
    found = Counter[str]()
    for seed in range(8 * TIMES):
        contents = seed % 4 != 2
        incidents = Incidents(seed, contents)
        config = EngineConfig(
            max_model_len=96,
            kv_cache_memory_bytes=incidents.rng.choice((1 << 19, 1 << 20)),
            block_size=8,
            scheduling_policy=incidents.policy,
            num_threads=1,
            **incidents.limits,
        )
        built = build(config, create=partial(JournaledScheduler, incidents.journal))
        scheduler = built.engine.scheduler
        assert isinstance(scheduler, JournaledScheduler)
        incidents.run(built.engine, pool(seed, grammar, (2,), 400))
        recording = incidents.recording(header_of(built.description, scheduler), tmp_path)
        check_build(recording.header)
        runner = rebuild(recording.header, {"num_threads": 1 + (seed == 0)}).runner if contents else None
        result = replay(recording, runner)
        assert result.equal, f"seed {seed}: {result.difference}"
        assert result.num_steps
        found += counts(incidents, recording, scheduler)
    assert min(found[name] for name in ("Began", "Aborted", "Drafted", "Added", "Outlined")) > 1, found
    assert found["several"]


def test_incidents_of_windows_and_states_replay(tmp_path: Path) -> None:
    found = Counter[str]()
    for seed in range(6 * TIMES):
        contents = seed % 3 != 2
        incidents = Incidents(seed, contents)
        program, sizes = mixed(), {"num_blocks": 8, "num_windowed": 8, "num_snapshots": 5}
        sized = {**incidents.limits, "max_model_len": 100, "num_spare_blocks": 0, "policy": incidents.policy}
        engine = make(program, **sizes, **sized)
        groups = engine.scheduler.caches.groups
        scheduler = JournaledScheduler(incidents.journal, groups=groups, block_size=16, **sized)
        incidents.run(Engine(scheduler, engine.runner), pool(seed, "", (2,), VOCAB))
        header = Header(
            quire="", build="", arithmetic="", checkpoint="", contents=contents, config=EngineConfig(),
            groups=tuple(map(GroupShape.of, groups)), arguments=scheduler.arguments, vocab_size=VOCAB,
        )  # fmt: skip
        recording = incidents.recording(header, tmp_path)
        result = replay(recording, make(program, **sizes, **sized).runner if contents else None)
        assert result.equal, f"seed {seed}: {result.difference}"
        found += counts(incidents, recording, scheduler)
    assert min(found[name] for name in ("Began", "Aborted", "Drafted", "preemptions")) > 2, found


def recorded_demo(folder: Path, contents: bool) -> Recording:
    """A recording of one request."""
    incidents = Incidents(0, contents)
    config = EngineConfig(max_model_len=64, max_num_seqs=2, num_threads=1, speculative="off")
    built = build(config, create=partial(JournaledScheduler, incidents.journal))
    scheduler = built.engine.scheduler
    assert isinstance(scheduler, JournaledScheduler)
    built.engine.add(NewRequest("a", (5, 6, 7), SamplingParams(max_tokens=5, temperature=0, seed=1)))
    while built.engine.has_work:
        built.engine.step()
    return incidents.recording(header_of(built.description, scheduler), folder)


def test_a_recording_whose_adapter_is_gone(tmp_path: Path) -> None:
    incidents = Incidents(0, contents=True)
    config = EngineConfig(max_model_len=64, max_num_seqs=2, num_threads=1, speculative="off")
    built = build(config, create=partial(JournaledScheduler, incidents.journal))
    scheduler = built.engine.scheduler
    assert isinstance(scheduler, JournaledScheduler)
    scheduler.add(NewRequest("0", (5, 6, 7), SamplingParams(max_tokens=1), adapter="fox@12"))
    scheduler.schedule(0.0)
    incidents.journal.flush()
    recording = incidents.recording(header_of(built.description, scheduler), tmp_path)
    with pytest.raises(ConfigError, match="recorded with the adapter fox@12"):
        replay(recording, built.runner)
    assert replay(recording, None).equal


def quire(*words: str) -> SimpleNamespace:
    done = subprocess.run((sys.executable, "-m", "quire", *words), capture_output=True, text=True, timeout=60)
    return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)


def rewrite(recording: Recording, path: Path, **changes: Any) -> str:
    """Write the recording with another header."""
    for name, value in changes.items():
        setattr(recording.header, name, value)
    header = msgspec.msgpack.encode(recording.header)
    write_incident(path, recording.incident, header, map(bytes, recording.chunks))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"quire": "0.0.1"}, "recorded by Quire 0.0.1"),
        ({"build": "another"}, "build another"),
        ({"checkpoint": "another"}, "recorded with checkpoint another"),
        ({"arithmetic": "quire-0-sse2"}, "recorded with quire-0-sse2"),
    ],
)
def test_a_file_of_another_engine_is_refused_with_the_reason(
    changes: dict[str, str], problem: str, tmp_path: Path
) -> None:
    recording = recorded_demo(tmp_path, contents=True)
    rewrite(recording, tmp_path / "y.quire-incident", **changes)
    header = read_incident(tmp_path / "y.quire-incident").header

    def check() -> None:
        check_build(header)
        rebuild(header)

    with pytest.raises(ConfigError, match=problem):
        check()


def test_the_command_shows_what_is_in_a_file_and_whether_it_is_equal(tmp_path: Path) -> None:
    recording = recorded_demo(tmp_path, contents=True)
    done = quire("replay", recording.where)
    assert done.status == 0, done.err
    assert "1 request, 0 aborts, 5 steps" in done.out
    assert "5 steps, 5 tokens: equal" in done.out
    times = quire("replay", recording.where, "--times", "--svg", str(tmp_path / "times.svg"))
    assert "slowest step" in times.out
    assert (tmp_path / "times.svg").read_text().startswith("<svg")
    recording.header.arguments["max_num_batched_tokens"] = 2
    path = rewrite(recording, tmp_path / "y.quire-incident")
    other = quire("replay", path, "--json")
    assert other.status == 1
    assert json.loads(other.out)["difference"] == {
        "step": 0,
        "row": 0,
        "field": "count",
        "recorded": "3",
        "replayed": "2",
    }
    assert quire("replay").status == 2
    last = quire("replay", str(path), "--last", "3s")
    assert last.status == 2
    assert "--last is for traces" in last.err
    both = quire("replay", str(path), "--times", "--trace", str(tmp_path / "run.pftrace"))
    assert both.status == 2
    assert "--times and --trace both" in both.err
    assert "no such file" in quire("replay", str(tmp_path / "nothing")).err
