"""Outputs with drafts equal those without, bit for bit: random requests on the reference backend (see
tests/exactness), and verification that is broken on purpose, which they notice.
"""

from __future__ import annotations

import pytest
from exactness.broken import FAULTS
from exactness.rounds import Round, Tally

REFERENCE = ("reference",)
MOST = 25  # rounds in which a fault must show


@pytest.mark.parametrize("number", range(8))
def test_random_requests(number: int) -> None:
    one, tally = Round(f"suite:{number}", REFERENCE), Tally()
    one.run_plain(tally)
    assert one.run_drafted(tally) == []
    assert tally.drafted.total() > tally.accepted.total() > 0


@pytest.fixture(scope="module")
def rounds() -> list[Round]:
    """Rounds that faults have in common, as far as they are needed: their requests ran without drafts."""
    return []


@pytest.mark.parametrize("name", [*FAULTS, "none"])
def test_a_fault_is_noticed(name: str, rounds: list[Round]) -> None:
    """The control: without a fault, none of these rounds has a difference."""
    for number in range(max(2, len(rounds)) if name == "none" else MOST):
        if number == len(rounds):
            rounds.append(Round(f"control:{number}", REFERENCE))
            rounds[-1].run_plain(Tally())
        rounds[number].dice = type(rounds[number].dice)(number)
        with pytest.MonkeyPatch.context() as patch:
            FAULTS.get(name, lambda patch: None)(patch)
            if rounds[number].run_drafted(Tally(), 1, "late"):
                assert name != "none"
                return
    assert name == "none"
