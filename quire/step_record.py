"""Record: what an engine keeps of a step after it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.types import Bound


@dataclass(frozen=True, slots=True)
class Record:
    """The cost of a step: for the live view, the metrics and recordings.

    `seconds` is the time from planning the step to its outputs; steps in flight together overlap. `device_s`
    is the time the device computed it, of which `sampling_s` sampling and `core_wait_s` waiting for a core;
    `mask_s` is the time it waited for masks. `idle_s` is the time before that in which the device was idle
    although requests were open: from the end of the previous step, or from planning this one if nothing was
    open then, to its start. No time is counted twice.

    `predicted_s` is the time that the engine's StepLaw expects. `roof_share` is the time at the measured
    ceilings over `device_s`; above 1 the ceilings are stale. `bound` says what took most of the time.

    `num_drafts` of its rows verified `num_drafted` tokens and accepted `num_accepted` of them.
    `drafting_saved_s` is how much longer steps without drafts would have taken for as many tokens of each
    sequence, on average, by the law. The draft model took `draft_s` and encoding images `image_s`, which
    `device_s` does not contain.

    Before the step, blocks of `num_loaded_tokens` tokens, `loaded_bytes`, came from a store, in `load_s`.
    """

    index: int
    num_rows: int
    num_tokens: int
    num_waiting: int
    num_free_blocks: int
    num_cached_tokens: int  # taken from the prefix cache by the requests admitted in this step
    num_preemptions: int
    seconds: float
    device_s: float = 0.0
    idle_s: float = 0.0
    mask_s: float = 0.0
    sampling_s: float = 0.0
    core_wait_s: float = 0.0
    predicted_s: float = 0.0
    roof_share: float = 0.0
    bound: Bound = ""
    num_drafted: int = 0
    num_accepted: int = 0
    drafting_saved_s: float = 0.0
    draft_s: float = 0.0
    num_drafts: int = 0
    num_loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    image_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """The time from the end of the previous step, or from planning this one, to its end."""
        return self.idle_s + self.device_s + self.mask_s + self.draft_s + self.image_s
