"""The Meter: it judges each step by the time it took, and calibrates the law of that time."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire.engine.step_law import StepLaw
from quire.types import Bound, Step


class Times(NamedTuple):
    """The parts of the time from the end of the previous step to the end of a step, as in its Record.

    For `drafting_s` of `idle_s` drafts were looked for; 0 if they were not.
    """

    device_s: float
    idle_s: float
    mask_s: float
    sampling_s: float
    core_wait_s: float
    draft_s: float = 0.0
    drafting_s: float = 0.0
    image_s: float = 0.0


class Verdict(NamedTuple):
    """The predicted time of a step, its share of the roof, and what bound it, as in its Record."""

    predicted_s: float = 0.0
    roof_share: float = 0.0
    bound: Bound = ""


class Meter(Protocol):
    """Judges steps. An engine tells it of every step, in their order.

    `draft_law` is the law of the passes of the draft model, if there is one; it changes with that of steps.
    """

    @property
    def draft_law(self) -> StepLaw | None: ...

    def judge(self, step: Step, times: Times) -> Verdict:
        """Judge a step that has ended."""

    def new_law(self) -> StepLaw | None:
        """Return the law of steps if it has changed since the last call."""
