"""The lengths of all drafts of a step: those with which it gives the most tokens in its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

LATER = 1.05  # no sequence's tokens may be expected to take longer than this, relative to no drafts


class StepBounds(NamedTuple):
    """Times, in seconds, between which lengths are chosen.

    `plain_s` is the time from one step to the next if nothing is drafted or looked for. `lost_s` is what
    looking for drafts adds, `between_s` what lies between two steps in any case; a step that drafts takes at
    most `limit_s` by itself.
    """

    plain_s: float
    lost_s: float
    between_s: float
    limit_s: float


def choose_lengths(
    chances: Sequence[Sequence[float]],
    num_others: int,
    seconds: Callable[[int], float],
    most: int,
    bounds: StepBounds,
) -> list[int]:
    """Return how many tokens of each draft to verify, at most `most` together.

    `chances` has for each draft those of its tokens to be accepted, which fall from token to token;
    `num_others` are the rows without a draft. `seconds` predicts a step that verifies so many tokens.

    Lengths maximize expected tokens over predicted time. For a total the most likely tokens are best, so
    only totals are compared: all of them, since times grow in stairs. A step may take LATER times as long as
    without drafts, times the tokens that its row with the fewest expects: one, if that has no draft.
    """
    order = [(-chance, number) for number, row in enumerate(chances) for chance in row]
    order.sort()
    del order[most:]
    expected, gives = float(len(chances) + num_others), [1.0] * len(chances)
    plain_s, lost_s, between_s, limit_s = bounds
    added_s = between_s + lost_s
    best, best_total, num_left = expected / (seconds(0) + added_s), 0, len(order)
    for total, (chance, number) in enumerate(order, 1):
        expected -= chance
        gives[number] -= chance
        num_left -= 1
        step_s = seconds(total)
        if step_s > limit_s:
            break
        later = (step_s + added_s) / (plain_s * LATER)
        rate = expected / (step_s + added_s)
        if rate > best and (later <= 1.0 or (not num_others and later <= min(gives))):
            best, best_total = rate, total
        elif (expected - chance * num_left) / (step_s + added_s) <= best or (num_others and later > 1.0):
            break  # times only grow, and chances only fall
    lengths = [0] * len(chances)
    for _, number in order[:best_total]:
        lengths[number] += 1
    return lengths
