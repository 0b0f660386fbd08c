"""The scheduler: decides which known tokens of which sequences are computed next.

There is no prefill phase and no decode phase. Every sequence needs its known tokens computed; a step gives
each a share of the token budget, running ones first, in the order of their admission. A sequence whose last
known token is computed samples the next one. Chunked prefill, prefix hits, resumption after a preemption and
several tokens per row are all instances of this one rule (the idea of vLLM's V1 scheduler).

Progress: blocks for all known tokens (in groups with a window, at most as many as may be held) are allocated
at admission, later ones as tokens are generated. If none is free, the most recently admitted sequence is
preempted and goes to the head of the queue. So the oldest sequence always advances, and ends; then the next
is the oldest. No sequence is admitted before one at the head whose blocks are not free yet.

Several steps may be in flight: planned but not committed. The next one counts on the tokens that they will
give as *promised* ones, which the device will have. A sequence ended by a promised token has one row too many
in flight, whose result is dropped. Steps compute in the order of their plans, so blocks and slots that are
released while a step in flight uses them may be granted again by the next.

A plan is a pure function of the preceding calls: no clock is read, and every container has an order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Series

from quire.engine.block_loads import load
from quire.engine.budget import Budget
from quire.engine.caches import Caches, Group
from quire.engine.interference import Interference
from quire.engine.places import SequencePlaces
from quire.engine.plan import Plan
from quire.engine.request import ScheduledRequest, Sequence, drafting_of
from quire.engine.speculation import NOTHING, Speculation
from quire.engine.step_law import StepLaw
from quire.types import BlockLoad, Draft, NewRequest, Output, PromptImage, Row, RowResult, Step, StepResult


class Scheduler(SequencePlaces):
    """Plans steps, and turns their results into outputs: `commit` takes the steps in the order planned.

    `groups` are the cache groups of the model; a Grant refers to one by its index.

    At most `max_steps_in_flight` steps are planned and not committed; only one while a sequence with a
    grammar runs (its last token decides which tokens may follow), while drafted tokens are verified, or while
    a draft model, if there is one (`draft_model`), proposes some.

    With `speculation` the drafted tokens of a step are chosen by what they are expected to give
    (`speculation.py`); without it the first draft of a sequence is verified as far as there is room.

    `add` and `abort` may be called at any time, `load` between steps. The time of a step grows with its rows
    and admitted tokens, not with the queue or the pool. Requests must be within the limits, which
    `engine.validate` checks.

    `budget.py` says how many tokens a step has, and with `itl_goal_s` how long it may take.

    An admission leaves `num_spare_blocks` free for each running sequence, which will need them soon. Without
    them a sequence admitted into the last block would be preempted at once, and its work wasted.
    """

    def __init__(
        self,
        *,
        groups: Iterable[Group],
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_prefill_tokens: int | None = None,
        itl_goal_s: float | None = None,
        enable_prefix_caching: bool = True,
        policy: str = "fcfs",
        num_spare_blocks: int = 1,
        max_steps_in_flight: int = 1,
        speculation: bool = False,
        draft_model: bool = False,
    ) -> None:
        caches = Caches(groups, block_size, max_num_batched_tokens, retain=enable_prefix_caching)
        super().__init__(caches, max_num_seqs, policy)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_steps_in_flight = max_steps_in_flight
        self.num_preemptions = 0  # since the start
        self.num_cached_tokens = 0  # taken from the prefix cache since the start
        self._budget = Budget(max_num_batched_tokens, max_num_prefill_tokens, itl_goal_s)
        self._num_spare_blocks = num_spare_blocks
        self._private = not enable_prefix_caching
        self._interference = Interference(max_num_batched_tokens)
        self._in_flight: deque[list[Sequence]] = deque()  # those with rows, oldest step first
        self._num_steps = 0
        self._speculation = Speculation(speculation, draft_model)
        self.verified = NOTHING  # by the step committed last
        self._encoding: tuple[PromptImage, int] | None = None  # as in Plan, after the steps planned
        self._drafted = False  # the newest step in flight verifies drafted tokens, or proposes some

    @property
    def law(self) -> StepLaw | None:
        """The law by which the time of steps is predicted."""
        return self._budget.law

    @property
    def oldest_in_flight(self) -> Iterable[Sequence]:
        """The sequences of the rows of the oldest step in flight."""
        return self._in_flight[0]

    def add(self, new: NewRequest) -> None:
        """Add a request; one that has emitted tokens elsewhere waits before the queue, as if preempted.

        Raises ValueError if its id is that of an open one.
        """
        if new.request_id in self._requests:
            raise ValueError(f"request {new.request_id!r} is open already")
        request = ScheduledRequest.of(
            new, self.max_model_len, self.block_size, self._private or bool(new.pooling)
        )
        self._requests[new.request_id] = request
        self._num_open += request.num_open
        if any(new.resumed):
            self._waiting.put_before_queue(request.leader)
        else:
            self._waiting.push(request.leader)

    def adapters(self) -> set[str]:
        """Return the adapters of open requests and of rows in flight."""
        in_flight = (sequence.request for step in self._in_flight for sequence in step)
        return {request.new.adapter for request in (*self._requests.values(), *in_flight)}

    def calibrate(self, law: StepLaw, draft_law: StepLaw | None = None) -> None:
        """Predict the time of steps by this law from now on, and that of the draft model's passes."""
        self._budget.law = law
        self._interference.calibrate(law)
        self._speculation.calibrate(law, draft_law)

    def load(self, new: NewRequest, first: int, groups: Series[Collection[int]]) -> list[BlockLoad]:
        """Make room for the contents of full blocks first, first + 1, ... of a request's text.

        `groups` are the cache groups that there is content for, by block. Return the blocks to be written at
        once: the request, or any other, will find them in the prefix cache. No step may be in flight.

        Blocks that are there already, or of no use, are left out, as is what has no room: blocks that running
        sequences will need are not taken.
        """
        if self._in_flight:
            raise RuntimeError("blocks are loaded between steps")
        if self._private or new.pooling:
            return []
        request = ScheduledRequest.of(new, self.max_model_len, self.block_size, private=False)
        num_spare = self._num_spare_blocks * len(self._running)
        sequence = next(one for one in request.sequences if not one.finished)
        return load(self.caches, sequence, first, groups, num_spare)

    def abort(self, request_id: str, now: float, sequence: int | None = None) -> list[Output]:
        """Abort a request, or one sequence of it; return a final output for each that was open.

        Results of steps in flight for it are dropped. Unknown and ended ones are ignored.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        if sequence is not None:
            ending = request.sequences[sequence : sequence + 1] if sequence >= 0 else ()
        else:
            ending = request.sequences[::-1]  # followers first, or each would become the leader in turn
        outputs = [self._finish(c, c.final_output(now, "abort")) for c in ending if not c.finished]
        return outputs[::-1]

    def drafting(self) -> list[tuple[str, int]]:
        """Return the sequences, (request id, sequence) each, for which drafts should be looked for now."""
        if self._in_flight:
            return []
        return self._speculation.names(self._running.values(), self._slots.num_constrained)

    def draft(self, request_id: str, sequence: int, drafts: tuple[Draft, ...]) -> bool:
        """Offer drafts for a running sequence, of which its next row that samples may verify one.

        Return False, and change nothing, if the sequence is not running, or has rows in flight, which will
        add known tokens.
        """
        request = self._requests.get(request_id)
        if request is None or not 0 <= sequence < len(request.sequences):
            return False
        drafting = request.sequences[sequence]
        if drafting.slot < 0 or drafting.num_planned > drafting.num_computed:
            return False
        self._speculation.offer(drafting, drafts)
        return True

    def schedule(self, now: float) -> Step | None:
        """Return the next step, or None if nothing can be computed before a step in flight is committed.

        Without steps in flight, None means that nothing is open. `now`: seconds on the engine's clock.
        """
        if len(self._in_flight) >= self.max_steps_in_flight:
            raise RuntimeError("too many steps were not committed")
        looks = self._speculation.looks
        if self._in_flight and (looks or self._drafted or self._slots.num_constrained):
            return None
        budget, time = self._budget.of_step(self._running.values())
        plan = Plan(self.caches, budget, time, now, self.max_num_batched_tokens, self._encoding)
        self._plan_running(plan)
        self._plan_waiting(plan, now)
        if not plan.rows:
            if self._num_open and not self._in_flight:
                raise RuntimeError("requests wait, nothing runs, and none of them fits the KV cache")
            return None
        self._in_flight.append(plan.sequences)
        self._encoding = plan.encoding
        num_proposed = self._speculation.plan(plan, self._num_steps, looks, self._num_kept())
        self._drafted = plan.drafted or num_proposed > 0
        self._num_steps += 1
        return plan.step(self._num_steps - 1, self._slots.take_released(), num_proposed)

    def _num_kept(self) -> int:
        """Return how many free blocks of each group drafts leave to those that run and the next to join."""
        head = self._waiting.peek()
        joining = 0 if head is None else -(-head.num_known // self.block_size)
        return self._num_spare_blocks * len(self._running) + joining

    def _plan_running(self, plan: Plan) -> None:
        """Add rows for the running sequences, oldest first."""
        for sequence in tuple(self._running.values()):
            if not plan.budget or sequence.slot < 0:  # preempted by an older one, as are all younger ones
                return
            count = sequence.num_ahead - sequence.num_planned
            if sequence.num_ahead == sequence.request.max_known:  # the last token is promised
                continue
            start = sequence.num_planned
            is_chunk = count > 1 or (start < sequence.num_prompt and any(sequence.unseen(start)))
            if is_chunk and not (count := plan.cut(sequence, start, count)):
                return  # an image that does not fit in, or is yet to be encoded
            if sequence.num_planned + count > sequence.capacity and not self._grow(sequence, count, plan):
                plan.budget = 0
                return
            plan.add_row(sequence, count)

    def _grow(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Allocate blocks for more tokens of a running sequence; False if it must wait or was preempted.

        It preempts no others while its own rows are in flight, since committing those may free blocks.
        """
        while (grants := self.caches.grow(sequence, sequence.num_planned + count)) is None:
            if sequence.num_planned > sequence.num_computed:
                return False
            youngest = next(reversed(self._running.values()))
            if youngest is sequence and len(self._running) == 1:
                raise RuntimeError(f"request {sequence.request.new.request_id!r} alone exceeds the KV cache")
            self._preempt(youngest, plan.now)
            if youngest is sequence:
                return False
        plan.granted += grants
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Take slot and blocks away; the sequence will recompute its tokens or find them cached."""
        self._vacate(sequence)
        sequence.receipt.preempt(now)
        sequence.free_after = self._num_steps
        self.num_preemptions += 1
        self._waiting.put_first(sequence)  # the youngest first, so the oldest ends up in front

    def _plan_waiting(self, plan: Plan, now: float) -> None:
        """Admit waiting sequences, in order, while tokens, slots and blocks are left."""
        while plan.budget and self._slots.any_free:
            sequence = self._waiting.peek()
            if sequence is None or not self._admit(sequence, now, plan):
                return

    def _admit(self, sequence: Sequence, now: float, plan: Plan) -> bool:
        """Give a waiting sequence a slot, blocks and its first row; False if blocks or time are lacking.

        A preempted one first waits for the results of its rows; one for pooling, for a step with budget for
        its whole prompt.
        """
        if sequence.free_after > self._num_steps - len(self._in_flight):
            return False
        new = sequence.request.new
        if new.pooling and sequence.num_known > plan.budget:
            return False
        if plan.time is not None and not plan.time.admits(sequence.num_known):
            return False
        caches, num_spare = self.caches, self._num_spare_blocks * len(self._running)
        if not caches.has_room(sequence, num_spare) and not caches.may_want_less(sequence):
            return False  # avoids matching a long prompt again in every step
        match = caches.match(sequence)
        if not caches.has_room(sequence, num_spare):
            return False
        start = match.num_blocks * self.block_size
        count = plan.cut(sequence, start, sequence.num_known - start)
        if not count or (new.pooling and count < sequence.num_known):
            return False
        self._waiting.remove(sequence)
        self._slots.enter(sequence)
        granted, restored = caches.admit(sequence, match)
        sequence.num_planned = sequence.num_computed = start
        self.num_cached_tokens += start
        if sequence.receipt.admitted_s is None:
            sequence.num_cached_tokens = start
            self._interference.admit(sequence, now)
            self._waiting.charge(sequence, sequence.num_known - start, 0)
        plan.admitted.append(sequence.admission())
        plan.granted += granted
        plan.restored += restored
        plan.add_row(sequence, count, sequence.known_tokens())
        return True

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """Process the results of a step; return the outputs of its rows, in order. `now` as in `schedule`."""
        if not self._in_flight or step.index != self._num_steps - len(self._in_flight):
            raise RuntimeError(f"step {step.index} is not the oldest in flight")
        if len(result.rows) != len(step.rows):
            raise ValueError(f"{len(step.rows)} rows asked, {len(result.rows)} results given")
        self._drafted = self._drafted and len(self._in_flight) > 1
        outputs, sequences = [], self._in_flight.popleft()
        running = self._running.values()
        self._interference.count(step, sequences, running, result.mask_s, now, result.image_s)
        self._speculation.begin(step.index, result)
        for sequence, row, got in zip(sequences, step.rows, result.rows, strict=True):
            if sequence.finished:  # while the step was in flight
                continue
            output = self._commit_row(sequence, row, got, now)
            if output is not None:
                if row.sample and sequence.request.new.report_drafting:
                    output = output._replace(drafting=drafting_of(sequence, row, output.token_ids))
                outputs.append(output)
        self.verified = self._speculation.end()
        return outputs

    def _commit_row(self, sequence: Sequence, row: Row, got: RowResult, now: float) -> Output | None:
        """Append the new tokens, count the computed ones, and register full blocks in the cache."""
        request = sequence.request
        if (failure := request.failure(row, got)) is not None:
            return self._fail(sequence, failure, now)
        finish_reason = stop_reason = None
        if row.sample:
            token_ids, finish_reason, stop_reason = sequence.take(got.token_ids, now)
            self._waiting.charge(sequence, 0, len(token_ids))
            if self._speculation.committed is not None:
                self._speculation.take(sequence, row, len(token_ids), finish_reason is not None)
            end = sequence.num_known - 1
            if row.drafted:
                sequence.num_planned, sequence.num_ahead = end, sequence.num_known
        else:
            end = row.start + row.count
        if sequence.slot >= 0:  # else it was preempted, and what the row computed is void
            sequence.num_computed = end
            if end // self.block_size > sequence.num_registered and not request.new.pooling:
                self.caches.register(sequence)
            if sequence.saving:
                self.caches.keep(sequence, row.start + row.count)
            if request.followers and end >= sequence.num_prompt:
                self._release_followers(sequence)
        else:
            sequence.receipt.end_step_in_flight(now)
        if finish_reason is not None:
            logprobs = got.logprobs[: len(token_ids)]
            output = sequence.final_output(now, finish_reason, stop_reason, None, token_ids, logprobs)
            return self._finish(sequence, output)
        if row.sample:
            return sequence.output(token_ids, got.logprobs)
        return self._finish_pooled(sequence, got, now) if request.new.pooling else None

    def check(self) -> None:
        """Raise AssertionError unless all state is consistent. Takes time proportional to open requests."""
        self.caches.check(self._running.values(), self.max_steps_in_flight)
        self._check_open()
