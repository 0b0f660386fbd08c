"""Outputs with drafts equal those without, bit for bit: random requests on the native backend."""

from __future__ import annotations

import pytest
from exactness.rounds import Round, Tally


@pytest.mark.parametrize("part", range(4))
def test_random_requests(part: int) -> None:
    tally = Tally()
    for number in range(5):
        one = Round(f"native:{part}:{number}", ("native",), threads=(*(1,) * 30, 2))
        one.run_plain(tally)
        assert one.run_drafted(tally) == [], (one.kind, one.ways)
    assert tally.drafted.total() > tally.accepted.total() > 0
