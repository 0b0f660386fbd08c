"""The sampling settings of the page's chat: those of SamplingParams, with its ranges and defaults."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import quire
from quire.errors import RequestError
from quire.sampling_params import SamplingParams

SOURCE = Path(quire.__file__).parent / "server/page/static/js/chat-store.js"
TABLE = re.search(r"^export const SAMPLING = \{\n(.*?)^\};", SOURCE.read_text("utf-8"), re.M | re.S)
assert TABLE
ROWS = re.findall(r"^  (\w+): \[(\S+), (\S+), (.+)\],$", TABLE[1], re.M)
DEFAULTS = {one.name: one.default for one in fields(SamplingParams)}
UNSET = {"max_tokens", "seed"}  # their defaults on the page are words


def test_the_table_is_read() -> None:
    assert len(ROWS) == TABLE[1].count("\n") >= 9


@pytest.mark.parametrize(("name", "low", "high", "default"), ROWS)
def test_ranges_and_defaults_are_the_apis(name: str, low: str, high: str, default: str) -> None:
    if name not in UNSET:
        assert float(default) == DEFAULTS[name]
    for bound, beyond in ((low, -1), (high, 1)):
        if "MAX" in bound:  # no bound that is worth showing
            continue
        if (bound, name) not in {("0", "top_p"), ("0", "repetition_penalty")}:  # above 0: the API says so
            SamplingParams(**{name: int(bound)})
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: int(bound) + beyond})
