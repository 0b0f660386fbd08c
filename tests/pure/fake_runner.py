"""A device without a model: the next token is a hash of everything that the caches hold before it.

It keeps what a real device keeps, and no more: for each slot the tokens, the block tables and the states
that steps told it, and one value for each (block, offset) of each group. The value at a position is a hash of
the token and of the values before it that its group can see, read through the block table. So a block shared
wrongly, overwritten, given back too early or found before it was computed gives another token, and `solo`
tells what the token should have been.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.engine.caches import BlockGroup, Group, StateGroup
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING
from quire.types import (
    Admission,
    Draft,
    Failure,
    FinishReason,
    NewRequest,
    PositionLogprobs,
    PromptImage,
    RequestMetrics,
    Row,
    RowResult,
    Step,
    StepResult,
    TokenLogprob,
)

VOCAB_SIZE = 23
LAW = StepLaw(  # 1 s, 0.25 s a row, and 0.5 s for the weights or 0.125 s a token, whichever is longer
    LEADING,
    (Stage((0.5, 0.0, 0.0, 0.0), (0.0, 0.0, 0.125, 0.0)),),
    (1.0, 0.25, 0.0, 0.0),
    (Stage((0.5, 0.0, 0.0, 0.0), (0.0, 0.0, 0.125, 0.0)),),
    tail=1.0,
)


def text(token_ids: Iterable[int]) -> tuple[Draft, ...]:
    """One draft of these tokens."""
    return (Draft(tuple(token_ids), "text", 8),)


def mix(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def next_value(before: int, key: object) -> int:
    """What a group without a window holds at a position: it depends on the token there and on all before."""
    return mix("kv", before, key)


def seen_value(before: Sequence[int], key: object, root: int) -> int:
    """What a group with a window holds at a position."""
    return mix("seen", root, list(before), key)


def root_of(new: NewRequest | Admission) -> int:
    return mix("root", new.context_variant, new.adapter)


def key_of(new: NewRequest | Admission, position: int, token_id: int) -> object:
    """What is computed at a position: its token, or what is in place of it."""
    for image in new.images:
        if image.first <= position < image.end:
            return ("image", image.pixels, position - image.first)
    return token_id


def logprob_of(value: int, token_id: int) -> PositionLogprobs:
    return (TokenLogprob(token_id, -(mix("logprob", value, token_id) % 1000) / 100, 1),)


def vector_of(values: list[list[int]]) -> tuple[float, ...]:
    return (float(mix("vector", values) % 1000), float(len(values[0]) if values else 0))


def choose(values: list[list[int]], admission: Admission, num_known: int) -> int:
    """The next token: a hash of every value in sight, by group; stop tokens are masked before min_tokens."""
    num_emitted = num_known - admission.num_prompt_tokens
    params = admission.params
    masked = num_emitted < params.min_tokens
    for attempt in range(1000):
        token_id = mix("token", values, admission.sequence, params.seed, attempt) % VOCAB_SIZE
        stops = token_id in admission.eos_token_ids or token_id in params.stop_token_ids
        if not (masked and stops):
            return token_id
    raise AssertionError("every token is masked")


@dataclass
class SlotState:
    admission: Admission
    tables: list[dict[int, int]]  # by group: entry -> block
    tokens: list[int] = field(default_factory=list)
    states: dict[int, list[int]] = field(default_factory=dict)  # by group: those of the row, the last one on
    state_start: int = 0  # the position of the first of them
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
        self,
        groups: Sequence[Group] | int,
        block_size: int,
        failing: frozenset[str] = frozenset(),
        eager: bool = False,
    ) -> None:
        self.groups = as_groups(groups)
        self.block_size = block_size
        self.failing = failing  # requests whose rows report an error when they would sample
        self.eager = eager
        self.num_steps = 0
        self.slots: dict[int, SlotState] = {}
        self.kv: dict[tuple[int, int, int], int] = {}  # (group, block, offset)
        self.snapshots: dict[tuple[int, int], int] = {}  # (group, snapshot)
        self.encoding: tuple[PromptImage, int] | None = None  # an image, and how much of its work is done
        self.num_computed = 0
        self.num_accepted = 0  # drafted tokens

    @property
    def num_blocks(self) -> int:
        return sum(group.num_blocks for group in self.groups if isinstance(group, BlockGroup))

    def launch(self, step: Step) -> Launched:
        launched = Launched(self, step)
        if self.eager:
            launched.compute()
        return launched

    def block_bytes(self, group: int) -> int:
        return 8 * (1 if isinstance(self.groups[group], StateGroup) else self.block_size)

    def read_blocks(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        return [b"".join(v.to_bytes(8, "little") for v in self._content(group, b)) for b in block_ids]

    def _content(self, group: int, block: int) -> list[int]:
        if isinstance(self.groups[group], StateGroup):
            return [self.snapshots[group, block]]
        return [self.kv[group, block, offset] for offset in range(self.block_size)]

    def write_blocks(self, group: int, block_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        for block, content in zip(block_ids, contents, strict=True):
            values = [int.from_bytes(content[i : i + 8], "little") for i in range(0, len(content), 8)]
            if isinstance(self.groups[group], StateGroup):
                (self.snapshots[group, block],) = values
            else:
                self.kv.update({(group, block, offset): value for offset, value in enumerate(values)})

    def compute(self, step: Step) -> StepResult:
        assert step.index == self.num_steps, "steps compute in their order"
        self.num_steps += 1
        for slot in step.released:
            del self.slots[slot]
        for admission in step.admitted:
            assert admission.slot not in self.slots, "a slot was admitted before it was released"
            self.slots[admission.slot] = SlotState(admission, [{} for _ in self.groups])
        for grant in step.granted:
            group, table = self.groups[grant.group], self.slots[grant.slot].tables[grant.group]
            assert isinstance(group, BlockGroup)
            assert not table or grant.first == max(table) + 1
            assert all(0 <= block < group.num_blocks for block in grant.block_ids)
            table.update(enumerate(grant.block_ids, grant.first))
        restored = {(one.slot, one.group): one for one in step.restored}
        for (slot, number), one in restored.items():
            self.slots[slot].states[number] = [self.snapshots[number, one.snapshot]]
            self.slots[slot].state_start = one.position
        assert len({row.slot for row in step.rows}) == len(step.rows), "two rows of one slot"
        self._encode(step)
        for row in step.rows:
            self._append(row)
        written: set[tuple[int, int]] = set()
        for row in step.rows:
            self._write(row, written)
        for one in step.saved:
            state = self.slots[one.slot]
            self.snapshots[one.group, one.snapshot] = state.states[one.group][
                one.position - state.state_start
            ]
        return StepResult(tuple(self._answer(row) for row in step.rows), draft_s=step.num_proposed / 16)

    def _encode(self, step: Step) -> None:
        """Check that slices of images go on where the last ended, and that no token waits for a whole one."""
        gives, needed = False, list[PromptImage]()
        for row in step.rows:
            begun, state = self.slots[row.slot].num_computed is not None, self.slots[row.slot]
            for image in state.admission.images:
                if (
                    image.first if begun else image.end - 1
                ) >= row.start and image.first < row.start + row.count:
                    needed.append(image)
                    done = self._encoded(image)
                    part = step.image_slice
                    if part is not None and part.image is image:
                        assert part.begin in (0, done)
                        assert part.end == image.work
                        done = part.end
                    assert not gives or done == image.work, "a token waits for an image"
            gives = gives or row.sample
        if needed:
            self.encoding = None
        if (part := step.image_slice) is not None:
            assert gives
            assert part.begin < part.end <= part.image.work
            if not any(image is part.image for image in needed):
                assert part.begin in (0, self._encoded(part.image)), "a slice does not go on"
                self.encoding = part.image, part.end

    def _encoded(self, image: PromptImage) -> int:
        """How much of the work of an image is done."""
        return self.encoding[1] if self.encoding is not None and self.encoding[0] is image else 0

    def _append(self, row: Row) -> None:
        state = self.slots[row.slot]
        fresh = state.num_computed is None
        assert bool(row.token_ids) == fresh, "the first row, and only the first, carries tokens"
        if fresh:
            state.num_computed = row.start
            state.tokens = list(row.token_ids)
        assert row.start == state.num_computed, "a row does not go on where the last one ended"
        end = row.start + row.count - len(row.drafted)
        assert row.count > len(row.drafted)
        assert end <= len(state.tokens), "a row computes tokens that nobody knows"
        for image in state.admission.images:
            cuts = [at for at in (row.start, row.start + row.count) if image.first < at < image.end]
            assert not (image.whole and cuts), "an image is computed in parts"
        pooled = bool(state.admission.pooling)
        assert row.sample == (end == len(state.tokens) and not pooled)
        assert row.sample or not row.drafted
        assert not pooled or (row.start, row.count) == (0, len(state.tokens)), "it is pooled in chunks"
        assert int(row.sample) + len(row.drafted) <= row.num_logits <= row.count
        for number, group in enumerate(self.groups):
            if isinstance(group, StateGroup):
                if not row.start:
                    state.states[number], state.state_start = [root_of(state.admission)], 0
                assert state.state_start + len(state.states[number]) - 1 == row.start, "a state is not there"
                state.states[number] = state.states[number][-1:]
            else:
                last = (row.start + row.count - 1) // self.block_size
                first = self._first_visible(group, row.start)
                assert all(n in state.tables[number] for n in range(first, last + 1)), "a block is not there"
        state.state_start = row.start

    def _first_visible(self, group: BlockGroup, position: int) -> int:
        return max(0, position - group.window + 1) // self.block_size if group.window else 0

    def _place(self, state: SlotState, number: int, position: int) -> tuple[int, int, int]:
        table = state.tables[number]
        return number, table[position // self.block_size], position % self.block_size

    def _write(self, row: Row, written: set[tuple[int, int]]) -> None:
        state, admission = self.slots[row.slot], self.slots[row.slot].admission
        positions = range(row.start, row.start + row.count)
        for number, group in enumerate(self.groups):
            if isinstance(group, BlockGroup):
                self._check_alone(row, number, group, written)
        for position, token_id in zip(
            positions, [*state.tokens, *row.drafted][row.start : row.start + row.count], strict=True
        ):
            key = key_of(admission, position, token_id)
            for number, group in enumerate(self.groups):
                if isinstance(group, StateGroup):
                    state.states[number].append(next_value(state.states[number][-1], key))
                elif group.window is None:
                    last = (
                        self.kv[self._place(state, number, position - 1)] if position else root_of(admission)
                    )
                    self.kv[self._place(state, number, position)] = next_value(last, key)
                else:
                    before = self._seen(state, number, position, group.window - 1)
                    value = seen_value(before, key, root_of(admission))
                    self.kv[self._place(state, number, position)] = value
        state.num_computed = row.start + row.count
        self.num_computed += row.count

    def _check_alone(self, row: Row, number: int, group: BlockGroup, written: set[tuple[int, int]]) -> None:
        table = self.slots[row.slot].tables[number]
        first, last = row.start // self.block_size, (row.start + row.count - 1) // self.block_size
        blocks = {(number, table[entry]) for entry in range(first, last + 1)}
        assert not blocks & written, "two rows write to one block"
        written |= blocks
        own = [block for entry, block in table.items() if entry >= self._first_visible(group, row.start)]
        assert len(own) == len(set(own)), "a block is twice in a table"
        for slot, other in self.slots.items():
            if slot != row.slot and other.num_computed is not None:
                visible = self._first_visible(group, other.num_computed)
                read = {(number, block) for entry, block in other.tables[number].items() if entry >= visible}
                assert not blocks & read, "a row writes to a block that another one reads"

    def _seen(self, state: SlotState, number: int, end: int, count: int | None) -> list[int]:
        """The last `count` values of a group before position `end`, or all."""
        first = 0 if count is None else max(0, end - count)
        return [self.kv[self._place(state, number, p)] for p in range(first, end)]

    def _values(self, state: SlotState, end: int) -> list[list[int]]:
        """All that decides what follows `end` tokens, by group."""
        return [
            [state.states[number][end - state.state_start]]
            if isinstance(group, StateGroup)
            else self._seen(state, number, end, group.window)
            for number, group in enumerate(self.groups)
        ]

    def _answer(self, row: Row) -> RowResult:
        state = self.slots[row.slot]
        admission, end = state.admission, row.start + row.count
        if admission.pooling:
            return RowResult(vector=vector_of(self._values(state, end)))
        prompt_logprobs: tuple[PositionLogprobs, ...] = ()
        if admission.params.prompt_logprobs is not None:
            last = min(end, admission.num_prompt_tokens - 1)
            assert row.num_logits == row.count or last <= row.start, "logits of the prompt were not asked for"
            prompt_logprobs = tuple(
                logprob_of(last_of(self._values(state, p + 1)), state.tokens[p + 1])
                for p in range(row.start, last)
            )
        if not row.sample:
            return RowResult(prompt_logprobs=prompt_logprobs)
        return self._sample(row, state)._replace(prompt_logprobs=prompt_logprobs)

    def _sample(self, row: Row, state: SlotState) -> RowResult:
        token_ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        first = len(state.tokens)
        failed = state.admission.request_id in self.failing
        for drafted in (*row.drafted, None):
            values = self._values(state, len(state.tokens))
            token_id = 0 if failed else choose(values, state.admission, len(state.tokens))
            state.tokens.append(token_id)  # of a failed one, too: a row in flight may count on it
            token_ids.append(token_id)
            logprobs.append(logprob_of(last_of(values), token_id))
            if failed or token_id != drafted:
                break
        self.num_accepted += len(token_ids) - 1
        state.num_computed = first + len(token_ids) - 1
        for held in state.states.values():
            del held[state.num_computed - state.state_start + 1 :]
        if failed:
            return RowResult(error=Failure("logits are not numbers"))
        return RowResult(tuple(token_ids), tuple(logprobs))


def as_groups(groups: Sequence[Group] | int) -> list[Group]:
    return [BlockGroup(groups)] if isinstance(groups, int) else list(groups)


def last_of(values: list[list[int]]) -> int:
    return mix("last", [held[-1] for held in values])


class Alone:
    """What the groups hold of one sequence that is computed by itself."""

    def __init__(self, new: NewRequest, groups: Sequence[Group]) -> None:
        self.new = new
        self.groups = groups
        self.root = root_of(new)
        self.held: list[list[int]] = [[] for _ in groups]
        self.num_tokens = 0

    def take(self, token_id: int) -> None:
        key = key_of(self.new, self.num_tokens, token_id)
        for group, held in zip(self.groups, self.held, strict=True):
            window = group.window if isinstance(group, BlockGroup) else None
            if window is None:
                held.append(next_value(held[-1] if held else self.root, key))
            else:
                held.append(seen_value(held[-window + 1 :] if window > 1 else [], key, self.root))
        self.num_tokens += 1

    def values(self) -> list[list[int]]:
        seen = []
        for group, held in zip(self.groups, self.held, strict=True):
            if isinstance(group, StateGroup):
                seen.append(held[-1:])
            else:
                seen.append(held[-group.window :] if group.window else list(held))
        return seen


@dataclass
class Solo:
    """What a sequence should receive, whatever else runs."""

    token_ids: list[int]
    logprobs: list[PositionLogprobs]
    prompt_logprobs: list[PositionLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    vector: tuple[float, ...] = ()


def solo(
    new: NewRequest, sequence: int, max_model_len: int, groups: Sequence[Group] = (BlockGroup(1),)
) -> Solo:
    """The output of one sequence, written down anew without blocks, budgets or a scheduler."""
    params, prompt = new.params, list(new.prompt_token_ids)
    admission = Admission(0, new.request_id, sequence, params, new.eos_token_ids, len(prompt))
    alone = Alone(new, groups)
    expected = Solo([], [], [])
    for token_id in prompt:
        if alone.num_tokens:
            expected.prompt_logprobs.append(logprob_of(last_of(alone.values()), token_id))
        alone.take(token_id)
    if new.pooling:
        expected.vector, expected.finish_reason = vector_of(alone.values()), "stop"
    known = list(prompt)
    while expected.finish_reason is None:
        values = alone.values()
        token_id = choose(values, admission, len(known))
        expected.logprobs.append(logprob_of(last_of(values), token_id))
        expected.token_ids.append(token_id)
        known.append(token_id)
        alone.take(token_id)
        num_emitted = len(expected.token_ids)
        if num_emitted > params.min_tokens and token_id in new.eos_token_ids and not params.ignore_eos:
            expected.finish_reason = "stop"
        elif num_emitted > params.min_tokens and token_id in params.stop_token_ids:
            expected.finish_reason, expected.stop_reason = "stop", token_id
        elif num_emitted == params.max_tokens or len(known) == max_model_len:
            expected.finish_reason = "length"
    return expected


def check_times(times: RequestMetrics, shares_prompt: bool = False) -> None:
    """The parts of a sequence's time are its time, and nobody delayed it for longer than that."""
    assert times.finished_s is not None
    parts = (times.queue_s, times.prefill_s, times.decode_s, times.preempted_s)
    assert all(part >= -1e-9 for part in (*parts, times.prefill_preempted_s))
    assert abs(sum(parts) - (times.finished_s - times.arrival_s)) < 1e-9
    assert times.prefill_preempted_s <= times.preempted_s
    assert bool(times.preempted_s) <= bool(times.num_preemptions + times.num_continuations)
    computed_s = times.prefill_s + times.decode_s + (times.queue_s if shares_prompt else 0.0)
    interference = (times.prefill_interference_s, times.decode_interference_s)
    assert all(part >= 0.0 for part in (*interference, times.cached_saved_s, times.ideal_s))
    assert sum(interference) <= computed_s + 1e-9


