"""The worth of looking for drafts, for all sequences and for each, by what drafts gave so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quire.types import DraftSource

FIRST_GAIN = 0.25  # assumed at first: a share of the time of a step without drafts, for each row
MEMORY, OWN_MEMORY, OWN_FIRST = 256, 64, 8  # rows of which gains are means: of all, of a sequence, at first
DRAFT_MEMORY, FIRST_TRIALS = 1 - 1 / 32, 4.0  # what a draft leaves of the evidence, and what is assumed
MAX_FACTOR = 1.25
LEAST_COST = 1 / 64  # of looking, as a share of the time of a step
OFF = 1 / 128  # gain below which nothing is looked for
FIRST_PAUSE, LONGEST_PAUSE, TRIAL = 32, 128, 4  # steps without looking, and those of a trial after them
OWN_PAUSE = 64  # tokens from one trial for a sequence to the next
# Of so many steps that look, after the first ones some do not, so that what looking costs is known.
CYCLE, FIRST_LOOKS, PLAIN = 512, 16, 4


class DraftHistory:
    """Tells how much more often than estimated the drafts of a sequence are right, and what they gained.

    `gain` is the mean of the rows for which drafts were looked for, as a share of the time of a step without;
    None if there were none. The draft model, if there is one, has computed `num_modelled` tokens.
    """

    __slots__ = ("_found", "_num_looks", "gain", "num_modelled")

    def __init__(self) -> None:
        self.gain: float | None = None
        self.num_modelled = 0
        self._num_looks = 0
        self._found: dict[DraftSource, tuple[float, float]] = {}  # right tokens, and how many were estimated

    def factor(self, source: DraftSource) -> float:
        """Return the factor of estimates of acceptance."""
        if source not in self._found:
            return 1.0
        right, estimated = self._found[source]
        return min(MAX_FACTOR, (right + FIRST_TRIALS) / (estimated + FIRST_TRIALS))

    def learn(self, source: DraftSource, num_right: int, estimated: float) -> None:
        """Take in the right tokens of a draft, and how many of those reached were estimated to be right."""
        right, before = self._found.get(source, (0.0, 0.0))
        self._found[source] = right * DRAFT_MEMORY + num_right, before * DRAFT_MEMORY + estimated

    def learn_gain(self, gain: float, first: float) -> None:
        """Take in the gain of a row; that of all sequences so far is assumed `first`."""
        before = first if self.gain is None else self.gain
        self._num_looks = num_looks = self._num_looks + 1
        rows = num_looks + OWN_FIRST
        self.gain = before + (gain - before) / (rows if rows < OWN_MEMORY else OWN_MEMORY)


class WorthState(NamedTuple):
    """All that later decisions depend on, but for those of single sequences."""

    gain: float = FIRST_GAIN
    num_paused: int = 0
    pause: int = FIRST_PAUSE
    num_trials: int = 0
    num_looks: int = 0  # of a cycle


class DraftWorth:
    """Decides from step to step whether to look for drafts, and for which sequences.

    They are looked for while the mean gain of the rows exceeds the cost of looking. Otherwise a few steps try
    it again after a pause, which grows while that does not pay.
    """

    def __init__(self) -> None:
        self._gain, self._num_paused, self._pause, self._num_trials, self._num_looks = WorthState()

    def looks(self, generating: Iterable[DraftHistory], cost: float) -> bool:
        """Return True if the next step should look for drafts. `cost`: as a share of its time."""
        if FIRST_LOOKS <= self._num_looks < FIRST_LOOKS + PLAIN:
            return False
        first = self._gain
        gains = [first if one.gain is None else one.gain for one in generating]
        return bool(gains) and (self._num_trials > 0 or sum(gains) > max(cost, LEAST_COST) * len(gains))

    def looks_for(self, one: DraftHistory, num_known: int) -> bool:
        """Return True if a step that looks for drafts should do so for this sequence of so many tokens."""
        pays = one.gain is None or one.gain > OFF
        return pays or num_known % OWN_PAUSE < TRIAL or self._num_trials > 0

    def count(self, looked: bool) -> None:
        """Count a step."""
        if looked or self._num_looks >= FIRST_LOOKS:
            self._num_looks = (self._num_looks + 1) % CYCLE
        if self._num_trials:
            self._num_trials -= looked
            if not self._num_trials:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
        elif looked:
            self._num_paused, self._pause = 0, FIRST_PAUSE
        else:
            self._num_paused += 1
            if self._num_paused >= self._pause:
                self._num_paused, self._num_trials = 0, TRIAL

    def learn(self, one: DraftHistory, gain: float) -> None:
        """Take in the gain of a row for which drafts were looked for, as a share of the time without."""
        before = self._gain
        one.learn_gain(gain, before)
        self._gain = before + (gain - before) / MEMORY

    def state(self) -> WorthState:
        """Return all that later decisions depend on, but for those of single sequences."""
        return WorthState(self._gain, self._num_paused, self._pause, self._num_trials, self._num_looks)

    def restore(self, state: WorthState) -> None:
        """Take over the state of another one."""
        self._gain, self._num_paused, self._pause, self._num_trials, self._num_looks = state
