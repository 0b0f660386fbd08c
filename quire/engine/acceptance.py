"""Acceptance: how likely drafted tokens are right, by their source and by what supports them.

The more tokens before a drafted one agree, the better it is supported: those of the match, and those of the
draft before it, if they are right. One estimate serves all tokens with as much support, wherever in their
drafts they are: with one for each place in a draft, places that no draft reached would never get evidence.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.draft_worth import DraftHistory
from quire.types import DraftSource

MAX_SUPPORT = 40
MEMORY, PRIOR_TRIALS = 1 - 1 / 64, 4.0  # of a class: what each further token leaves of its evidence
LEAST_CHANCE, MAX_CHANCE = 1 / 32, 0.995
_LEAST = (0, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 25, 33)  # support of the first token of each class
_CLASS_OF = [sum(support >= least for least in _LEAST) - 1 for support in range(MAX_SUPPORT + 1)]
# By benchmarks/speculation_acceptance.py --supports: between those of problems and of edited programs.
_OF_TEXTS = (0.35, 0.45, 0.5, 0.55, 0.6, 0.7, 0.75, 0.75, 0.8, 0.85, 0.85, 0.9, 0.95)
_OF_STORE = (0.15, 0.3, 0.35, 0.35, 0.4, 0.55, 0.65, 0.7, 0.7, 0.7, 0.85, 0.9, 0.95)
_PRIORS: dict[DraftSource, tuple[float, ...]] = {
    "text": _OF_TEXTS,
    "store": _OF_STORE,
    "grammar": (0.7, *[0.95] * 8, 0.99, *[0.95] * 3),
    "model": (0.6,),  # one class for all tokens
}

Evidence = tuple[tuple[float, float], ...]  # right tokens and all, by class


class AcceptanceState(NamedTuple):
    """All evidence, by source."""

    text: Evidence
    store: Evidence
    grammar: Evidence
    model: Evidence


class Acceptance:
    """Estimates the chance that a drafted token is right if all before it are, from those verified so far."""

    def __init__(self) -> None:
        self._evidence: dict[str, list[tuple[float, float]]] = {
            source: [(0.0, 0.0)] * len(prior) for source, prior in _PRIORS.items()
        }
        self._chances = {source: [0.0] * (MAX_SUPPORT + 1) for source in _PRIORS}  # by support
        self._estimate_all()

    def expected(self, source: DraftSource, match: int, count: int, factor: float) -> list[float]:
        """Return for each of the first `count` tokens of a draft the chance that it is accepted.

        Those after a token with less than LEAST_CHANCE are left out.
        """
        chances = self._chances[source]
        accepted, found = 1.0, []
        for support in range(match, match + count):
            chance = chances[support if support < MAX_SUPPORT else MAX_SUPPORT] * factor
            accepted *= chance if chance < MAX_CHANCE else MAX_CHANCE
            found.append(accepted)
            if accepted < LEAST_CHANCE:
                break
        return found

    def learn(
        self, source: DraftSource, match: int, num_right: int, num_reached: int, history: DraftHistory
    ) -> None:
        """Take in that of the first `num_reached` tokens of a draft the first `num_right` were right.

        Those after a wrong one tell nothing, and are not reached.
        """
        evidence, chances, estimated = self._evidence[source], self._chances[source], 0.0
        classes = dict[int, None]()
        for index in range(num_reached):
            support = min(match + index, MAX_SUPPORT)
            estimated += chances[support]
            number = _CLASS_OF[support] if len(evidence) > 1 else 0
            right, trials = evidence[number]
            evidence[number] = right * MEMORY + (index < num_right), trials * MEMORY + 1.0
            classes[number] = None
        for number in classes:
            self._estimate(source, number)
        history.learn(source, num_right, estimated)

    def _estimate(self, source: DraftSource, number: int) -> None:
        """Estimate the chances of a class anew."""
        prior, chances = _PRIORS[source], self._chances[source]
        right, trials = self._evidence[source][number]
        chance = (right + PRIOR_TRIALS * prior[number]) / (trials + PRIOR_TRIALS)
        first = _LEAST[number]
        end = _LEAST[number + 1] if number + 1 < len(prior) else MAX_SUPPORT + 1
        chances[first:end] = [chance] * (end - first)

    def _estimate_all(self) -> None:
        for source, prior in _PRIORS.items():
            for number in range(len(prior)):
                self._estimate(source, number)

    def state(self) -> AcceptanceState:
        """Return all evidence."""
        return AcceptanceState(**{source: tuple(found) for source, found in self._evidence.items()})

    def restore(self, state: AcceptanceState) -> None:
        """Take over the evidence of another one. Raises ValueError for evidence that none can have."""
        for source, found in state._asdict().items():
            if len(found) != len(self._evidence[source]):
                raise ValueError("the evidence of drafts has other classes")
            self._evidence[source] = list(found)
        self._estimate_all()
