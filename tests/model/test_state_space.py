"""Mamba-2's state space: against a plain recurrence, and its bits in every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from slot_ops import NUM_TOKENS, OneOp, W, check_ends, check_kv_bytes
from test_state import TOKENS, alone, drive
from tiny import VOCAB

from quire.errors import ConfigError
from quire.models.mamba import step_limits
from quire.program import Builder, Program
from quire.types import Snapshot

GROUPS, HEADS, N, DIM = 2, 4, 3, 5
WIDTH = HEADS * DIM + 2 * GROUPS * N
RATE = np.array([-1.0, 0.5, -3.0, 1.0], np.float32)
BIAS = np.array([0.1, -2.0, 1.0, 0.0], np.float32)
SKIP = np.array([0.3, -1.0, 0.0, 2.0], np.float32)
LIMITS = (0.05, 1.5)


def one_op() -> OneOp:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((NUM_TOKENS, n)).astype(np.float32) for n in (WIDTH, HEADS)]
    weights = {"w.A_log": RATE, "w.dt_bias": BIAS, "w.D": SKIP}
    return OneOp(lambda b, x, step: b.state_space(x, step, W, GROUPS, N, LIMITS), inputs, weights)


def recurrence(x: np.ndarray, step: np.ndarray) -> np.ndarray:
    """The state space position by position, in float64."""
    x, step = x.astype(np.float64), np.clip(np.log1p(np.exp(step.astype(np.float64) + BIAS)), *LIMITS)
    out = np.zeros((len(x), HEADS, DIM))
    for head in range(HEADS):
        state, group = np.zeros((N, DIM)), head // (HEADS // GROUPS)
        for t in range(len(x)):
            own, (b, c) = x[t, head * DIM : (head + 1) * DIM], x[t, HEADS * DIM :].reshape(2, GROUPS, N)
            state = np.exp(-np.exp(RATE[head]) * step[t, head]) * state
            state += step[t, head] * np.outer(b[group], own)
            out[t, head] = state.T @ c[group] + SKIP[head] * own
    return out.reshape(len(x), -1)


def test_it_is_the_recurrence() -> None:
    one = one_op()
    np.testing.assert_allclose(one.run(0, NUM_TOKENS), recurrence(*one.inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ends", [[1, 2, 3, 64, 65, 300], [63, 127, 128, 129, 250, 300], [64, 300]], ids=str)
def test_rows_may_end_anywhere(ends: list[int]) -> None:
    check_ends(one_op, ends)


@pytest.mark.parametrize("row", [(0, 50), (70, 1), (64, 3), (120, 20), (3, 290)], ids=str)
def test_cost_is_what_is_read_and_kept(row: tuple[int, int]) -> None:
    check_kv_bytes(one_op(), row)


def test_heads_that_do_not_fit_are_refused() -> None:
    b = Builder()
    h = b.embed(W / "e", 4, 4)
    x, step = b.linear(h, W / "x", WIDTH), b.linear(h, W / "step", 3)
    with pytest.raises(ConfigError, match="cannot share"):
        b.state_space(x, step, W, GROUPS, N)


@pytest.mark.parametrize(
    "stated", [None, [0.1], [1.0, 0.5], [-1.0, 2.0], [True, 2], ["0", 1], [np.inf, np.inf]]
)
def test_limits_that_are_none_are_refused(stated: object) -> None:
    with pytest.raises(ConfigError, match="time_step_limit"):
        step_limits(stated)


def test_a_limit_may_be_infinite() -> None:
    for stated in ([0.0, np.inf], [0, {"__float__": "Infinity"}]):
        assert step_limits(stated) == (0.0, np.inf)


def hybrid() -> Program:
    """A layer of a convolution, a state space and a gated norm."""
    b = Builder()
    x = b.embed(W / "e", VOCAB, 8)
    h = b.short_convolution(b.linear(x, W / "in", WIDTH), W / "conv", 4, bias=True, activation="silu")
    h = b.state_space(h, b.linear(x, W / "step", HEADS), W, GROUPS, N, LIMITS)
    h = b.gated_rms_norm(h, b.linear(x, W / "z", HEADS * DIM), W / "n", 1e-5, gate_first=True, groups=GROUPS)
    x = b.add(x, b.linear(h, W / "out", 8))
    return b.program(b.linear(b.sampled_rows(x), W / "head", VOCAB))


@pytest.mark.parametrize(("border", "chunks"), [(16, (176,)), (80, (100, 76)), (128, (64, 64, 48))], ids=str)
def test_a_snapshot_continues_like_the_sequence_it_was_taken_of(border: int, chunks: tuple[int, ...]) -> None:
    program = hybrid()
    expected, driver = alone(program), drive(program)
    first = driver.admit(1, TOKENS)
    for count in chunks:
        passes = first.computed <= border <= first.computed + count
        saved = [Snapshot(1, group, border, 5 + group) for group in (0, 1)] if passes else []
        driver.step((first, count), saved=tuple(saved))
    second = driver.admit(3, TOKENS, start=border, shared=first)
    restored = tuple(Snapshot(3, group, border, 5 + group) for group in (0, 1))
    driver.step((second, 70), restored=restored)
    driver.step((second, 300 - second.computed))
    assert second.scores() == {position: expected[position] for position in range(border + 1, 301)}
