"""What judges a soak of replicas: hand-made sessions, and the range of a slope."""

from __future__ import annotations

import random
from typing import Any

import pytest
from endurance.replica_verdict import judge, report
from endurance.trends import by_minute, slope_range

MB = 1 << 20


def session(**changes: Any) -> dict[str, Any]:
    """Half an hour without anything wrong, in which the server's memory stays as it is."""
    fault = {"kind": "death", "at_s": 30.0, "num_open": 4, "ready_after_s": 1.5, "error": ""}
    usual = {
        "seconds": 1800.0,
        "begin_s": 0.0,
        "warm_up_s": 300.0,
        "command": ["python", "-m", "quire", "serve", "demo", "--port", "1"],
        "load": 0.7,
        "capacity": 20.0,
        "outcomes": [("chat", "as it must be", 7)],
        "problems": [],
        "num_problems": 0,
        "num_hung": 0,
        "goldens": [(1.0, "a"), (60.0, "a")],
        "faults": [fault],
        "held": [0, 0],
        "rss": [(2.0 * index, {"server": 80 * MB + index % 7 * 1000}) for index in range(900)],
        "ttft": [(1.0, 0.1)],
        "per_event": [(1.0, 0.01)],
        "preemptions": 3.0,
        "exit_status": 0,
        "num_tracebacks": 0,
    }
    return usual | changes


def broken(*sessions: dict[str, Any]) -> set[str]:
    return {promise.name for promise in judge(sessions, 1.0) if not promise.is_kept}


GROWING = [(2.0 * index, {"server": 80 * MB + 4000 * index}) for index in range(900)]
FAILED = {"kind": "restart", "at_s": 1.0, "num_open": 0, "ready_after_s": 300.0, "error": "it did not start"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("answers", {"num_problems": 1, "problems": ["42 s, chat: HTTP 500"]}),
        ("hung", {"num_hung": 1}),
        ("golden", {"goldens": [(1.0, "b")]}),
        ("blocks", {"held": [0, 2]}),
        ("faults", {"faults": [FAILED]}),
        ("memory, server", {"seconds": 1900.0, "rss": GROWING}),
        ("drain", {"exit_status": 1}),
        ("log", {"num_tracebacks": 1}),
    ],
)
def test_a_promise_that_one_session_breaks_is_broken(name: str, changes: dict[str, Any]) -> None:
    interrupted = session(exit_status=None)
    assert broken(interrupted, session()) == set()
    assert broken(interrupted, session(**changes)) == {name}
    promises, text = report([interrupted, session(**changes)], 1.0)
    assert f"broken: {name}" in text
    assert len(promises) == 8


def test_a_soak_without_faults_or_an_end_proves_nothing() -> None:
    assert broken(session(faults=[], exit_status=None, held=[])) == {"faults", "drain", "blocks"}


def test_the_range_of_a_slope_holds_the_slope() -> None:
    dice = random.Random(1)
    ranges = []
    for _ in range(200):
        points = [(float(x), 0.5 * x + dice.gauss(0.0, 10.0)) for x in range(30)]
        ranges.append(slope_range(points))
    num_right = sum(found is not None and found[0] <= 0.5 <= found[1] for found in ranges)
    assert 180 <= num_right < 200
    assert slope_range([(0.0, 1.0), (1.0, 2.0), (2.0, 1.0)]) is None


def test_samples_of_a_minute_are_one_point() -> None:
    samples = [(0.0, 1.0), (30.0, 3.0), (59.0, 2.0), (61.0, 9.0)]
    assert by_minute(samples) == [(30.0, 2.0), (61.0, 9.0)]
