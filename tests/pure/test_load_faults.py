"""What judges a server that is killed, drained and left: hand-made outcomes, a clock, schemas by chance."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from endurance.aborting import Aborts
from endurance.answers import Answer, Case
from endurance.asking import Exchange
from endurance.clock import Clock
from endurance.draining import Drainer, Drains
from endurance.essence import essence
from endurance.killing import FAILED, GONE, WHOLE, WRONG, Killer, Kills
from endurance.structures import random_schema, schema_size, tool_prompt, tool_sets
from endurance.verdict import Promise

KITS = Path(__file__).resolve().parents[1] / "endurance"


def broken(promises: list[Promise]) -> set[str]:
    return {promise.name for promise in promises if not promise.is_kept}


def exchange(problem: str = "", status: int = 200, error: str = "", begin_s: float = 0.0) -> Exchange:
    """One that has ended."""
    case = Case("chat", "/", b"", lambda _: "")
    return Exchange(case, begin_s=begin_s, answer=Answer(status, error=error), problem=problem)


def test_what_kills_may_do():
    kills = Kills(num_continued=5, answer_ends=[2.0], recoveries=[1.0], goldens=["a", "a"], held=[0])
    kills.outcomes.update({WHOLE: 3, FAILED: 2, GONE: 1})
    kills.statuses = [1]
    assert broken(kills.judged()) == set()
    kills.outcomes[WRONG] += 1
    kills.num_hung = 1
    kills.num_continued = 0
    kills.answer_ends.append(39.0)
    kills.recoveries.append(31.0)
    kills.goldens.append("b")
    kills.held.append(2)
    kills.statuses.append(0)
    assert len(broken(kills.judged())) == len(kills.judged())


def test_what_comes_of_a_request_when_the_engine_dies(tmp_path):
    killer = Killer(1, 0, tmp_path / "log", Clock(), lambda _: None)
    same, other = exchange(), exchange()
    same.answer.body, other.answer.body = {"id": 1, "text": "a"}, {"id": 1, "text": "b"}
    killer._expected = {same.case: {"text": "a"}, other.case: {"text": "a"}}
    failed, gone = exchange("HTTP 503", 503), exchange("Lost: connection lost", 0)
    killer._judge([same, other, exchange("error", error="engine_dead")], [failed, gone], is_up=True)
    assert killer.found.outcomes == {WHOLE: 1, FAILED: 1, WRONG: 3}
    killer._judge([exchange("error", 200, error="engine_dead")], [gone], is_up=False)
    assert (killer.found.outcomes[FAILED], killer.found.outcomes[GONE]) == (2, 1)
    assert "undisturbed" in killer.found.problems[0]


def chunk(**delta: object) -> dict[str, object]:
    return {"id": str(delta), "choices": [{"index": 0, "delta": delta}], "system_fingerprint": "f"}


def test_the_essence_of_an_answer_does_not_depend_on_its_pieces():
    call = {"index": 0, "function": {"arguments": "{"}}
    events = [chunk(content="a"), chunk(content="b"), chunk(tool_calls=[call]), chunk(tool_calls=[call])]
    joined = [chunk(content="ab"), chunk(tool_calls=[{"index": 0, "function": {"arguments": "{{"}}])]
    assert essence(Answer(events=events)) == essence(Answer(events=joined))
    assert essence(Answer(events=events)) != essence(Answer(events=events[1:]))
    typed = [{"type": "response.output_text.delta", "output_index": 0, "delta": one} for one in ("a", "b")]
    whole = [{**typed[0], "delta": "ab", "sequence_number": 7}]
    assert essence(Answer(events=typed)) == essence(Answer(events=whole)) != essence(Answer(events=typed[:1]))
    blocks = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": one}}
        for one in ("a", "b", "ab")
    ]
    assert essence(Answer(events=blocks[:2])) == essence(Answer(events=blocks[2:]))


def test_what_drains_may_do(tmp_path):
    drainer = Drainer(1, 0, tmp_path / "log", Clock(), lambda _: None)
    drainer._signal_s = 10.0
    drainer._judge(exchange(begin_s=9.9))
    drainer._judge(exchange("HTTP 503", 503, begin_s=10.1))
    drainer._judge(exchange("ConnectionRefusedError: no", 0, begin_s=10.2))
    found = drainer.found
    found.statuses[0], found.seconds = 1, [0.5]
    assert broken(found.judged()) == set()
    drainer._judge(exchange("HTTP 503", 503, begin_s=9.9))
    drainer._judge(exchange("Lost: connection lost", 0, begin_s=10.1))
    found.statuses[1] += 1
    found.num_tracebacks = 1
    assert len(broken(found.judged())) == len(found.judged())


def test_what_aborts_may_do():
    aborts = Aborts(held=[0, 0], open=[0, 0], goldens=["a", "a"])
    assert broken(aborts.judged()) == set()
    aborts.outcomes["failed"] = 1
    aborts.held, aborts.open, aborts.goldens = [0, 3], [0, 1], ["a", "b"]
    assert len(broken(aborts.judged())) == len(aborts.judged())
    assert broken(Drains(seconds=[0.0]).judged()) == set()


def test_time_that_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch):
    now_s = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    clock = Clock()
    now_s = 102.0
    assert clock.now_s() == 2.0
    now_s = 602.0
    assert clock.now_s() == 2.0
    now_s = 604.0
    assert (clock.now_s(), clock.lost_s) == (4.0, 500.0)
    assert clock.stood_still(101.0, 603.0)
    assert clock.stood_still(300.0, 301.0)
    assert not clock.stood_still(100.0, 101.0)
    assert not clock.stood_still(603.0, 604.0)


def test_schemas_grow_and_are_schemas():
    made = [random_schema(random.Random(seed), 1 + seed // 5) for seed in range(200)]
    for schema in made:
        jsonschema.Draft202012Validator.check_schema(schema)
    sizes = [schema_size(schema) for schema in made]
    assert max(sizes[:20]) <= 8
    assert max(sizes[150:]) > 15
    assert any("$defs" in schema for schema in made)
    assert made[150:] == [random_schema(random.Random(seed), 1 + seed // 5) for seed in range(150, 200)]


def test_tools_have_schemas_and_prompts_differ():
    for tools in tool_sets():
        for tool in tools:
            jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
    dice = random.Random(0)
    assert len({tool_prompt(dice) for _ in range(160)}) > 80


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("schemas --show 9", '"type"'),
        ("faults --help", "--drains"),
        ("soak --help", "--minutes"),
        ("x", "none of"),
    ],
)
def test_kits_are_started_by_name(words: str, shown: str):
    command = [sys.executable, str(KITS), *words.split()]
    run = subprocess.run(command, capture_output=True, text=True)
    assert shown in run.stdout + run.stderr
    assert run.returncode == (words == "x")
