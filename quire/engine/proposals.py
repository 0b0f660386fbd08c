"""Proposals: how many tokens the draft model, if there is one, is asked for after a step."""

from __future__ import annotations

from collections.abc import Sequence as Series
from typing import NamedTuple

from quire.engine.acceptance import Acceptance
from quire.engine.draft_lengths import LATER, StepBounds
from quire.engine.request import Sequence
from quire.engine.verify_times import FEW_ROWS, MAX_TOTAL, AssumedTimes, TimeCurve, VerifyTimes
from quire.types import Row

MAX_PROPOSED = 8
FIRST_PAUSE, LONGEST_PAUSE = 32, 512  # steps from one trial to the next, while proposals do not pay
LAG_STEPS = 32  # over which the time counts in which the model computes what it lacks
LEAST_LAG = 2 * MAX_PROPOSED  # tokens: fewer are computed with the first pass


class Proposal(NamedTuple):
    """The tokens to ask for after each row that samples, the time that takes, and whether it is a trial."""

    num_tokens: int = 0
    seconds: float = 0.0
    trial: bool = False


class ProposalState(NamedTuple):
    """All that later decisions depend on."""

    num_paused: int = 0
    pause: int = FIRST_PAUSE


class Proposals:
    """Decides how many tokens the draft model proposes, by what the next step is expected to gain by them."""

    def __init__(self) -> None:
        self.state = ProposalState()

    def choose(
        self,
        sequences: Series[Sequence],
        rows: Series[Row],
        times: VerifyTimes,
        acceptance: Acceptance,
        bounds: StepBounds,
    ) -> Proposal:
        """Return what to ask for after a step with these rows, of these sequences, and their drafts."""
        sampling = [
            (one, row._replace(start=row.start + row.count - len(row.drafted) - 1, count=1))
            for one, row in zip(sequences, rows, strict=True)
            if row.sample
        ]
        if not sampling:
            return Proposal()
        num_rows = len(sampling)
        factor = sum([one.history.factor("model") for one, _ in sampling]) / num_rows
        others = sum([_from_elsewhere(one) for one, _ in sampling]) / num_rows
        lacking = [(one.history.num_modelled, row.start + 1) for one, row in sampling]
        lag_s = times.lag_s([(start, end - start) for start, end in lacking if end - start > LEAST_LAG])
        next_times = times.of([row for _, row in sampling])
        chances = acceptance.expected("model", 0, MAX_PROPOSED, factor)
        number = _best(next_times, chances, others, num_rows, bounds, lag_s)
        num_paused, pause = self.state
        trial = not number and num_paused >= pause and num_rows <= FEW_ROWS
        if number:
            num_paused, pause = 0, FIRST_PAUSE
        elif trial:
            number, num_paused, pause = 1, 0, min(2 * pause, LONGEST_PAUSE)
        else:
            num_paused += 1
        self.state = ProposalState(num_paused, pause)
        if not number:
            return Proposal()
        for one, row in sampling:
            one.history.num_modelled = row.start + 1
        return Proposal(number, number * next_times.pass_s + lag_s, trial)


def _best(
    times: TimeCurve | AssumedTimes,
    chances: Series[float],
    others: float,
    num_rows: int,
    bounds: StepBounds,
    lag_s: float,
) -> int:
    """Return with how many tokens after each row the next step gives the most tokens in its time.

    `times` are those of the next step, `chances` those of proposed tokens to be accepted. `others` is how
    many tokens a row gives with drafts from elsewhere. It takes the model `lag_s` to compute what it lacks.
    """
    between_s = bounds.between_s + bounds.lost_s
    plain_s = times.seconds(0) + bounds.between_s
    least = round((others - 1.0) * num_rows)  # tokens of other drafts
    best = others / (times.seconds(min(least, MAX_TOTAL)) + between_s)
    best_number, expected = 0, 1.0
    for number, chance in enumerate(chances, 1):
        expected += chance
        total = max(number * num_rows, least)
        if total > times.most or times.seconds(total) > bounds.limit_s:
            break
        step_s = times.seconds(total) + between_s + number * times.pass_s + lag_s / LAG_STEPS
        rate = max(expected, others) / step_s
        if rate > best and step_s <= LATER * plain_s * expected:
            best, best_number = rate, number
    return best_number


def _from_elsewhere(sequence: Sequence) -> float:
    """Return how many tokens a row should give by a draft that is not the draft model's."""
    drafting = sequence.drafting
    if drafting is None or drafting.draft is None or drafting.draft.source == "model":
        return 1.0
    return drafting.expected_tokens