class Received:
    """The outputs of every sequence put together, and the rules that hold for any run."""

    def __init__(self, groups: Sequence[Group] = (BlockGroup(1),)) -> None:
        self.groups = groups
        self.token_ids: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[PositionLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[PositionLogprobs]] = {}
        self.final: dict[tuple[str, int], object] = {}

    def take(self, outputs: list) -> None:
        for out in outputs:
            key = (out.request_id, out.sequence)
            assert key not in self.final, f"{key} received something after its final output"
            assert out.token_ids or out.finish_reason, "an output says nothing"
            assert len(out.logprobs) == len(out.token_ids)
            times, ended = out.metrics, out.finish_reason is not None
            assert (times is not None and times.finished_s is not None) == ended
            assert times is None or ended or times.first_token_s is not None
            if times is not None and ended:
                check_times(times, shares_prompt=out.sequence > 0)
            assert (out.error is not None) == (out.finish_reason == "error")
            self.token_ids.setdefault(key, []).extend(out.token_ids)
            self.logprobs.setdefault(key, []).extend(out.logprobs)
            if out.prompt_logprobs:
                assert out.request_id not in self.prompt_logprobs, "prompt logprobs came twice"
                self.prompt_logprobs[out.request_id] = list(out.prompt_logprobs)
            if out.finish_reason is not None:
                self.final[key] = out

    def take_resumed(self, new: NewRequest, expected: Sequence[Solo]) -> None:
        """Take what another engine gave before: all of a sequence that it ended."""
        for index, (emitted, whole) in enumerate(zip(new.resumed, expected, strict=True)):
            key, count = (new.request_id, index), len(whole.token_ids if emitted is None else emitted)
            self.token_ids[key], self.logprobs[key] = whole.token_ids[:count], whole.logprobs[:count]
            if emitted is None:
                self.final[key] = whole

    def verify(self, new: NewRequest, sequence: int, max_model_len: int) -> None:
        """Compare what a sequence received with its solo output; an ended one may have a part of it."""
        key, expected = (new.request_id, sequence), solo(new, sequence, max_model_len, self.groups)
        got, final = self.token_ids[key], self.final[key]
        assert got == expected.token_ids[: len(got)], f"{key}: tokens differ from those alone"
        assert self.logprobs[key] == expected.logprobs[: len(got)]
        if final.finish_reason not in ("abort", "error"):
            assert got == expected.token_ids
            assert final.vector == expected.vector
            assert (final.finish_reason, final.stop_reason) == (expected.finish_reason, expected.stop_reason)
            if new.params.prompt_logprobs is not None and len(new.prompt_token_ids) > 1 and not new.pooling:
                assert self.prompt_logprobs[new.request_id] == expected.prompt_logprobs
