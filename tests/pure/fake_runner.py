"""A device without a model: the next token is a hash of everything that the KV cache holds before it.

It keeps what a real device keeps, and no more: for each slot the tokens and the block table that steps
told it, and one value for each (block, offset). The value at a position is a hash of the value before it,
read through the block table, and of the token. So a block shared wrongly, overwritten, or found before it
was computed gives another token, and `solo` tells what the token should have been.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from quire.types import (
    Admission,
    Failure,
    FinishReason,
    NewRequest,
    PositionLogprobs,
    Row,
    RowResult,
    Step,
    StepResult,
    TokenLogprob,
)

VOCAB_SIZE = 23


def mix(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def next_value(before: int, token_id: int) -> int:
    """What the cache holds at a position: it depends on the token there and on all before."""
    return mix("kv", before, token_id)


def logprob_of(value: int, token_id: int) -> PositionLogprobs:
    return (TokenLogprob(token_id, -(mix("logprob", value, token_id) % 1000) / 100, 1),)


def choose(values: list[int], admission: Admission, num_known: int) -> int:
    """The next token: a hash of every value in the context; stop tokens are masked before min_tokens."""
    num_emitted = num_known - admission.num_prompt_tokens
    params = admission.params
    masked = num_emitted < params.min_tokens
    for attempt in range(1000):
        token_id = mix("token", values, admission.choice, params.seed, attempt) % VOCAB_SIZE
        stops = token_id in admission.eos_token_ids or token_id in params.stop_token_ids
        if not (masked and stops):
            return token_id
    raise AssertionError("every token is masked")


@dataclass
class SlotState:
    admission: Admission
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    num_computed: int | None = None


class Launched:
    """A step on its way. It takes in what the step brings when it computes, after the steps before it."""

    def __init__(self, runner: FakeRunner, step: Step) -> None:
        self.runner = runner
        self.step = step
        self.answer: StepResult | None = None

    def compute(self) -> None:
        if self.answer is None:
            self.answer = self.runner.compute(self.step)

    def result(self) -> StepResult:
        self.compute()
        assert self.answer is not None
        return self.answer


class FakeRunner:
    """`eager`: a step computes when it is launched, as on a fast device; else when it is collected."""

    def __init__(
        self, num_blocks: int, block_size: int, failing: frozenset[str] = frozenset(), eager: bool = False
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.failing = failing  # requests whose rows report an error when they would sample
        self.eager = eager
        self.num_steps = 0
        self.slots: dict[int, SlotState] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.num_computed = 0

    def launch(self, step: Step) -> Launched:
        launched = Launched(self, step)
        if self.eager:
            launched.compute()
        return launched

    def compute(self, step: Step) -> StepResult:
        assert step.index == self.num_steps, "steps compute in their order"
        self.num_steps += 1
        for slot in step.released:
            del self.slots[slot]
        for admission in step.admitted:
            assert admission.slot not in self.slots, "a slot was admitted before it was released"
            self.slots[admission.slot] = SlotState(admission)
        for slot, _group, first, blocks in step.granted:
            assert first == len(self.slots[slot].table)
            self.slots[slot].table.extend(blocks)
            assert len(set(self.slots[slot].table)) == len(self.slots[slot].table)
        assert len({row.slot for row in step.rows}) == len(step.rows), "two rows of one slot"
        for row in step.rows:
            self._append(row)
        written: set[int] = set()
        for row in step.rows:
            self._write(row, written)
        return StepResult(tuple(self._answer(row) for row in step.rows))

    def _append(self, row: Row) -> None:
        state = self.slots[row.slot]
        fresh = state.num_computed is None
        assert bool(row.token_ids) == fresh, "the first row, and only the first, carries tokens"
        if fresh:
            state.num_computed = row.start
            state.tokens = list(row.token_ids)
        assert row.start == state.num_computed, "a row does not go on where the last one ended"
        end = row.start + row.count
        assert row.count > 0
        assert end <= len(state.tokens), "a row computes tokens that nobody knows"
        assert row.sample == (end == len(state.tokens))
        assert end <= len(state.table) * self.block_size, "a row computes past its blocks"

    def _place(self, state: SlotState, position: int) -> tuple[int, int]:
        return state.table[position // self.block_size], position % self.block_size

    def _write(self, row: Row, written: set[int]) -> None:
        state = self.slots[row.slot]
        blocks = {self._place(state, p)[0] for p in range(row.start, row.start + row.count)}
        assert not blocks & written, "two rows write to one block"
        written |= blocks
        others = {b for slot, other in self.slots.items() if slot != row.slot for b in other.table}
        assert not blocks & others, "a row writes to a block that another one reads"
        for position in range(row.start, row.start + row.count):
            before = self.kv[self._place(state, position - 1)] if position else self._root(state.admission)
            self.kv[self._place(state, position)] = next_value(before, state.tokens[position])
        state.num_computed = row.start + row.count
        self.num_computed += row.count

    @staticmethod
    def _root(admission: Admission) -> int:
        return mix("root", admission.context_variant)

    def _answer(self, row: Row) -> RowResult:
        state = self.slots[row.slot]
        admission, end = state.admission, row.start + row.count
        prompt_logprobs: tuple[PositionLogprobs, ...] = ()
        if admission.params.prompt_logprobs is not None:
            last = min(end, admission.num_prompt_tokens - 1)
            prompt_logprobs = tuple(
                logprob_of(self.kv[self._place(state, p)], state.tokens[p + 1])
                for p in range(row.start, last)
            )
        if not row.sample:
            return RowResult(prompt_logprobs=prompt_logprobs)
        if admission.request_id in self.failing:
            state.tokens.append(0)  # a row in flight may count on a token; what comes of it is dropped
            return RowResult(error=Failure("logits are not numbers"))
        values = [self.kv[self._place(state, p)] for p in range(end)]
        token_id = choose(values, admission, end)
        state.tokens.append(token_id)
        return RowResult((token_id,), (logprob_of(values[-1], token_id),), prompt_logprobs)


@dataclass
class Solo:
    """What a choice should receive, whatever else runs."""

    token_ids: list[int]
    logprobs: list[PositionLogprobs]
    prompt_logprobs: list[PositionLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


def solo(new: NewRequest, choice: int, max_model_len: int) -> Solo:
    """The output of one choice, written down anew without blocks, budgets or a scheduler."""
    params, prompt = new.params, list(new.prompt_token_ids)
    admission = Admission(0, new.request_id, choice, params, new.eos_token_ids, len(prompt))
    values: list[int] = []
    for token_id in prompt:
        values.append(next_value(values[-1] if values else mix("root", new.context_variant), token_id))
    expected = Solo([], [], [logprob_of(values[p], prompt[p + 1]) for p in range(len(prompt) - 1)])
    known = list(prompt)
    while expected.finish_reason is None:
        token_id = choose(values, admission, len(known))
        expected.logprobs.append(logprob_of(values[-1], token_id))
        expected.token_ids.append(token_id)
        known.append(token_id)
        values.append(next_value(values[-1], token_id))
        num_emitted = len(expected.token_ids)
        if num_emitted > params.min_tokens and token_id in new.eos_token_ids and not params.ignore_eos:
            expected.finish_reason = "stop"
        elif num_emitted > params.min_tokens and token_id in params.stop_token_ids:
            expected.finish_reason, expected.stop_reason = "stop", token_id
        elif num_emitted == params.max_tokens or len(known) == max_model_len:
            expected.finish_reason = "length"
    return expected


class Received:
    """The outputs of every choice put together, and the rules that hold for any run."""

    def __init__(self) -> None:
        self.token_ids: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[PositionLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[PositionLogprobs]] = {}
        self.final: dict[tuple[str, int], object] = {}

    def take(self, outputs: list) -> None:
        for out in outputs:
            key = (out.request_id, out.choice)
            assert key not in self.final, f"{key} received something after its final output"
            assert out.token_ids or out.finish_reason, "an output says nothing"
            assert len(out.logprobs) == len(out.token_ids)
            assert (out.metrics is not None) == (out.finish_reason is not None)
            assert (out.error is not None) == (out.finish_reason == "error")
            self.token_ids.setdefault(key, []).extend(out.token_ids)
            self.logprobs.setdefault(key, []).extend(out.logprobs)
            if out.prompt_logprobs:
                assert out.request_id not in self.prompt_logprobs, "prompt logprobs came twice"
                self.prompt_logprobs[out.request_id] = list(out.prompt_logprobs)
            if out.finish_reason is not None:
                self.final[key] = out

    def verify(self, new: NewRequest, choice: int, max_model_len: int) -> None:
        """Compare what a choice received with its solo output; an ended one may have a part of it."""
        key, expected = (new.request_id, choice), solo(new, choice, max_model_len)
        got, final = self.token_ids[key], self.final[key]
        assert got == expected.token_ids[: len(got)], f"{key}: tokens differ from those alone"
        assert self.logprobs[key] == expected.logprobs[: len(got)]
        if final.finish_reason not in ("abort", "error"):
            assert got == expected.token_ids
            assert (final.finish_reason, final.stop_reason) == (expected.finish_reason, expected.stop_reason)
            if new.params.prompt_logprobs is not None and len(new.prompt_token_ids) > 1:
                assert self.prompt_logprobs[new.request_id] == expected.prompt_logprobs
