"""The law of a step's time: sums over stages of the longer side, and overhead."""

from __future__ import annotations

import json

import pytest

from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature

FEATURES = (*LEADING, Feature("positions"), Feature("tiles", 8))
LAW = StepLaw(
    FEATURES,
    (
        Stage((5.0, 0, 0, 0, 0, 0), (0, 0, 1.0, 0, 0, 0.5), "products", "memory", "int8"),
        Stage((0, 0, 0, 0, 0.01, 0), (0, 0, 0, 0, 0.002, 0), "attention", "cache", "f32"),
    ),
    (0.5, 0.1, 0, 0.2, 0, 0),
    (Stage((4.0, 0, 0, 0, 0, 0), (0, 0, 0.8, 0, 0, 0)),),
    host_s=0.3,
)


def test_seconds_are_the_longer_sides_and_the_overhead() -> None:
    few, many = LAW.values([(99, 1)] * 2, 2), LAW.values([(0, 40)], 1)
    assert few == (1, 2, 2, 2, 200, 1)
    assert LAW.seconds(few) == pytest.approx(5.0 + 2.0 + 0.5 + 0.2 + 0.4)
    assert LAW.seconds(many) == pytest.approx(40 + 2.5 + 0.4 + 0.5 + 0.1 + 0.2)
    assert (LAW.roof_s(few), LAW.roof_s(many)) == (4.0, 32.0)


def test_limits_name_the_longer_sides_and_add_up() -> None:
    few, many = LAW.values([(99, 1)] * 2, 2), LAW.values([(0, 40)], 1)
    assert LAW.limits(few) == pytest.approx({"memory": 5.0, "cache": 2.0, "overhead": 1.1})
    assert LAW.limits(many) == pytest.approx({"int8": 42.5, "cache": 0.4, "overhead": 0.8})
    for found in (few, many):
        assert sum(LAW.limits(found).values()) == pytest.approx(LAW.seconds(found))


def test_one_more_row() -> None:
    rows = [(7, 3), (20, 1)]
    found = LAW.values((), 0)
    for start, count in rows:
        found = LAW.plus(found, start, count, 1)
    assert found == LAW.values(rows, 2)


def test_a_law_is_plain_numbers() -> None:
    """It can be kept as JSON in a recording, and read back."""
    features, stages, overhead, roof, *rest = json.loads(json.dumps(LAW))

    def staged(listed: list) -> tuple[Stage, ...]:
        return tuple(Stage(tuple(memory), tuple(computed), *names) for memory, computed, *names in listed)

    read = StepLaw(
        tuple(Feature(*one) for one in features), staged(stages), tuple(overhead), staged(roof), *rest
    )
    assert read == LAW
