"""Rates that take turns in one run: when requests come, and what is counted for which turn."""

from __future__ import annotations

import itertools

import pytest
from serving.turns import arrivals, good_between, in_turns, row

from quire.bench.driver import LoadRun
from quire.bench.metrics import Timeline
from quire.bench.workload import Request
from quire.goals import Goal

TURNS = in_turns((1.0, 10.0), 2, 9.0)


def endless():
    return (Request(str(index), 1) for index in itertools.count())


def test_rates_take_turns():
    assert [(turn.times, turn.begin_s, turn.end_s) for turn in TURNS] == [
        (1.0, 0.0, 9.0),
        (10.0, 9.0, 18.0),
        (1.0, 18.0, 27.0),
        (10.0, 27.0, 36.0),
    ]
    assert TURNS[1].counted == (12.0, 18.0)


def test_each_turn_has_the_requests_of_its_rate():
    found = arrivals(endless(), TURNS, capacity=50.0)
    assert [request.at_s for request in found] == sorted(request.at_s for request in found)
    assert len({request.content for request in found}) == len(found)
    counts = [sum(turn.begin_s <= one.at_s < turn.end_s for one in found) for turn in TURNS]
    assert [round(count / 450) for count in counts] == [1, 10, 1, 10]


def answered(sent_s: float, *chunk_s: float) -> Timeline:
    return Timeline(sent_s, sent_s, list(chunk_s), chunk_s[-1], 1, len(chunk_s))


def test_a_turn_is_told_by_what_ends_and_what_is_asked_in_it():
    refused = Timeline(110.0, 109.5, [], 110.004, error="HTTP 503 full", is_rejected=True, retry_after="3")
    run = LoadRun(
        100.0,
        timelines=[
            answered(101.0, 111.0, 113.0, 114.0),  # of the first turn; it ends in the second
            answered(109.5, 110.0, 111.9),  # it ends before what is counted
            answered(116.0, 117.0, 119.0),  # it ends in the third
            answered(115.0, 115.1, 117.9),  # too slow
            refused,
            Timeline(112.0, 112.0, [], 113.0, error="connection lost"),
        ],
    )
    assert row(TURNS[1], run, Goal.parse_pairs(["tpot:2500"])) == {
        "times": 10.0,
        "goodput": round(1 / 6, 2),
        "tokens_per_s": round(5 / 6, 1),
        "answered": 3,
        "not_good": 1,
        "rejected": 1,
        "retry_after": 1,
        "rejection_p50_ms": 4.0,
        "rejection_p99_ms": 4.0,
        "client_late_p99_ms": 480.0,
        "other_errors": 1,
    }


def test_goodput_of_a_part_of_a_run():
    runs = [answered(0.0, float(end)) for end in range(1, 9)]
    assert good_between(runs, Goal.parse("e2e<6s"), 2.0, 8.0) == pytest.approx(5 / 6)
