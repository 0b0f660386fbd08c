"""The page's own arithmetic of steps against Python's, for windows, experts, states and tiles."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from server import PYTHON

TESTS = Path(__file__).resolve().parents[1]
EVALUATE = """async (programs) => {
  const {values, seconds, roof, cost} = await import("/page/js/law.js");
  return programs.map(({law, cost: costs, cases}) => cases.map(({rows, num_logits}) => {
    const found = values(law, rows, num_logits);
    const predicted = {seconds: seconds(law, found), roof: roof(law, found).seconds};
    return {values: found, ...predicted, cost: cost(costs, found)};
  }));
}"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What Python says (laws.py)."""
    path = os.pathsep.join((str(TESTS / "model"), str(TESTS / "pure")))
    script = TESTS / "browser" / "laws.py"
    done = subprocess.run(
        [PYTHON, str(script)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=True
    )
    return json.loads(done.stdout)


def test_every_kind_of_feature_occurs(told: dict[str, Any]) -> None:
    features = [one for program in told["programs"] for one in program["law"]["features"]]
    assert {one["kind"] for one in features} == set(told["kinds"])
    assert {one["window"] > 0 for one in features if one["kind"] == "pairs"} == {True, False}


def test_steps_cost_and_take_what_python_says(page: Page, told: dict[str, Any]) -> None:
    found = page.evaluate(EVALUATE, told["programs"])
    for program, own in zip(told["programs"], found, strict=True):
        for case, one in zip(program["cases"], own, strict=True):
            place = f"{program['name']} {case['rows']} {case['num_logits']}"
            for key, value in one.items():
                assert value == pytest.approx(case[key], rel=1e-12, abs=0), (place, key)
