"""Slot states on the native backend: the bits of the reference's ops, in every schedule of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import test_engine_caches
import test_state
from driver import Driver
from lowered import ISAS, OneOp, distance, native, on_reference, plain, planned, tensors
from test_engine_caches import (  # noqa: F401  # run here with this backend
    Answer,
    each_alone,
    mixed,
    test_no_more_is_drafted_than_states_can_go_back,
    test_same_bits_in_any_schedule,
    test_same_bits_with_drafts,
    test_windows_hold_no_more_than_they_see,
)
from test_native_exactness import all_same
from test_state import (  # noqa: F401
    TOKENS,
    hybrid,
    test_a_batch_of_several_in_slots_used_before_gives_the_same_bits,
    test_a_snapshot_continues_like_the_sequence_it_was_taken_of,
    test_a_snapshot_may_be_replaced_in_the_step_that_restores_it,
    test_any_chunking_gives_the_same_bits,
    test_each_group_has_snapshots_of_its_own,
    test_generated_tokens_have_the_bits_of_a_prompt,
    test_random_histories,
    test_rejected_drafts_leave_no_trace,
)
from tiny import VOCAB, Paged, Sequence, batch_of, random_weights, same_bits

from quire.backends.backend import Backend, Capacity
from quire.backends.native import _core
from quire.backends.native.backend import NativeBackend
from quire.backends.native.device import NativeDevice
from quire.backends.native.weights import load_packed
from quire.backends.reference import ReferenceBackend
from quire.program import Names, Program, Value
from quire.program.dtypes import DType
from quire.types import Snapshot

W = Names("w")
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16")
LENGTHS = (1, 5, 64, 130, 200)
SPOILT = sum(LENGTHS)  # the token whose inputs are not numbers


# Each op by itself


def record(kind: str, dtype: DType) -> Callable[..., Value]:
    """An op over values of which a convolution takes the first alone; the number is that of its positions."""
    if kind == "recurrence":
        return lambda b, x, decay: b.gated_recurrence(x, decay, dtype)
    if kind == "biased convolution":
        return lambda b, x, decay: b.short_convolution(x, W / "conv", 4, dtype, bias=True, activation="relu")
    return lambda b, x, decay: b.short_convolution(x, W / "conv", int(kind[-1]), dtype)


KINDS = ("recurrence", "convolution 1", "convolution 2", "convolution 4", "biased convolution")


def one_op(kind: str, dtype: DType, width: int) -> OneOp:
    rng = np.random.default_rng([len(kind), width])
    x = rng.standard_normal((SPOILT + 1, width)).astype(np.float32)
    decay = rng.uniform(0.5, 1, x.shape).astype(np.float32)
    x[SPOILT] = decay[SPOILT] = np.nan
    return OneOp([x, decay], record(kind, dtype))


@cache
def expected(kind: str, dtype: DType, width: int) -> list[np.ndarray]:
    """What the reference gives for each sequence, computed as one row."""
    op = one_op(kind, dtype, width)
    paged = on_reference(op.program, op.checkpoint(), "f32")
    return paged.step([(sequence, len(sequence.token_ids)) for sequence in sequences(paged)])


def sequences(paged: Paged) -> list[Sequence]:
    ends = np.cumsum([0, *LENGTHS])
    return [paged.sequence(range(start, end)) for start, end in pairwise(ends.tolist())]


def new(op: OneOp, isa: str, threads: int = 2) -> Paged:
    """A program on the native backend whose slots and snapshots hold what is not a number."""
    packed = load_packed(planned(op.program, op.checkpoint()), isa=isa, nodes=_core.Nodes(1))
    make = partial(native(isa, threads), num_snapshots=8)
    paged = Paged(op.program, packed, make=make, num_blocks=400, num_slots=8)
    spoilt = [Sequence([SPOILT] * 192, [0] * 12, slot=slot) for slot in range(8)]
    saved = tuple(Snapshot(slot, 0, 192, slot) for slot in range(8))
    step(paged, [(sequence, 192) for sequence in spoilt], saved=saved)
    return paged


def step(paged: Paged, rows: list[tuple[Sequence, int]], **snapshots: Any) -> list[np.ndarray]:
    batch = replace(batch_of(rows, paged.block_size, ids=paged.ids), **snapshots)
    found = np.array(paged.backend.execute(batch))
    for sequence, count in rows:
        sequence.computed += count
    return np.split(found, np.cumsum([count for _, count in rows])[:-1])


def chunked(paged: Paged, seed: int) -> list[np.ndarray]:
    """All sequences to their end, in steps of some of them, by random numbers of tokens."""
    rng, running = np.random.default_rng(seed), sequences(paged)
    parts: dict[int, list[np.ndarray]] = {sequence.slot: [] for sequence in running}
    while left := [s for s in running if s.computed < len(s.token_ids)]:
        some = [left[i] for i in rng.permutation(len(left))[: rng.integers(1, len(left) + 1)]]
        most = [len(s.token_ids) - s.computed for s in some]
        rows = [(s, min(m, int(rng.choice([1, 2, 31, 64, 150])))) for s, m in zip(some, most, strict=True)]
        for (sequence, _), found in zip(rows, step(paged, rows), strict=True):
            parts[sequence.slot].append(found)
    return [np.concatenate(parts[sequence.slot]) for sequence in running]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_reference_in_any_schedule(kind: str, isa: str) -> None:
    """No instruction rounds a product and its sum at once here, so no bit differs."""
    for dtype in DTYPES:
        for seed, width in enumerate((1, 15, 16, 17, 63, 64, 65, 130)):
            paged = new(one_op(kind, dtype, width), isa)
            assert all_same(chunked(paged, seed), expected(kind, dtype, width)), (dtype, width)


def test_what_the_bits_depend_on() -> None:
    """The control: how inputs are kept, and what was computed before."""
    found = {dtype: chunked(new(one_op("recurrence", dtype, 16), ISAS[0]), 0) for dtype in DTYPES}
    assert not any(all_same(found[a], found[b]) for a, b in combinations(DTYPES, 2))
    paged = new(one_op("recurrence", "float32", 16), ISAS[0])
    late = sequences(paged)[4]
    late.computed = 100
    assert np.isnan(step(paged, [(late, 20)])[0]).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_channels_are_shared_out_among_threads(threads: int) -> None:
    """Wide values: several tasks a row, and several rows a task."""
    for kind in ("recurrence", "convolution 4"):
        op = one_op(kind, "float32", 1100)
        wanted = chunked(new(op, ISAS[-1], 2), 0)
        assert all_same(chunked(new(op, ISAS[0], threads), 1), wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_snapshots_of_one_row(kind: str, isa: str) -> None:
    """Several of the same row, at its end too; each is then restored beside a row that takes its place."""
    borders = (16, 64, 80, 128, 144, 192, 200)
    for dtype, width in zip(DTYPES, (17, 64, 70), strict=True):
        paged = new(one_op(kind, dtype, width), isa)
        first, other = sequences(paged)[3:][::-1]
        saved = tuple(Snapshot(first.slot, 0, border, i) for i, border in enumerate(borders))
        wanted = expected(kind, dtype, width)[4]
        step(paged, [(first, 16)], saved=saved[:1])
        assert same_bits(step(paged, [(first, 184)], saved=saved[1:])[0], wanted[16:])
        for i, border in enumerate(borders[:-1]):
            again = Sequence(first.token_ids, first.blocks, computed=border, slot=7)
            other.computed = 0
            replaced, restored = Snapshot(other.slot, 0, 16, i), Snapshot(7, 0, border, i)
            rows = [(other, 20), (again, 200 - border)]
            found = step(paged, rows, restored=(restored,), saved=(replaced,))
            assert all_same(found, [expected(kind, dtype, width)[3][:20], wanted[border:]]), (dtype, border)


def test_slots_and_snapshots_that_are_not_there() -> None:
    paged = new(one_op("recurrence", "float32", 8), ISAS[0])
    sequence = sequences(paged)[0]
    for name in ("restored", "saved"):
        with pytest.raises(IndexError, match="a snapshot that does not exist"):
            step(paged, [(sequence, 1)], **{name: (Snapshot(0, 0, 0, 8),)})
    sequence.slot = 8
    with pytest.raises(IndexError, match="a slot that has no state"):
        step(paged, [(sequence, 1)])


# Whole programs


def load(program: Program, capacity: Capacity, isa: str = ISAS[0]) -> Backend:
    """The backend that a device with two threads makes."""
    program = plain(program)
    device = NativeDevice("test", num_threads=2, packed_cache=False)
    device.isa = isa
    return device.build(program, planned(program, tensors(random_weights(program), "f32")), capacity)


def used_driver(program: Program, num_snapshots: int = 8, num_slots: int = 4) -> Driver:
    """A driver of a new backend whose slots and snapshots hold the states of other sequences."""
    groups = len(program.cache_groups)
    backend = load(program, Capacity([600] * groups, 16, "float32", num_slots, num_snapshots))
    driver = Driver(program, backend, num_blocks=600)
    for slot in range(num_slots):
        sequence = driver.admit(slot, np.random.default_rng(slot).integers(0, VOCAB, 150).tolist())
        places = range(slot, num_snapshots, num_slots)
        saved = tuple(Snapshot(slot, group, 144, place) for group in (0, 1) for place in places)
        driver.step((sequence, 150), saved=saved)
        driver.release(sequence)
    driver.free = [list(range(600)) for _ in driver.free]
    return driver


@pytest.fixture(autouse=True, scope="module")
def _on_native() -> Iterator[None]:
    """Let tests of the reference drive this backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_state, "drive", used_driver)
        patch.setattr(test_engine_caches, "new_backend", load)
        yield


@pytest.fixture(scope="module")
def alone() -> dict[int, Answer]:
    return each_alone()


def test_what_is_imported_runs_here(alone: dict[int, Answer]) -> None:
    assert isinstance(test_state.drive(hybrid()).backend, NativeBackend)
    program = mixed()
    capacity = Capacity([9] * len(program.cache_groups), 16, "float32", 2)
    assert isinstance(test_engine_caches.new_backend(program, capacity), NativeBackend)


@pytest.mark.parametrize("isa", ISAS)
def test_a_program_gives_the_logits_of_the_reference(isa: str) -> None:
    """Recurrences, windows, full attention and latents; rounding adds up over 300 positions."""
    program = plain(mixed())
    count = len(program.cache_groups)
    ids, num_blocks = [np.arange(20)] * count, [20] * count
    weights = random_weights(program)
    reference = ReferenceBackend(program, weights, num_blocks=num_blocks, block_size=16, num_slots=1)
    backend = load(program, Capacity(num_blocks, 16, "float32", 1), isa)
    batch = batch_of([(Sequence(TOKENS, list(range(20))), 300)], 16, ids=ids)
    assert distance(np.array(backend.execute(batch)), reference.execute(batch)) < 5e-5
