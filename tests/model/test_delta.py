"""The gated delta rule and the gated norm: against plain recurrences, and their bits in every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from slot_ops import NUM_TOKENS, OneOp, W, check_ends, check_kv_bytes
from test_state import TOKENS, alone, drive
from tiny import VOCAB, Sequence, batch_of

from quire.errors import ConfigError
from quire.program import Builder, Program
from quire.program.program import Run
from quire.types import Snapshot

KEY_HEADS, HEADS, DK, DV = 2, 4, 3, 5
WIDTH = 2 * KEY_HEADS * DK + HEADS * DV
RATE = np.array([-1.0, 0.5, -3.0, 1.0], np.float32)
BIAS = np.array([0.1, -2.0, 1.0, 0.0], np.float32)


def one_op() -> OneOp:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((NUM_TOKENS, n)).astype(np.float32) for n in (WIDTH, HEADS, HEADS)]
    weights = {"w.A_log": RATE, "w.dt_bias": BIAS}
    return OneOp(lambda b, x, decay, beta: b.delta_rule(x, decay, beta, W, KEY_HEADS, DK), inputs, weights)


def recurrence(x: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """The rule position by position, in float64."""
    x, decay, beta = (part.astype(np.float64) for part in (x, decay, beta))
    q, k = x[:, : KEY_HEADS * DK], x[:, KEY_HEADS * DK : 2 * KEY_HEADS * DK]
    out = np.zeros((len(x), HEADS, DV))
    for head in range(HEADS):
        state, shared = np.zeros((DK, DV)), slice(head // 2 * DK, head // 2 * DK + DK)
        for t in range(len(x)):
            qt, kt = q[t, shared], k[t, shared]
            qt, kt = (y / np.sqrt(y @ y + 1e-6) for y in (qt, kt))
            v = x[t, 2 * KEY_HEADS * DK :].reshape(HEADS, DV)[head]
            state *= np.exp(-np.exp(RATE[head]) * np.log1p(np.exp(decay[t, head] + BIAS[head])))
            state += np.outer(kt, (v - kt @ state) / (1 + np.exp(-beta[t, head])))
            out[t, head] = qt @ state / np.sqrt(DK)
    return out


def test_it_is_the_recurrence() -> None:
    one = one_op()
    np.testing.assert_allclose(one.run(0, NUM_TOKENS), recurrence(*one.inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ends", [[1, 2, 3, 64, 65, 300], [63, 127, 128, 129, 250, 300], [64, 300]], ids=str)
def test_rows_may_end_anywhere(ends: list[int]) -> None:
    check_ends(one_op, ends)


@pytest.mark.parametrize("row", [(0, 50), (70, 1), (64, 3), (2, 1), (120, 20), (3, 290)], ids=str)
def test_cost_is_what_is_read_and_kept(row: tuple[int, int]) -> None:
    check_kv_bytes(one_op(), row)


def test_heads_that_do_not_fit_are_refused() -> None:
    b = Builder()
    h = b.embed(W / "e", 4, 4)
    x, decay, beta = (b.linear(h, W / n, s) for n, s in (("x", WIDTH), ("a", 3), ("b", 3)))
    with pytest.raises(ConfigError, match="cannot share"):
        b.delta_rule(x, decay, beta, W, KEY_HEADS, DK)


# Programs


def hybrid() -> Program:
    """Two layers of a convolution, a delta rule and a gated norm, attention between them."""
    b = Builder()
    x = b.embed(W / "e", VOCAB, 8)
    for i in range(2):
        p = W / f"{i}"
        h = b.rms_norm(x, p / "norm", 1e-5)
        mixed = b.activation(b.short_convolution(b.linear(h, p / "in", WIDTH), p / "conv", 4), "silu")
        h, z = (
            b.delta_rule(mixed, b.linear(h, p / "a", HEADS), b.linear(h, p / "b", HEADS), p, KEY_HEADS, DK),
            b.linear(h, p / "z", (HEADS, DV)),
        )
        h = b.gated_rms_norm(h, z, p / "gated_norm", 1e-5, gate_first=bool(i))
        x = b.add(x, b.linear(h, p / "out", 8))
        if i == 0:
            q, k, v = (b.linear(x, p / name, (2, 4)) for name in "qkv")
            x = b.add(x, b.linear(b.attention(q, k, v), p / "o", 8))
    return b.program(b.linear(b.sampled_rows(x), W / "head", VOCAB))


@pytest.mark.parametrize("chunk", [1, 33, 100])
def test_any_chunking_gives_the_same_bits(chunk: int) -> None:
    expected, driver = alone(hybrid()), drive(hybrid())
    sequence = driver.admit(2, TOKENS)
    while sequence.computed < 300:
        driver.step((sequence, min(chunk, 300 - sequence.computed)))
    assert sequence.scores() == expected


@pytest.mark.parametrize("chunks", [(176,), (100, 76), (64, 64, 48)], ids=str)
@pytest.mark.parametrize("border", [16, 64, 80, 128, 176])
def test_a_snapshot_continues_like_the_sequence_it_was_taken_of(border: int, chunks: tuple[int, ...]) -> None:
    program = hybrid()
    expected, driver = alone(program), drive(program)
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


@pytest.mark.parametrize("start", [0, 40, 63, 64, 127])
@pytest.mark.parametrize("drafts", [1, 32])
def test_rejected_drafts_leave_no_trace(start: int, drafts: int) -> None:
    program = hybrid()
    plain, driver = drive(program), drive(program)
    expected = plain.admit(0, TOKENS[: start + 1])
    plain.step((expected, start + 1))
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


@pytest.mark.parametrize(("gate_first", "groups"), [(False, 1), (True, 1), (False, 3), (True, 2)])
def test_a_gated_norm_is_the_formula(gate_first: bool, groups: int) -> None:
    b, rng = Builder(), np.random.default_rng(1)
    h = b.embed(W / "e", 4, 4)
    x, gate = (b.linear(h, W / name, (3, 6)) for name in "xg")
    normed = b.gated_rms_norm(x, gate, W / "n", 1e-2, gate_first=gate_first, groups=groups)
    op = b.program(normed).ops[-1]
    one, other = rng.standard_normal((2, 7, 3, 6)).astype(np.float32)
    weight = rng.standard_normal(6).astype(np.float32)
    run = Run(batch_of([(Sequence([0] * 7, [0]), 7)], 16), {"w.n.weight": weight})
    gated = other / (1 + np.exp(-other.astype(np.float64)))
    plain = one * gated if gate_first else one.astype(np.float64)
    mean = (plain.reshape(7, 3, groups, -1) ** 2).mean(-1).repeat(6 // groups, -1)
    normal = plain / np.sqrt(mean + 1e-2) * weight
    expected = normal if gate_first else normal * gated
    np.testing.assert_allclose(op.reference(run, one, other), expected, rtol=1e-5, atol=1e-6)


def test_unequal_groups_are_refused() -> None:
    b = Builder()
    x = b.embed(W / "e", 4, 4)
    with pytest.raises(ConfigError, match="3 equal groups"):
        b.gated_rms_norm(x, x, W / "n", 1e-2, groups=3)
