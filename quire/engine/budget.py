"""The budget of a step: how many tokens it may compute and, under a goal, how long it may take.

Without a goal the budget is a number of tokens. Given a goal for the time between tokens (ITL) and a law of
the time of steps, prompts are computed in the longest chunks with which steps keep the goal:

- A chunk beside sequences that generate is cut so that the predicted time of the step is within the limit,
  but not below LEAST_CHUNK tokens, so that a prompt always advances.
- A sequence is admitted only if all that run leave time for such a chunk once they generate. Sequences end,
  so the next one is admitted at the latest when nothing else runs.

The bounds in tokens hold in any case. No clock is read: predictions follow from the law.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Series

from quire.engine.request import Sequence
from quire.engine.step_law import StepLaw

LEAST_CHUNK = 16  # tokens: a smaller chunk takes hardly less time
CHUNK_WITHOUT_LAW = 48  # tokens of prompts a step under a goal, while the time of a step is not known
_GRAIN = 8  # chunks are cut to multiples

Rows = Series[tuple[int, int]]  # (start, count) of each


class Budget:
    """Bounds the tokens of a step: `max_num_batched_tokens`, and `max_num_prefill_tokens` of prompts.

    The second bound holds only while sequences generate: a chunk of a prompt delays their tokens. With
    `itl_goal_s` and a law, steps are also bounded by time.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_num_prefill_tokens: int | None = None,
        itl_goal_s: float | None = None,
    ) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_prefill_tokens = max_num_prefill_tokens or max_num_batched_tokens
        self.itl_goal_s = itl_goal_s
        self.law: StepLaw | None = None

    def of_step(self, running: Collection[Sequence]) -> tuple[int, StepTime | None]:
        """Return the budget of the next step, for or beside these running sequences: tokens, and time."""
        generating = [(c.num_planned, 1) for c in running if _generates(c)]
        return self.beside(generating, [(c.num_ahead, 1) for c in running if c.num_ahead - c.num_planned > 1])

    def beside(self, generating: Rows, others: Rows = ()) -> tuple[int, StepTime | None]:
        """Return the budget of a step with these rows (start, count): tokens, and time.

        `generating` are those of sequences that generate, `others` the first such rows of those that run and
        do not yet.
        """
        law = self.law if self.law is not None and self.law.tail else None
        num_tokens = self.max_num_batched_tokens
        if generating:
            of_prompts = self.max_num_prefill_tokens
            if self.itl_goal_s is not None and law is None:
                of_prompts = min(of_prompts, CHUNK_WITHOUT_LAW)
            num_tokens = min(len(generating) + of_prompts, num_tokens)
        if self.itl_goal_s is None or law is None:
            return num_tokens, None
        return num_tokens, StepTime(law, law.limit_s(self.itl_goal_s), generating, others)


def _generates(sequence: Sequence) -> bool:
    """Return True if the next step computes the token that gives a sequence its next one."""
    return sequence.num_ahead - sequence.num_planned == 1 and sequence.num_ahead < sequence.request.max_known


class StepTime:
    """The predicted time of a step under construction, at most `limit_s` if any sequence generates.

    `generating` and `others` are as in `Budget.beside`.
    """

    def __init__(self, law: StepLaw, limit_s: float, generating: Rows, others: Rows) -> None:
        self._law, self._limit_s = law, limit_s
        self._found = law.values(generating, len(generating))  # features of the rows so far
        self._later = self._found  # and of those once all that run generate
        for start, count in others:
            self._later = law.plus(self._later, start, count, 1)
        self._num_later = len(generating) + len(others)
        self._is_bounded = bool(generating)
        self._has_chunk = False

    @property
    def limit_s(self) -> float:
        """The most time that the step may be predicted to take."""
        return self._limit_s if self._is_bounded else math.inf

    def admits(self, num_known: int) -> bool:
        """Return True if a sequence with so many tokens may join: a chunk fits in once all generate."""
        later = self._law.plus(self._later, num_known, 1, 1)
        chunk = max(0, num_known - LEAST_CHUNK), LEAST_CHUNK  # its last and longest one, or of one like it
        if self._num_later and self._seconds(later, *chunk, 1) > self._limit_s:
            return False
        self._later, self._num_later = later, self._num_later + 1
        return True

    def cut(self, start: int, count: int, scored: bool = False) -> int:
        """Return how many of `count` tokens of a prompt fit in.

        `scored`: logits of each token are needed, not only of the last. The first chunk of a step has at
        least LEAST_CHUNK tokens; a later one that would have fewer gets none.
        """
        kept = count
        if self._is_bounded and not self._fits(start, count, scored):
            few, many = 0, -(-count // _GRAIN)  # grains: the first fit in or are none, the second do not
            while many - few > 1:
                middle = (few + many) // 2
                if self._fits(start, middle * _GRAIN, scored):
                    few = middle
                else:
                    many = middle
            kept = few * _GRAIN
            least = min(count, LEAST_CHUNK)
            if kept < least:
                kept = 0 if self._has_chunk else least
        return kept

    def add(self, start: int, count: int, scored: bool = False) -> None:
        """Count in a chunk of a prompt."""
        self._found = self._law.plus(self._found, start, count, count if scored else 1)
        self._has_chunk = True

    def _fits(self, start: int, count: int, scored: bool) -> bool:
        return self._seconds(self._found, start, count, count if scored else 1) <= self._limit_s

    def _seconds(self, found: tuple[float, ...], start: int, count: int, num_logits: int) -> float:
        """Return the predicted time of a step with these features and one more row."""
        return self._law.seconds(self._law.plus(found, start, count, num_logits))
