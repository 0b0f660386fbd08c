"""The cost of drafting by the records of steps: of looking for drafts, and of a draft model's passes."""

from __future__ import annotations

from collections import deque

from quire.engine.step_law import StepLaw
from quire.types import Step

LEAST, MEMORY = 4, 128  # records of which a mean is known, and of which it tells
OUTLIER = 4.0  # times the mean: longer times count as so long, since the machine did something else
LATEST = 33  # idle times of which a median tells
EVERY = 8  # steps that propose, of which one is recorded


class RecentMean:
    """The mean of the last numbers, about MEMORY of them."""

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, number: float) -> None:
        """Take a number >= 0."""
        if self.count >= LEAST:
            number = min(number, OUTLIER * self.value)
        self.count += 1
        self.value += (number - self.value) / min(self.count, MEMORY)


class LookingTime:
    """The time by which the device is idle for longer before a step if drafts were looked for.

    The search itself takes some of that time. More of it is lost where steps are else planned ahead, while
    the device computes. On a busy machine some idle times are many times as long as usual, so that means of
    few would differ by chance: medians are compared.
    """

    def __init__(self) -> None:
        self._plain, self._looked, self._searched = (deque[float](maxlen=LATEST) for _ in range(3))

    def add(self, idle_s: float, drafting_s: float) -> None:
        """Take the idle time before a step, and how much of it drafts were looked for; 0 if not."""
        if drafting_s > 0.0:
            self._looked.append(idle_s)
            self._searched.append(drafting_s)
        else:
            self._plain.append(idle_s)

    @property
    def seconds(self) -> float:
        """The difference of the medians; the search alone while there were no steps without it."""
        if min(len(self._looked), len(self._plain)) < LEAST:
            return _median(self._searched)
        return max(0.0, _median(self._looked) - _median(self._plain))


def _median(numbers: deque[float]) -> float:
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0.0


class DraftPasses:
    """The law of the passes of a draft model: that at the roof, slowed down by what the records say."""

    def __init__(self, roof: StepLaw) -> None:
        self._roof = roof
        self._slower = RecentMean()
        self._num_steps = 0  # one after the other that proposed

    def add(self, step: Step, draft_s: float) -> None:
        """Take the time that the draft model took at the end of a step, if it lacked few tokens."""
        if not step.num_proposed:
            self._num_steps = 0
            return
        self._num_steps += 1
        if self._num_steps % EVERY != 2:
            return
        single = [(row.start, 1) for row in step.rows if row.sample]
        predicted_s = step.num_proposed * self._roof.seconds(self._roof.values(single, len(single)))
        if predicted_s > 0.0:
            self._slower.add(draft_s / predicted_s)

    @property
    def law(self) -> StepLaw:
        """The law of one pass, in which each row computes a token."""
        slower = self._slower.value or 1.0

        def scaled(row: tuple[float, ...]) -> tuple[float, ...]:
            return tuple([slower * one for one in row])

        stages = [
            one._replace(memory=scaled(one.memory), arithmetic=scaled(one.arithmetic))
            for one in self._roof.stages
        ]
        return self._roof._replace(stages=tuple(stages), overhead=scaled(self._roof.overhead))
