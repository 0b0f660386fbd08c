"""Programs with windows, states and vectors behind the real scheduler: the same bits in every schedule, from
the cache, after a preemption, with drafts and with two steps in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from seeing import image, prompt_of, seeing, weights_of
from test_waist import encoder, plain
from tiny import VOCAB, random_weights

from quire.backends.backend import Backend, Capacity
from quire.backends.reference import ReferenceBackend
from quire.engine.caches import BlockGroup, StateGroup
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.models.compressed import choose_entries, compress, compressed_attention
from quire.program import Builder, Names, PagedIndex, Program, SlotState, Value
from quire.program.caches import MAX_DRAFTED
from quire.program.ops import ChoosePositions
from quire.runner.runner import Runner
from quire.sampling_params import SamplingParams
from quire.types import Draft, NewRequest, Output, PromptImage

W = Names("w")
WINDOW, CHOSEN = 40, 80
RNG = np.random.default_rng(0)
SHARED = RNG.integers(0, VOCAB, 130).tolist()
PROMPTS = [
    SHARED,
    [*SHARED[:100], *RNG.integers(0, VOCAB, 60).tolist()],
    RNG.integers(0, VOCAB, 5).tolist(),
    [*SHARED, *RNG.integers(0, VOCAB, 90).tolist()],
]
ANY = SamplingParams(temperature=0.8, logprobs=3, max_tokens=20, ignore_eos=True)
PARAMS = [replace(ANY, seed=seed, prompt_logprobs=2 if seed == 1 else None) for seed in range(4)]


def mixed() -> Program:
    """A recurrence, a window, full attention, chosen latents and compressed attention, each in two layers."""
    b, chosen = Builder(), None
    x = b.embed(W / "e", VOCAB, 8)
    for i in range(2):
        p = W / f"{i}"
        h = b.short_convolution(b.rms_norm(x, p / "norm", 1e-5), p / "conv", 4)
        decay = b.soft_cap(b.linear(h, p / "decay", 8), 0.95)
        x = b.add(x, b.gated_recurrence(b.linear(h, p / "in", 8), decay))
        for window in (WINDOW, None):
            a = p / f"{window}"
            q, k, v = (b.linear(b.rms_norm(x, a / "norm", 1e-5), a / name, (2, 4)) for name in "qkv")
            x = b.add(x, b.linear(b.attention(q, k, v, window=window), a / "o", 8))
        a = p / "latent"
        h = b.rms_norm(x, a / "norm", 1e-5)
        if chosen is None:
            lists = b.value((CHOSEN,), dtype="int32")
            of_index = (b.linear(h, a / f"index.{n}", w) for n, w in (("q", (3, 4)), ("w", 3), ("k", (1, 4))))
            chosen = b.record(ChoosePositions(lists, *of_index, b.cache(PagedIndex(4)))).out
        q, rest = b.linear(h, a / "q", (2, 5)), b.linear(h, a / "rest", (2, 2))
        c, r = b.linear(h, a / "c", 5), b.linear(h, a / "r", (1, 2))
        latents = b.latent_attention(q, rest, c, r, scale=0.4, chosen=chosen)
        x = b.add(x, b.linear(latents, a / "o", 8))
        x = b.add(x, compressed(b, b.rms_norm(x, p / "last", 1e-5), p / "compressed", (4, 32)[i]))
    return b.program(b.linear(b.sampled_rows(x), W / "head", VOCAB))


def compressed(b: Builder, h: Value, p: Names, every: int) -> Value:
    """Attention to entries of `every` tokens, those of 4 chosen."""

    def entries(p: Names, dim: int) -> Value:
        width = 2 * dim if every == 4 else dim
        values, gates = b.linear(h, p / "values", width), b.linear(h, p / "gates", width)
        return compress(b, values, gates, p / "bias", every, overlapping=every == 4)

    q, k, chosen = b.linear(h, p / "q", (2, 6)), b.linear(h, p / "k", (1, 6)), None
    if every == 4:
        of_index = b.linear(h, p / "index.q", (3, 4)), b.linear(h, p / "index.w", 3)
        chosen = choose_entries(b, *of_index, entries(p / "index", 4), every, CHOSEN // 4)
    out = compressed_attention(b, q, k, entries(p, 6), every, window=24, scale=0.4, chosen=chosen)
    return b.linear(out, p / "o", 8)


def new_backend(program: Program, capacity: Capacity) -> Backend:
    return ReferenceBackend(
        program,
        random_weights(program),
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        num_slots=capacity.max_num_seqs,
        num_snapshots=capacity.num_snapshots,
    )


def make(
    program: Program,
    *,
    num_blocks: int = 200,
    num_windowed: int = 200,
    backend: Callable[[Program, Capacity], Backend] | None = None,
    **limits: Any,
) -> Engine:
    specs = program.cache_groups
    every, num_snapshots = limits.pop("every", 4), limits.pop("num_snapshots", 30)
    blocks = [0 if isinstance(s, SlotState) else num_windowed if s.window else num_blocks for s in specs]
    in_flight = limits.get("max_steps_in_flight", 1)
    capacity = Capacity(blocks, 16, "float32", 8, num_snapshots, in_flight)
    groups = [
        StateGroup(num_snapshots, every) if isinstance(spec, SlotState) else BlockGroup(count, spec.window)
        for spec, count in zip(specs, blocks, strict=True)
    ]
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 400, "max_model_len": 300, **limits}
    own = (backend or new_backend)(program, capacity)
    return Engine(Scheduler(groups=groups, block_size=16, **options), Runner(own))


Answer = tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]  # tokens, log-probabilities, the prompt's


def run(
    engine: Engine, chosen: range = range(4), drafts: dict[int, Answer] | None = None
) -> dict[int, Answer]:
    """Answers by request; with `drafts`, what they hold is proposed all along, every sixth token wrong."""
    for i in chosen:
        engine.add(NewRequest(str(i), tuple(PROMPTS[i]), PARAMS[i]))
    outputs: dict[int, list[Output]] = {i: [] for i in chosen}
    while engine.has_work:
        for output in engine.step():
            outputs[int(output.request_id)].append(output)
        for i, known in (drafts or {}).items():
            count = sum(len(output.token_ids) for output in outputs[i])
            right = known[0][count : count + 5]
            draft = Draft(tuple(t if t % 6 else (t + 1) % VOCAB for t in right), "text")
            engine.scheduler.draft(str(i), 0, (draft,))
        engine.scheduler.check()
    found = {}
    for i, got in outputs.items():
        assert got[-1].finish_reason == "length", got[-1]
        parts = [[getattr(output, name) for output in got] for name in ("token_ids", "logprobs")]
        found[i] = (*(sum(part, ()) for part in parts), got[0].prompt_logprobs)
    return found


def each_alone() -> dict[int, Answer]:
    """Each by itself in an engine of its own, its prompt in one chunk."""
    found: dict[int, Answer] = {}
    for i in range(4):
        found |= run(make(mixed(), enable_prefix_caching=False), range(i, i + 1))
    return found


@pytest.fixture(scope="module")
def alone() -> dict[int, Answer]:
    return each_alone()


SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 50": {"max_num_batched_tokens": 50},
    "two steps in flight": {"max_steps_in_flight": 2, "max_num_batched_tokens": 60},
    "a snapshot at each block": {"every": 1, "max_num_batched_tokens": 40},
    "few snapshots": {"num_snapshots": 2, "max_num_seqs": 2},
    "few blocks": {"num_blocks": 20, "num_spare_blocks": 0, "max_num_batched_tokens": 64},
    "few blocks of a window": {"num_windowed": 9, "num_spare_blocks": 0, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_same_bits_in_any_schedule(name: str, alone: dict[int, Answer]) -> None:
    """Also when asked again, of the same engine, which has kept blocks and states."""
    engine = make(mixed(), **SCHEDULES[name])
    assert run(engine) == alone
    cached = engine.scheduler.num_cached_tokens
    assert run(engine) == alone
    assert engine.scheduler.num_cached_tokens > cached
    assert (engine.scheduler.num_preemptions > 0) == (name == "few blocks")


@pytest.mark.parametrize("name", ["together", "chunks of 50"])
def test_same_bits_with_drafts(name: str, alone: dict[int, Answer]) -> None:
    engine = make(mixed(), **SCHEDULES[name])
    assert run(engine, drafts=alone) == alone
    assert len(engine.records) < 20


def test_no_more_is_drafted_than_states_can_go_back() -> None:
    """Sixty tokens proposed, all but the first of them wrong; what follows is not changed."""
    params, prompt = replace(ANY, seed=5, max_tokens=64), tuple(SHARED[:62])
    expected = one_by_one(make(mixed()), [NewRequest("0", prompt, params)])[0].token_ids
    engine = make(mixed())
    engine.add(NewRequest("0", prompt, params))
    token_ids, most = (), 0
    while engine.has_work:
        for output in engine.step():
            token_ids += output.token_ids
        right = expected[len(token_ids) : len(token_ids) + 1]
        engine.scheduler.draft("0", 0, (Draft((*right, *[(t + 1) % VOCAB for t in right] * 59), "text"),))
        most = max(most, *(record.num_tokens for record in list(engine.records)[1:]), 0)
    assert token_ids == expected
    assert most == MAX_DRAFTED + 1


def test_windows_hold_no_more_than_they_see(alone: dict[int, Answer]) -> None:
    """A request of 260 tokens in a group of so few blocks that the window and a chunk just fit."""
    engine = make(mixed(), num_windowed=6, max_num_batched_tokens=32, enable_prefix_caching=False)
    assert run(engine, range(3, 4)) == {3: alone[3]}


def test_vectors_behind_the_scheduler() -> None:
    program = encoder()
    engine = make(program, max_num_batched_tokens=200)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add(NewRequest(str(i), tuple(prompt), SamplingParams(), pooling="mean"))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    assert [len(output.vector) for output in outputs] == [8, 8, 8]
    assert [output.finish_reason for output in outputs] == ["stop"] * 3
    assert [record.num_tokens for record in engine.records] == [130, 165]  # none in chunks
    again = make(program, max_num_batched_tokens=400)
    again.add(NewRequest("1", tuple(PROMPTS[1]), SamplingParams(), pooling="mean"))
    assert again.step()[0].vector == outputs[1].vector


def one_by_one(engine: Engine, requests: list[NewRequest]) -> list[Output]:
    """The last output of each, one after the other, with all tokens and log-probabilities."""
    found = []
    for request in requests:
        engine.add(request)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        parts = {name: sum((getattr(o, name) for o in outputs), ()) for name in ("token_ids", "logprobs")}
        found.append(outputs[-1]._replace(**parts, metrics=None))
    return found


def see(program: Program, capacity: Capacity) -> Backend:
    backend = partial(
        ReferenceBackend, program, weights_of(program, VISION), num_blocks=capacity.num_blocks, vision=VISION
    )
    return backend(block_size=16, num_slots=capacity.max_num_seqs)


SEEING, VISION = seeing()
CAT, DOG, BIRD = (image(VISION, 20, seed) for seed in range(3))
MOUSE = image(VISION, 40, 3, rows=2, columns=2)


def look(*images: PromptImage) -> NewRequest:
    """A prompt of 70 tokens with these images, that of each of which is its key."""
    keys = tuple((one.first, one.pixels[:16]) for one in images)
    ids = tuple(prompt_of(*images, length=70))
    return NewRequest(str(images), ids, PARAMS[0], images=images, block_keys=keys)


def test_equal_images_share_blocks_and_others_do_not() -> None:
    found = one_by_one(make(SEEING, backend=see), [look(CAT), look(DOG), look(CAT), look(CAT, MOUSE)])
    assert [output.num_cached_tokens for output in found] == [0, 16, 64, 32]
    assert found[0].logprobs == found[2].logprobs
    assert len({output.logprobs for output in found}) == 3
    for own, output in zip((CAT, DOG), found, strict=False):
        assert one_by_one(make(SEEING, backend=see), [look(own)])[0].logprobs == output.logprobs


@pytest.mark.parametrize("schedule", ["together", "chunks of 7", "two steps in flight", "few blocks"])
def test_images_in_any_schedule(schedule: str) -> None:
    """Also after a preemption, when images are encoded again."""
    requests = [look(CAT), look(DOG, MOUSE), look(), look(BIRD)]
    expected = {
        output.request_id: output.logprobs
        for request in requests
        for output in one_by_one(make(SEEING, backend=see), [request])
    }
    engine = make(SEEING, backend=see, enable_prefix_caching=False, **SCHEDULES[schedule])
    found: dict[str, tuple[Any, ...]] = dict.fromkeys(expected, ())
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.logprobs
        engine.scheduler.check()
    assert found == expected
    preempted = sum(record.num_preemptions for record in engine.records)
    assert (preempted > 0) == (schedule == "few blocks")


class Loaded(frozenset[str]):
    """Adapters that are part of the program (quire.engine.adapter_table)."""

    has_unloaded = False

    def free(self, used: Container[str]) -> None:
        raise AssertionError


def test_adapters_behind_the_scheduler() -> None:
    """What one adapter computed, another does not find."""
    program = plain(adapters=True)
    names = ["one", "", "two", "one", ""]
    requests = [
        NewRequest(str(i), tuple(SHARED[:70]), PARAMS[0], adapter=name) for i, name in enumerate(names)
    ]
    engine = make(program)
    engine.adapters = Loaded(names)
    found = one_by_one(engine, requests)
    assert [output.num_cached_tokens for output in found] == [0, 0, 0, 64, 64]
    assert found[0].logprobs == found[3].logprobs
    assert found[1].logprobs == found[4].logprobs
    assert len({str(output.logprobs) for output in found}) == 3
