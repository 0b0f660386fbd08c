"""Speculation: which drafts the rows of a step verify, and how much of each.

Drafts are offered to the scheduler as guesses at the next tokens of sequences. When all rows of a step are
planned, each row that samples may verify some tokens of one of the drafts offered for its sequence, with
what is left of the budget and of the free blocks. Lengths maximize the expected tokens over the predicted
time of the step; now and then one token is verified although it does not seem to pay, so
that a wrong estimate is found out.

Looking for drafts costs time, above all where steps could be planned ahead of the last tokens. So it stops
where it does not pay, for all sequences or for one.

`acceptance.py` estimates how likely tokens are right, `verify_times.py` what steps take that verify them, and
`draft_lengths.py` finds the best lengths. `draft_worth.py` decides whether to look for drafts, `proposals.py`
how many tokens a draft model proposes.

Everything is a function of the scheduler's recorded calls, so that plans are equal in a replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.acceptance import Acceptance, AcceptanceState
from quire.engine.draft_lengths import LATER, StepBounds, choose_lengths
from quire.engine.draft_worth import DraftHistory, DraftWorth, WorthState
from quire.engine.plan import Plan
from quire.engine.proposals import Proposal, Proposals, ProposalState
from quire.engine.request import ScheduledRequest, Sequence
from quire.engine.step_law import StepLaw
from quire.engine.verify_times import MAX_TOTAL, AssumedTimes, TimeCurve, VerifyTimes
from quire.types import Draft, Drafting, Row, StepResult

FIRST_PROBE, RARE_PROBE, LONGEST_PROBE = 32, 128, 512  # steps without drafts until a probe


class SpeculationState(NamedTuple):
    """All that later choices depend on, but for what is known of single sequences."""

    acceptance: AcceptanceState
    worth: WorthState = WorthState()
    num_skipped: int = 0
    probe_pause: int = FIRST_PROBE
    plain_s: float = 0.0
    proposals: ProposalState = ProposalState()


class Verified(NamedTuple):
    """The numbers of drafts in the Record of a step."""

    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    saved_s: float = 0.0


NOTHING = Verified()
MAX_SCALE = 4.0  # of measured to predicted time: what takes longer was held up by something else
_SLOWER = Drafting(None, 0, 1.0, why_none="slower")
_NO_ROOM = Drafting(None, 0, 1.0, why_none="no room")
_OFF = Drafting(None, 0, 1.0, why_none="off")


@dataclass(slots=True)
class _DraftedStep:
    """A step in flight that looked for drafts, or verifies or proposes some.

    A row gains what the tokens that it gives would take without drafts, `token_s` each, less `cost_s`.
    """

    looked: bool
    bounds: StepBounds
    sequences: list[Sequence]
    step_s: float = 0.0  # its predicted time
    in_vain: bool = False
    token_s: float = 0.0
    cost_s: float = 0.0
    probed: bool = False
    num_rows: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def compare(self, device_s: float) -> None:
        """Set the costs, given how long the device took for the step; 0 if that is not known."""
        plain_s, lost_s, between_s, _ = self.bounds
        scale = min(max(device_s / self.step_s, 1 / MAX_SCALE), MAX_SCALE) if device_s > 0.0 else 1.0
        self.token_s = (plain_s - between_s) * scale + between_s
        self.cost_s = self.step_s * scale + between_s + lost_s


class Speculation:
    """Chooses the drafted tokens of steps.

    With `chooses` their number follows from what they are expected to give; without it the first draft of a
    sequence is verified as far as there is room.
    """

    def __init__(self, chooses: bool, draft_model: bool) -> None:
        self._chooses = chooses
        self._proposals = Proposals() if chooses and draft_model else None
        self._proposed = False  # the last step planned asked the draft model
        self._looks = False  # for drafts, before the next step
        self._acceptance = Acceptance()
        self._worth = DraftWorth()
        self._times = VerifyTimes()
        self._offered: dict[Sequence, None] = {}  # those with drafts
        self._steps: dict[int, _DraftedStep] = {}  # in flight, by index
        self.committed: _DraftedStep | None = None  # whose results are taken in, if anything depends on them
        self._verified = NOTHING  # by a step without `committed`
        self._plain_s = 0.0  # of the last step that looked for drafts
        self._num_skipped = 0  # steps since the last that drafted
        self._probe_pause = FIRST_PROBE

    def calibrate(self, law: StepLaw, draft_law: StepLaw | None = None) -> None:
        """Predict the time of steps, and of a pass of the draft model, by these laws from now on."""
        self._times.calibrate(law, draft_law)
        self._plain_s = 0.0

    @property
    def draft_law(self) -> StepLaw | None:
        """The law of the passes of the draft model."""
        return self._times.draft_law

    # Before a step

    @property
    def looks(self) -> bool:
        """True if drafts are looked for before the next step, and so the last tokens awaited."""
        return self._looks or self._proposed

    def names(self, running: Iterable[Sequence], num_constrained: int) -> list[tuple[str, int]]:
        """Return the sequences to look for, (request id, sequence) each, of those that run.

        Those with a grammar await their last tokens in any case.
        """
        if not self._chooses or not (self.looks or num_constrained):
            return []
        return [(one.request.new.request_id, one.index) for one in running if self._looks_for(one)]

    def _looks_for(self, one: Sequence) -> bool:
        if not _generates(one):
            return False
        if self._proposed or one.request.new.grammar:
            return True
        return self._looks and self._worth.looks_for(one.history, one.num_known)

    def offer(self, sequence: Sequence, drafts: tuple[Draft, ...]) -> None:
        """Take the drafts for the next row of a sequence that samples, in place of earlier ones."""
        sequence.drafts = drafts
        if drafts:
            self._offered[sequence] = None

    # While a step is planned

    def plan(self, plan: Plan, index: int, looked: bool, num_kept: int) -> int:
        """Add drafted tokens to the rows of a step; return how many its draft model shall propose.

        `num_kept` blocks of each group remain free.
        """
        if not (self._chooses or self._offered):
            return 0
        all_looked, looks_for = self._proposed or not self._chooses, self._worth.looks_for
        for one in plan.sequences:
            found = all_looked or (looked and looks_for(one.history, one.num_known))
            one.drafting = None if found else _OFF
        num_proposed = 0
        if looked or self._offered or self._proposals:
            num_proposed = self._draft(plan, index, looked, num_kept)
        if self._chooses:
            self._num_skipped += 1
            self._worth.count(looked)
            law, plain_s = self._times.law, self._plain_s
            cost = law.drafting_s / plain_s if law is not None and plain_s else 0.0
            generating = [one.history for one in plan.sequences if _generates(one)]
            self._looks = self._worth.looks(generating, cost)
        return num_proposed

    def _draft(self, plan: Plan, index: int, looked: bool, num_kept: int) -> int:
        """Add drafted tokens, and note what to compare the step with; return how many tokens to propose."""
        times, law = self._times.of(plan.rows), self._times.law
        between_s = 0.0 if law is None else law.host_s
        lost_s = 0.0 if law is None or not looked else law.drafting_s
        self._plain_s = times.seconds(0) + between_s
        limit_s = math.inf if plan.time is None else plan.time.limit_s
        bounds, total = StepBounds(self._plain_s, lost_s, between_s, limit_s), 0
        step = _DraftedStep(looked, bounds, plan.sequences)
        if self._offered:
            total = self._verify(plan, times, step, bounds, num_kept)
            self._offered = {one: None for one in self._offered if one.drafts}
        proposal = Proposal()
        if self._proposals is not None:
            proposal = self._proposals.choose(
                plan.sequences, plan.rows, self._times, self._acceptance, bounds
            )
        if proposal.trial:
            self._num_skipped = LONGEST_PROBE  # verify it, though it does not seem to pay
        self._proposed = proposal.num_tokens > 0
        step.step_s = times.seconds(min(total, MAX_TOTAL)) + proposal.seconds
        step.in_vain = not (total or self._proposed)
        if looked or not step.in_vain:
            self._steps[index] = step
        return proposal.num_tokens

    def _verify(
        self,
        plan: Plan,
        times: TimeCurve | AssumedTimes,
        step: _DraftedStep,
        bounds: StepBounds,
        num_kept: int,
    ) -> int:
        """Let rows that sample verify a draft of those offered; return how many tokens they verify."""
        num_left = plan.budget
        indices = [i for i, one in enumerate(plan.sequences) if one.drafts and plan.rows[i].sample]
        if not indices:
            return 0
        if self._chooses:
            chosen = self._chosen(plan, indices, times, step, bounds)
        else:
            chosen = [Drafting(plan.sequences[i].drafts[0]) for i in indices]
        for i, drafting in zip(indices, chosen, strict=True):
            sequence = plan.sequences[i]
            sequence.drafts = ()
            if (draft := drafting.draft) is not None:
                verified = plan.verify(i, draft.token_ids, num_kept)
                kept = draft._replace(token_ids=verified)
                drafting = drafting._replace(draft=kept) if verified else _NO_ROOM
            sequence.drafting = drafting
        total = num_left - plan.budget
        if self._times.law is not None:
            predicted_s, plain_s = times.seconds(min(total, MAX_TOTAL)), times.seconds(0)
            for i in indices:
                one = plan.sequences[i]
                assert one.drafting is not None
                one.drafting = one.drafting._replace(predicted_s=predicted_s, plain_s=plain_s)
        return total

    def _chosen(
        self,
        plan: Plan,
        indices: list[int],
        times: TimeCurve | AssumedTimes,
        step: _DraftedStep,
        bounds: StepBounds,
    ) -> list[Drafting]:
        """Choose the drafts of these rows, and their lengths."""
        num_others = len(plan.rows) - len(indices)
        first_s = times.seconds(1) + bounds.between_s + bounds.lost_s
        if not times.may_pay or (num_others and first_s > LATER * bounds.plain_s):
            return [_SLOWER] * len(indices)
        best = [self._best(plan, plan.sequences[i]) for i in indices]
        chances = [one[1] for one in best]
        lengths = choose_lengths(chances, num_others, times.seconds, min(plan.budget, times.most), bounds)
        if not any(lengths):
            self._probe(lengths, chances, first_s, step, bounds)
        return [_drafting(*one, length) for one, length in zip(best, lengths, strict=True)]

    def _best(self, plan: Plan, sequence: Sequence) -> tuple[Draft, list[float]]:
        """Return the draft of which most tokens are expected to be accepted, with the chances of each."""
        room, own, best, most = plan.room(sequence), sequence.history, sequence.drafts[0], 0.0
        chances: list[float] = []
        for draft in sequence.drafts:
            token_ids, source, match = draft
            found = self._acceptance.expected(source, match, min(len(token_ids), room), own.factor(source))
            if (expected := sum(found)) > most:
                best, chances, most = draft, found, expected
        return best, chances

    def _probe(
        self,
        lengths: list[int],
        chances: list[list[float]],
        first_s: float,
        step: _DraftedStep,
        bounds: StepBounds,
    ) -> None:
        """Let one row verify a token although it does not seem to pay, if none did for a while.

        Where a wrong one makes tokens come later, it is done in less than one of a hundred steps.
        """
        least = 0 if first_s <= LATER * bounds.plain_s else RARE_PROBE
        if self._num_skipped < max(self._probe_pause, least) or first_s > bounds.limit_s:
            return
        best = max(range(len(chances)), key=lambda i: chances[i][:1])
        if chances[best]:
            lengths[best], step.probed, self._num_skipped = 1, True, 0

    # When its results are taken in

    def begin(self, index: int, result: StepResult) -> None:
        """Note that the results of a step are taken in now."""
        self.committed = step = self._steps.pop(index, None)
        self._verified = NOTHING
        if step is None:
            return
        step.compare(result.device_s + result.draft_s)
        if step.in_vain:
            self._found_nothing(step)

    def _found_nothing(self, step: _DraftedStep) -> None:
        """Take in that a step looked in vain."""
        self.committed, worth, lost_s = None, self._worth, step.bounds.lost_s
        self._verified = Verified(saved_s=-lost_s)
        for one in step.sequences:
            one.receipt.drafting_saved_s -= lost_s
            if one.drafting is not _OFF:
                worth.learn(one.history, 0.0)

    def take(self, sequence: Sequence, row: Row, num_tokens: int, ended: bool) -> None:
        """Take in that a row of `committed` gave its sequence so many tokens; they end it if it `ended`."""
        step = self.committed
        assert step is not None
        step.num_rows += 1
        step.num_tokens += num_tokens
        if row.drafted and sequence.drafting is not None and sequence.drafting.draft is not None:
            self._take_draft(sequence, sequence.drafting.draft, row, num_tokens - 1, ended)
        saved_s = num_tokens * step.token_s - step.cost_s
        if self._times.law is not None:
            sequence.receipt.drafting_saved_s += saved_s
        if step.looked and sequence.drafting is not _OFF:
            self._worth.learn(sequence.history, (saved_s + step.bounds.lost_s) / step.token_s)

    def _take_draft(self, sequence: Sequence, draft: Draft, row: Row, num_accepted: int, ended: bool) -> None:
        """Take in how many drafted tokens a row accepted, which is not told of a sequence's last one."""
        step, num_drafted = self.committed, len(row.drafted)
        assert step is not None
        step.num_drafts += 1
        step.num_drafted += num_drafted
        step.num_accepted += num_accepted
        sequence.receipt.num_drafted += num_drafted
        sequence.receipt.num_accepted += num_accepted
        if not self._chooses:
            return
        num_reached = num_accepted if ended else min(num_drafted, num_accepted + 1)
        own = sequence.history
        self._acceptance.learn(draft.source, draft.match, num_accepted, num_reached, own)
        if step.probed:
            self._probe_pause = FIRST_PROBE if num_accepted else min(2 * self._probe_pause, LONGEST_PROBE)
            self._num_skipped = LONGEST_PROBE if num_accepted else 0  # what was right is probed again at once
        else:
            self._num_skipped, self._probe_pause = 0, FIRST_PROBE

    def end(self) -> Verified:
        """Return what the step verified whose results have been taken in."""
        step, self.committed = self.committed, None
        if step is None or not step.num_rows:
            return self._verified
        saved_s = 0.0
        if self._times.law is not None:
            saved_s = step.num_tokens / step.num_rows * step.token_s - step.cost_s
        return Verified(step.num_drafts, step.num_drafted, step.num_accepted, saved_s)

    # Epochs

    def begin_epoch(self, requests: Iterable[ScheduledRequest]) -> SpeculationState:
        """Return all that later choices depend on, and forget what is known of single sequences."""
        self._offered, self._proposed, self._looks = {}, False, False
        for request in requests:
            for one in request.sequences:
                one.history = DraftHistory()
        asked = ProposalState() if self._proposals is None else self._proposals.state
        return SpeculationState(
            self._acceptance.state(),
            self._worth.state(),
            self._num_skipped,
            self._probe_pause,
            self._plain_s,
            asked,
        )

    def restore(self, state: SpeculationState) -> None:
        """Take over the state of another one. Raises ValueError for one that none can have."""
        self._acceptance.restore(state.acceptance)
        self._worth.restore(state.worth)
        _, _, self._num_skipped, self._probe_pause, self._plain_s, asked = state
        if self._proposals is not None:
            self._proposals.state = asked


def _generates(sequence: Sequence) -> bool:
    """Return True if the next row of a running sequence could verify drafted tokens."""
    num_ahead = sequence.num_ahead
    return num_ahead - sequence.num_planned == 1 and num_ahead < sequence.request.max_known - 1


def _drafting(draft: Draft, chances: list[float], length: int) -> Drafting:
    """Return what was chosen of a draft, given the chances of those of its tokens for which there is room."""
    if not length:
        return _SLOWER if chances else _NO_ROOM
    verified = draft._replace(token_ids=draft.token_ids[:length])
    return Drafting(verified, 0, 1.0 + sum(chances[:length]))
