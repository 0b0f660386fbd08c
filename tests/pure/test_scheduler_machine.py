"""Random histories: whatever arrives, ends or is preempted, every request gets what it would get alone."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from fake_runner import LAW, FakeRunner, Received, mix, solo, text
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.engine.caches import BlockGroup, StateGroup
from quire.engine.engine import validate
from quire.engine.request import ScheduledRequest
from quire.engine.scheduler import Scheduler
from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.types import Draft, NewRequest, PromptImage

MAX_MODEL_LEN = 40
SEQUENCES = st.one_of(st.none(), st.integers(0, 3))

prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=20),  # often share a beginning
    st.integers(1, 30).map(lambda length: [t % 3 for t in range(length)]),
)


images = st.sampled_from(  # names, tokens before each, and its own; often the same
    [
        (),
        (("ca", 1, 6),),
        (("ca", 1, 6),),
        (("do", 1, 6), ("ca", 0, 3)),
        (("ca", 0, 3), ("do", 5, 9), ("ca", 1, 1)),
    ]
)


def make_params(max_tokens: int | None, min_tokens: int, **fields) -> SamplingParams:
    if max_tokens is not None:
        min_tokens = min(min_tokens, max_tokens)
    return SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, **fields)


whole = st.builds(BlockGroup, st.integers(4, 40))
windowed = st.builds(BlockGroup, st.integers(3, 30), st.integers(1, 9))
states = st.builds(StateGroup, st.integers(0, 5), st.integers(1, 4))
models = st.one_of(
    st.tuples(whole),
    st.tuples(windowed),
    st.tuples(whole, windowed),
    st.tuples(whole, states),
    st.tuples(windowed, whole, windowed),
    st.tuples(states, whole, states),
    st.tuples(states, windowed, whole),
    st.tuples(states),
)

sampling_params = st.builds(
    make_params,
    n=st.sampled_from([1, 1, 1, 2, 4]),
    max_tokens=st.one_of(st.none(), st.integers(1, 12)),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(), (), (5,), (3, 7)]),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 1),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        groups=models,
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        num_spare_blocks=st.integers(0, 1),
        max_steps_in_flight=st.integers(1, 2),
        eager=st.booleans(),
        drafts=st.integers(0, 2),
        law=st.sampled_from([None, LAW]),
        itl_goal_s=st.sampled_from([None, 3.0, 4.0]),
        speculation=st.booleans(),
        draft_model=st.booleans(),
        prefill=st.sampled_from([None, None, 3]),
        whole_images=st.sampled_from([True, True, False]),
        work=st.sampled_from([0, 1, 3, 10]),
    )
    def start(
        self,
        block_size,
        groups,
        max_num_seqs,
        budget,
        caching,
        policy,
        num_spare_blocks,
        max_steps_in_flight,
        eager,
        drafts,
        law,
        itl_goal_s,
        speculation,
        draft_model,
        prefill,
        whole_images,
        work,
    ):
        self.scheduler = self.make_scheduler(
            groups=groups,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_num_prefill_tokens=prefill,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            policy=policy,
            num_spare_blocks=num_spare_blocks,
            max_steps_in_flight=max_steps_in_flight,
            itl_goal_s=itl_goal_s,
            speculation=speculation,
            draft_model=draft_model,
        )
        if law is not None:
            self.scheduler.calibrate(law)
        self.runner = FakeRunner(groups, block_size, frozenset({"r3", "r11"}), eager)
        self.whole_images, self.work = whole_images, work
        self.in_flight = deque()
        self.received = Received(groups)
        self.drafts = drafts  # 0: none; 1: guesses; 2: guesses of which some are right
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.requests: list[NewRequest] = []
        self.now = 0.0
        self.store: dict[bytes, dict[int, bytes]] = {}  # contents of blocks, by hash and group
        self.num_loaded = 0

    def make_scheduler(self, **arguments):
        return Scheduler(**arguments)

    @rule(
        prompt=prompts,
        params=sampling_params,
        tenant=st.sampled_from("ab"),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from(["", "", "s"]),
        context_variant=st.sampled_from([0, 0, 1]),
        grammar=st.sampled_from(["", "", "", "", "g"]),
        adapter=st.sampled_from(["", "", "x"]),
        images=images,
        pooling=st.sampled_from(["", "", "", "mean"]),
        resumed=st.sampled_from([False, False, False, True]),
    )
    def add(self, prompt, params, images=(), resumed=False, **fields):
        request_id = f"r{len(self.requests)}"
        prompt, placed = self._place(prompt, images)
        fields |= {"images": placed, "block_keys": tuple((one.first, one.pixels) for one in placed)}
        new = NewRequest(request_id, tuple(prompt), params, self.now, eos_token_ids=(1,), **fields)
        try:
            validate(new, self.scheduler)
        except RequestError:
            return
        if resumed and not new.pooling:
            new = self._resumed(new)
        self.requests.append(new)
        self.scheduler.add(new)

    def _place(self, prompt, images):
        """A prompt with images in place of some of its tokens, which are all the same then, or after them."""
        placed, end = [], 0
        for name, gap, length in images:
            first, end = end + gap, end + gap + length
            prompt = [*prompt[:first], *[0] * (end - min(first, len(prompt))), *prompt[end:]]
            pixels = f"{name}{length}".encode()
            placed.append(PromptImage(first, 1, length, 1, 1, pixels, self.whole_images, self.work * length))
        return prompt, tuple(placed)

    def _resumed(self, new):
        """The request as another engine left it: each sequence somewhere, if one of them is open."""
        groups, sequences = self.scheduler.caches.groups, range(new.params.n)
        expected = [solo(new, index, MAX_MODEL_LEN, groups) for index in sequences]
        emitted = []
        for index, whole in enumerate(expected):
            count = mix(new.request_id, index, "resumed") % (len(whole.token_ids) + 1)
            emitted.append(tuple(whole.token_ids[:count]) if count < len(whole.token_ids) else None)
        if not any(one is not None for one in emitted):
            return new
        given = any(one is None or one for one in emitted)  # with the first token of any of them
        params = replace(new.params, prompt_logprobs=None) if given else new.params
        new = replace(new, params=params, resumed=tuple(emitted))
        validate(new, self.scheduler)
        self.received.take_resumed(new, expected)
        return new

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), sequence=SEQUENCES)
    def abort(self, data, sequence):
        new = data.draw(st.sampled_from(self.requests))
        self.received.take(self.scheduler.abort(new.request_id, self.now, sequence))

    @rule(groups=st.sets(st.integers(0, 2), min_size=1))
    def keep(self, groups):
        """Copy out the blocks that can be found, of some groups."""
        caches = self.scheduler.caches
        for group in (*caches.paged, *caches.states):
            if group.index not in groups:
                continue
            for block_hash, block in group.pool._block_of.items():
                (content,) = self.runner.read_blocks(group.index, [block])
                kept = self.store.setdefault(block_hash, {})
                assert kept.setdefault(group.index, content) == content, "one hash, two contents"

    @precondition(lambda self: self.store and not self.in_flight)
    @rule(
        prompt=prompts,
        data=st.data(),
        first=st.sampled_from([0, 0, 1, 2]),
        cache_salt=st.sampled_from(["", "s"]),
    )
    def load(self, prompt, data, first, cache_salt):
        """Load what was kept of some text, the beginning or not."""
        params = SamplingParams()
        new = NewRequest("loaded", tuple(prompt), params, self.now, cache_salt=cache_salt)
        if self.requests and data.draw(st.booleans()):
            new = data.draw(st.sampled_from(self.requests))
        size = self.scheduler.block_size
        one = ScheduledRequest.of(new, MAX_MODEL_LEN, size, private=False).sequences[0]
        hashes = [one.block_hash(i, size) for i in range(one.num_prompt // size)][first:]
        contents = [self.store.get(block_hash, {}) for block_hash in hashes]
        self.scheduler.load(new, first, [])  # a recorded scheduler may forget everything before a load, once
        before = [pool.num_free for pool in self._pools()]
        usable = self._num_usable(new)
        loads = self.scheduler.load(new, first, contents)
        assert [pool.num_free for pool in self._pools()] == before, "a load holds blocks"
        for load in loads:
            content = contents[load.index - first][load.group]
            self.runner.write_blocks(load.group, [load.block_id], [content])
        after = self._num_usable(new)
        assert after > usable or not loads, "what was loaded is of no use"
        assert all(load.index < after for load in loads)
        self.num_loaded += len(loads)

    def _pools(self):
        return [one.pool for one in (*self.scheduler.caches.paged, *self.scheduler.caches.states)]

    def _num_usable(self, new):
        size = self.scheduler.block_size
        one = ScheduledRequest.of(new, MAX_MODEL_LEN, size, private=False).sequences[0]
        return self.scheduler.caches.match(one).num_blocks

    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self._step()

    @precondition(lambda self: len(self.in_flight) < self.scheduler.max_steps_in_flight)
    @rule()
    def launch(self):
        self._launch()

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self):
        self._collect()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), sequence=SEQUENCES)
    def abort_in_flight(self, data, sequence):
        self._step(abort=(data.draw(st.sampled_from(self.requests)).request_id, sequence))

    @rule(prompt=prompts, params=sampling_params)
    def add_in_flight(self, prompt, params):
        self._step(during=lambda: self.add(prompt, params, tenant="c"))

    def _step(self, abort=None, during=None):
        while len(self.in_flight) < self.scheduler.max_steps_in_flight and self._launch():
            pass
        if during:
            during()
        if abort:
            self.received.take(self.scheduler.abort(abort[0], self.now, abort[1]))
        if self.in_flight:
            self._collect()

    def _launch(self):
        self.now += 1.0
        oldest = next(iter(self.scheduler._running.values()), None)
        alone = not self.in_flight
        ruled = any(sequence.request.new.grammar for sequence in self.scheduler._running.values())
        step = self.scheduler.schedule(self.now)
        if step is None:
            assert self.in_flight or not self.scheduler.has_work, "nothing is planned"
            return False
        assert 0 < step.num_tokens <= self.scheduler.max_num_batched_tokens
        if oldest is not None and alone:
            assert step.rows[0].slot == oldest.slot, "the oldest does not advance"
        assert alone or not ruled, "a step was planned ahead of a grammar"
        if not alone:
            newest = self.in_flight[-1][0]
            assert not any(row.drafted for row in newest.rows), "a step was planned ahead of a draft"
            assert not newest.num_proposed, "a step was planned ahead of what a draft model proposes"
        self.in_flight.append((step, self.runner.launch(step)))
        return True

    def _draft(self):
        """Guess for all that run: some right tokens, some wrong ones, for each and each time others."""
        names = self.scheduler.drafting()
        assert not (self.in_flight and names), "drafts are asked for before the last tokens are known"
        for sequence in self.scheduler._running.values():
            new, index = sequence.request.new, sequence.index
            num_right, num_wrong = divmod(mix(self.now, new.request_id, index) % 20, 4)
            right = []
            if self.drafts == 2:
                if (new.request_id, index) not in self.expected:
                    alone = solo(new, index, MAX_MODEL_LEN, self.scheduler.caches.groups)
                    self.expected[new.request_id, index] = alone.token_ids
                right = self.expected[new.request_id, index][len(sequence.emitted) :][:num_right]
            drafts = text([*right, *range(num_wrong)])
            if mix(self.now, "sources", index) % 2:
                others = [Draft(tuple(right[:3]), "grammar"), Draft((*right[:1], 5), "model")]
                drafts = (drafts[0]._replace(source="store", match=len(right)), *others)
            taken = self.scheduler.draft(new.request_id, index, drafts)
            assert taken == (sequence.num_planned == sequence.num_computed)

    def _collect(self):
        step, pending = self.in_flight.popleft()
        self.now += mix(self.now, step.index) % 7 / 4
        self.received.take(self.scheduler.commit(step, pending.result(), self.now))
        if self.drafts:
            self._draft()

    @invariant()
    def coherent(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        work = sum(r.params.n * MAX_MODEL_LEN for r in self.requests)
        for _ in range(work * MAX_MODEL_LEN + 1):
            if not self.scheduler.has_work and not self.in_flight:
                break
            self._step()
            self.scheduler.check()
        assert not self.scheduler.has_work, "a request starves"
        assert self.scheduler.num_free_blocks == self.runner.num_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for new in self.requests:
            for sequence in range(new.params.n):
                self.received.verify(new, sequence, MAX_MODEL_LEN)
        assert len(self.received.final) == sum(r.params.n for r in self.requests)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
