"""The meter of an engine: it judges steps by the law of their time, which it calibrates on their records."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.engine.meter import Times, Verdict
from quire.engine.step_law import StepLaw
from quire.roofline.drafting import DraftPasses, LookingTime
from quire.types import Bound, Step

if TYPE_CHECKING:
    from quire.roofline.calibrate import Calibration

RENEWAL_S = 0.05  # of steps with the same rows until their time is predicted anew
FIRST_FIT = 64  # records; each further fit waits for twice as many as the last one
FIT_S = 5.0  # of steps between two fits, which take 5 ms; of more records fits are not better
MAX_FIT = 512


class Prediction(NamedTuple):
    """The predicted time of a step, its time at the roof, and what bounds the device in it."""

    seconds: float = 0.0
    roof_s: float = 0.0
    bound: Bound = ""


class StepMeter:
    """Judges steps by a StepLaw; without one, they have no prediction and no share of the roof.

    A prediction takes a tenth of the time of a small model's step. So while the same rows compute a token
    each, their times, which are linear in the growing contexts, are continued for RENEWAL_S.

    `calibration` takes the records of the steps that are predicted anew; the law that fits them replaces
    `law` at growing intervals. `draft_law` is that of the passes of the draft model at the roof.
    """

    def __init__(
        self,
        law: StepLaw | None = None,
        calibration: Calibration | None = None,
        draft_law: StepLaw | None = None,
    ) -> None:
        self._law = law
        self._looking = LookingTime()
        self._passes = None if draft_law is None else DraftPasses(draft_law)
        self._calibration = calibration
        self._num_records = 0  # since the last fit
        self._records_to_fit = FIRST_FIT
        self._since_fit_s = FIT_S
        self._announced: StepLaw | None = None
        self._computed = Prediction()  # the last that was not continued
        self._num_steps = 0  # since then
        self._since_s = 0.0  # their time
        self._rows: list[tuple[int, int, int]] = []  # of the last step: slot, tokens, logits
        self._seconds = self._roof_s = 0.0  # of the last step
        self._growth: tuple[float, float] | None = None  # of both from step to step, while they are continued

    @property
    def draft_law(self) -> StepLaw | None:
        """The law of the passes of the draft model."""
        return None if self._passes is None else self._passes.law

    def new_law(self) -> StepLaw | None:
        """Return the law if it has changed since the last call."""
        if self._law is self._announced:
            return None
        self._announced = self._law
        return self._law

    def judge(self, step: Step, times: Times) -> Verdict:
        """Judge a step that has ended."""
        if self._law is not None:
            self._looking.add(times.idle_s, times.drafting_s)
            self._predict(self._law, step, times)
            if self._passes is not None:
                self._passes.add(step, times.draft_s)
        share = self._roof_s / times.device_s if times.device_s > 0 else 0.0
        return Verdict(self._seconds, share, bound_of(times, self._computed.bound))

    def _predict(self, law: StepLaw, step: Step, times: Times) -> None:
        rows = [(row[0], row[2], row[5]) for row in step.rows]  # by name it would take twice as long
        goes_on = rows == self._rows and not step.admitted
        self._num_steps += 1
        self._since_s += times.device_s
        if goes_on and self._growth is not None and self._since_s < RENEWAL_S:
            seconds, roof_s = self._growth
            self._seconds += seconds
            self._roof_s += roof_s
            return
        found = law.values([(row[1], row[2]) for row in step.rows], sum([row[5] for row in step.rows]))
        last, self._computed = self._computed, predict(law, found)
        self._seconds, self._roof_s, _ = self._computed
        self._growth = None
        if goes_on and all(count == 1 for _, count, _ in rows):
            steps = self._num_steps
            self._growth = (self._seconds - last.seconds) / steps, (self._roof_s - last.roof_s) / steps
        self._calibrate(found, times)
        same_law = law is self._law  # else the next prediction does not go on from this one
        self._rows, self._num_steps, self._since_s = rows if same_law else [], 0, 0.0

    def _calibrate(self, found: tuple[float, ...], times: Times) -> None:
        """Take the record of a step, and fit the law anew if it is time."""
        if self._calibration is None:
            return
        between_s = times.idle_s
        if times.drafting_s > 0.0:
            between_s = max(0.0, between_s - self._looking.seconds)
        self._calibration.add(found, times.device_s, between_s, times.core_wait_s)
        self._num_records += 1
        self._since_fit_s += self._since_s + times.idle_s
        if self._num_records >= self._records_to_fit and self._since_fit_s >= FIT_S:
            self._law = self._calibration.law()._replace(drafting_s=self._looking.seconds)
            self._num_records, self._since_fit_s = 0, 0.0
            self._records_to_fit = min(2 * self._records_to_fit, MAX_FIT)


def predict(law: StepLaw, found: tuple[float, ...]) -> Prediction:
    """Predict a step with these features: its time, its time at the roof, and what bounds the device."""
    limits = law.limits(found)
    overhead_s = limits.pop("overhead")
    stages_s = sum(limits.values())
    bound: Bound = "overhead" if overhead_s > stages_s else max(limits.items(), key=lambda one: one[1])[0]
    return Prediction(overhead_s + stages_s, law.roof_s(found), bound)


def bound_of(times: Times, computing: Bound) -> Bound:
    """Return what took most of the time from the end of the previous step to the end of this one.

    `computing` is what bounds the time that is left of a step without sampling and waiting.
    """
    device_s, overhead_s, mask_s, sampling_s, waiting_s, *_ = times
    work_s = device_s - sampling_s - waiting_s
    sampling_s += mask_s
    if computing == "overhead":
        overhead_s, work_s = overhead_s + work_s, 0.0
    most_s = max(work_s, overhead_s, sampling_s, waiting_s)
    if most_s == work_s:
        return computing
    if most_s == overhead_s:
        return "overhead"
    return "sampling" if most_s == sampling_s else "waiting"
