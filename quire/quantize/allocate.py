"""Mixed precision: which matrices get more bits, under a limit on the bytes of all.

Divergences caused by rounding single matrices nearly add up, so the choice is a knapsack problem: for each
part of the model a few candidates of (bytes, divergence), of which exactly one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Form:
    """A way to store a part of a model: its bytes, and the divergence it is expected to cause."""

    nbytes: int
    loss: float


def allocate(parts: Sequence[Sequence[Form]], most_bytes: int) -> list[int]:
    """Return the index of the candidate chosen for each part, or [] if even the smallest are too large.

    Starting from the smallest candidates, the step with the largest decrease of loss for its bytes is taken
    as long as one fits: optimal but for the last steps.
    """
    chosen = [min(range(len(own)), key=lambda i: (own[i].nbytes, own[i].loss)) for own in parts]
    used = sum(own[i].nbytes for own, i in zip(parts, chosen, strict=True))
    if used > most_bytes:
        return []
    while True:
        steps = [
            ((own[now].loss - other.loss) / (other.nbytes - own[now].nbytes), part, i)
            for part, (own, now) in enumerate(zip(parts, chosen, strict=True))
            for i, other in enumerate(own)
            if other.nbytes > own[now].nbytes
            and other.loss < own[now].loss
            and used + other.nbytes - own[now].nbytes <= most_bytes
        ]
        if not steps:
            return chosen
        _, part, i = max(steps, key=lambda step: (step[0], -step[1], -step[2]))
        used += parts[part][i].nbytes - parts[part][chosen[part]].nbytes
        chosen[part] = i
