"""Slot states: convolutions and recurrences against plain formulas, and their bits in every schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from driver import DrivenSequence, Driver
from slot_ops import NUM_TOKENS, OneOp, W, check_ends, check_kv_bytes
from tiny import VOCAB, random_weights, same_bits

from quire.backends.null import NullBackend
from quire.backends.reference import ReferenceBackend
from quire.program import Builder, Load, PagedKV, Program, SlotState
from quire.program.caches import MAX_DRAFTED
from quire.program.dtypes import DType
from quire.program.ops import GatedRecurrence, ShortConvolution, state
from quire.program.ops.slot_states import CHUNK, States
from quire.types import Snapshot

TOKENS = np.random.default_rng(3).integers(0, VOCAB, 300).tolist()
CONV, RECURRENCE = SlotState((0,), 8, 3), SlotState((8,), 16, CHUNK - 1)


def hybrid(dtype: DType = "float32") -> Program:
    """Two layers of a convolution and a recurrence, attention between them."""
    b = Builder()
    x = b.embed(W / "e", VOCAB, 8)
    for i in range(2):
        p = W / f"{i}"
        h = b.short_convolution(b.rms_norm(x, p / "norm", 1e-5), p / "conv", 4, dtype)
        decay = b.soft_cap(b.linear(h, p / "decay", 8), 0.95)
        x = b.add(x, b.gated_recurrence(b.linear(h, p / "in", 8), decay, dtype))
        if i == 0:
            q, k, v = (b.linear(x, p / name, (2, 4)) for name in "qkv")
            x = b.add(x, b.linear(b.attention(q, k, v), p / "o", 8))
    return b.program(b.linear(b.sampled_rows(x), W / "head", VOCAB))


def drive(program: Program, num_snapshots: int = 8, num_slots: int = 4) -> Driver:
    """A driver of a new backend whose states hold NaN wherever nothing was kept yet."""
    groups = len(program.cache_groups)
    options = {"num_slots": num_slots, "num_snapshots": num_snapshots}
    backend = ReferenceBackend(
        program, random_weights(program), num_blocks=[600] * groups, block_size=16, **options
    )
    for layer in backend._caches:
        if isinstance(layer, States):
            for array in (layer.borders, layer.inputs, layer.snapshot_borders, layer.snapshot_inputs):
                array[:] = np.nan
    return Driver(program, backend, num_blocks=600)


def alone(program: Program, tokens: list[int] = TOKENS) -> dict[int, Any]:
    driver = drive(program)
    sequence = driver.admit(0, tokens)
    driver.step((sequence, len(tokens)))
    return sequence.scores()


def test_what_a_hybrid_keeps() -> None:
    program = hybrid()
    kv = PagedKV(2, 4, 4)
    assert program.caches == (CONV, RECURRENCE, kv, CONV, RECURRENCE)
    assert program.cache_groups == (CONV, RECURRENCE, kv)
    assert program.layer_groups == (0, 1, 2, 0, 1)
    assert program.kv_token_bytes(2) == 2 * 2 * 4 * 2


@pytest.mark.parametrize("spec", [CONV, RECURRENCE, SlotState((3, 5), 7, 63, "bfloat16")], ids=str)
def test_bytes_are_those_of_the_arrays(spec: SlotState) -> None:
    states = States.empty(spec, 3, 5)
    assert states.borders.nbytes + states.inputs.nbytes == 3 * spec.slot_bytes
    assert states.snapshot_borders.nbytes + states.snapshot_inputs.nbytes == 5 * spec.snapshot_bytes


# Each op by itself, against float64


INPUTS = [
    np.random.default_rng(0).standard_normal((NUM_TOKENS, 8)).astype(np.float32),
    np.random.default_rng(1).uniform(0.5, 1, (NUM_TOKENS, 8)).astype(np.float32),
]
CONV_WEIGHT = np.random.default_rng(2).standard_normal((8, 1, 4)).astype(np.float32)


def convolution(dtype: DType = "float32") -> OneOp:
    weights = {"w.conv.weight": CONV_WEIGHT}
    return OneOp(lambda b, x: b.short_convolution(x, W / "conv", 4, dtype), INPUTS[:1], weights)


def recurrence(dtype: DType = "float32") -> OneOp:
    return OneOp(lambda b, x, decay: b.gated_recurrence(x, decay, dtype), INPUTS, {})


def test_convolution_is_the_formula() -> None:
    padded = np.concatenate([np.zeros((3, 8)), INPUTS[0]])
    expected = sum(padded[i : i + 300] * CONV_WEIGHT[:, 0, i].astype(np.float64) for i in range(4))
    np.testing.assert_allclose(convolution().run(0, 300), expected, rtol=1e-5, atol=1e-5)


def test_recurrence_is_the_formula() -> None:
    h, expected = np.zeros(8), []
    for x, decay in zip(INPUTS[0].astype(np.float64), INPUTS[1], strict=True):
        h = decay * h + x
        expected.append(h)
    np.testing.assert_allclose(recurrence().run(0, 300), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [convolution, recurrence])
@pytest.mark.parametrize("ends", [[1, 2, 3, 64, 65, 300], [63, 127, 128, 129, 250, 300], [64, 300]], ids=str)
def test_rows_may_end_anywhere(make: Callable[..., OneOp], dtype: DType, ends: list[int]) -> None:
    """Also where the state is rounded at each border: there, and nowhere else."""
    check_ends(lambda: make(dtype), ends)


def test_where_a_chunk_ends_shows_in_a_rounded_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    whole = recurrence("bfloat16").run(0, 300)
    monkeypatch.setattr(state, "CHUNK", 32)
    assert not same_bits(recurrence("bfloat16").run(0, 300), whole)


@pytest.mark.parametrize("row", [(0, 50), (70, 1), (64, 3), (2, 1), (120, 20), (3, 290)], ids=str)
@pytest.mark.parametrize("make", [convolution, recurrence])
def test_cost_is_what_is_read_and_kept(make: Callable[..., OneOp], row: tuple[int, int]) -> None:
    one = make()
    check_kv_bytes(one, row)
    flops = 2 * 8 * (4 * row[1] if isinstance(one.op, ShortConvolution) else row[0] % CHUNK + row[1])
    assert one.op.flops(Load((row,), 1)) == flops


# Whole programs by steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 7, 33, 64, 100])
def test_any_chunking_gives_the_same_bits(chunk: int, dtype: DType) -> None:
    expected = alone(hybrid(dtype))
    driver = drive(hybrid(dtype))
    sequence = driver.admit(2, TOKENS)
    while sequence.computed < 300:
        driver.step((sequence, min(chunk, 300 - sequence.computed)))
    assert sequence.scores() == expected


def test_a_batch_of_several_in_slots_used_before_gives_the_same_bits() -> None:
    program = hybrid()
    texts = [TOKENS, TOKENS[100:170], TOKENS[5:6], TOKENS[200:]]
    expected = [alone(program, text) for text in texts]
    driver, rng = drive(program), np.random.default_rng(8)
    for _ in range(2):
        sequences = [driver.admit(slot, text) for slot, text in enumerate(texts)]
        done = {slot: len(text) for slot, text in enumerate(texts)}
        while left := [c for c in sequences if c.computed < done[c.slot]]:
            most = [min(done[c.slot] - c.computed, int(rng.integers(1, 90))) for c in left]
            driver.step(*zip(left, most, strict=True))
        for sequence, scores in zip(sequences, expected, strict=True):
            assert sequence.scores() == scores
            driver.release(sequence)
        driver.free = [list(range(600)) for _ in driver.free]


def test_generated_tokens_have_the_bits_of_a_prompt() -> None:
    """Decode rows against the whole sequence computed as one prompt."""
    program = hybrid()
    driver = drive(program)
    sequence = driver.admit(0, TOKENS[:50])
    driver.step((sequence, 50))
    while len(sequence.tokens) < 200:
        driver.step((sequence, 1))
    whole = alone(program, sequence.tokens)
    last = sequence.scores()
    assert last == {position: whole[position] for position in last}


@pytest.mark.parametrize("chunks", [(176,), (100, 76), (64, 64, 48), (130, 46)], ids=str)
@pytest.mark.parametrize("border", [16, 48, 64, 80, 128, 176])
def test_a_snapshot_continues_like_the_sequence_it_was_taken_of(border: int, chunks: tuple[int, ...]) -> None:
    """Taken as a row passes the border, begins or ends there; restored into another slot, after other use."""
    program = hybrid()
    expected = alone(program)
    driver = drive(program)
    first = driver.admit(1, TOKENS)
    for count in chunks:
        passes = first.computed <= border <= first.computed + count
        saved = [Snapshot(1, group, border, 5 + group) for group in (0, 1)] if passes else []
        driver.step((first, count), saved=tuple(saved))
    other = driver.admit(3, TOKENS[20:170])
    driver.step((other, 150))
    driver.release(other)
    second = driver.admit(3, TOKENS, start=border, shared=first)
    restored = tuple(Snapshot(3, group, border, 5 + group) for group in (0, 1))
    driver.step((second, 70), restored=restored)
    driver.step((second, 300 - second.computed))
    assert second.scores() == {position: expected[position] for position in range(border + 1, 301)}


def test_a_snapshot_may_be_replaced_in_the_step_that_restores_it() -> None:
    """All states are restored before any row keeps one, whatever the order of rows."""
    program = hybrid()
    driver = drive(program)
    first = driver.admit(0, TOKENS)
    driver.step((first, 64), saved=tuple(Snapshot(0, group, 64, 3) for group in (0, 1)))
    other = driver.admit(1, TOKENS[100:])
    second = driver.admit(2, TOKENS, start=64, shared=first)
    restored = tuple(Snapshot(2, group, 64, 3) for group in (0, 1))
    saved = tuple(Snapshot(1, group, 80, 3) for group in (0, 1))
    driver.step((other, 90), (second, 50), restored=restored, saved=saved)
    expected = alone(program)
    assert second.scores() == {position: expected[position] for position in range(65, 115)}


def test_each_group_has_snapshots_of_its_own() -> None:
    """The numbers of one group say nothing in the other."""
    program = hybrid()
    expected, driver = alone(program), drive(program)
    first = driver.admit(0, TOKENS)
    places = {64: (1, 2), 128: (2, 1)}
    saved = [Snapshot(0, group, at, numbers[group]) for at, numbers in places.items() for group in (0, 1)]
    driver.step((first, 150), saved=tuple(saved))
    for slot, (at, numbers) in enumerate(places.items(), 1):
        again = driver.admit(slot, TOKENS, start=at, shared=first)
        restored = [Snapshot(slot, group, at, numbers[group]) for group in (0, 1)]
        driver.step((again, 300 - at), restored=tuple(restored))
        assert again.scores() == {position: expected[position] for position in range(at + 1, 301)}


@pytest.mark.parametrize("start", [0, 40, 60, 63, 64, 100, 127])
@pytest.mark.parametrize("drafts", [1, 5, MAX_DRAFTED])
def test_rejected_drafts_leave_no_trace(start: int, drafts: int) -> None:
    """Rows end in drafted tokens that are wrong; the next row begins where they began."""
    program = hybrid()
    plain = drive(program)
    expected = plain.admit(0, TOKENS[: start + 1])
    plain.step((expected, start + 1))
    driver = drive(program)
    sequence = driver.admit(0, TOKENS[: start + 1])
    if start:
        driver.step((sequence, start))
    while len(expected.tokens) < start + 80:
        plain.step((expected, 1))
    while len(sequence.tokens) < start + 80:
        right = expected.tokens[len(sequence.tokens)]
        wrong = tuple((right + 1 + i) % VOCAB for i in range(drafts))
        driver.step((sequence, 1, wrong))
    length = len(sequence.tokens)
    assert sequence.tokens == expected.tokens[:length]
    scores = expected.scores()
    assert sequence.scores() == {position: scores[position] for position in range(1, length)}


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed: int) -> None:
    """Prompts in chunks, decode rows, drafts good and bad, snapshots and sequences that begin with one."""
    program, rng = hybrid(), np.random.default_rng(seed)
    driver, kept = drive(program, num_snapshots=16), 0
    finished: list[DrivenSequence] = []
    snapshots: list[tuple[DrivenSequence, int, int]] = []  # (of whom, position, snapshot)
    running: dict[int, DrivenSequence] = {}
    for _ in range(60):
        restored: list[Snapshot] = []
        for slot in range(4):
            if slot not in running:
                text = rng.integers(0, VOCAB, int(rng.integers(2, 150))).tolist()
                running[slot] = sequence = driver.admit(slot, text)
                if snapshots and rng.random() < 0.6:
                    source, position, number = snapshots[rng.integers(len(snapshots))]
                    driver.admitted.pop()
                    text = [*source.tokens[:position], *text]
                    running[slot] = sequence = driver.admit(slot, text, start=position, shared=source)
                    restored += [Snapshot(slot, group, position, number) for group in (0, 1)]
        rows, saved = [], []
        for slot, sequence in running.items():
            if not sequence.fresh and rng.random() < 0.2:
                continue
            count = min(int(rng.integers(1, 100)), len(sequence.tokens) - sequence.computed)
            border = (sequence.computed + count) // 16 * 16
            if border > sequence.computed and kept < 16 and rng.random() < 0.3:
                saved += [Snapshot(slot, group, border, kept) for group in (0, 1)]
                snapshots.append((sequence, border, kept))
                kept += 1
            ends = sequence.computed + count == len(sequence.tokens)
            drafts = (
                tuple(rng.integers(0, VOCAB, int(rng.integers(0, MAX_DRAFTED + 1))).tolist()) if ends else ()
            )
            rows.append((sequence, count, drafts))
        if rows:
            driver.step(*rows, restored=tuple(restored), saved=tuple(saved))
        for slot, sequence in list(running.items()):
            if len(sequence.tokens) - sequence.admission.num_prompt_tokens > 12:
                finished.append(running.pop(slot))
                driver.release(sequence)
    assert len(finished) > 10
    assert any(sequence.results and sequence.began for sequence in finished)
    for sequence in finished:
        whole = alone(program, sequence.tokens)
        assert sequence.scores() == {position: whole[position] for position in sequence.scores()}


def test_the_null_backend_counts_states() -> None:
    program = hybrid()
    backend = NullBackend(program, lambda spec: 4 * spec.size, 4, 16)
    driver = Driver(program, backend)
    sequence = driver.admit(0, TOKENS)
    driver.step((sequence, 130), saved=(Snapshot(0, 1, 64, 0),))
    layers = [op for op in program if isinstance(op, GatedRecurrence | ShortConvolution)]
    load = Load(((0, 130),), 130)
    assert sum(op.kv_bytes(load)[1] for op in layers) == 2 * 4 * (8 * 35 + 16 * 95 + 2 * 8)
    assert backend.cost == program.cost(load, lambda spec: 4 * spec.size)
