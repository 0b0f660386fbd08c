"""Mamba-2's state space: against a plain recurrence, and its bits in every schedule."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from test_state import TOKENS, W, alone, drive
from tiny import VOCAB, Sequence, batch_of, same_bits

from quire.errors import ConfigError
from quire.models.mamba import step_limits
from quire.program import Builder, Load, Program
from quire.program.ops.slot_states import States
from quire.program.program import Run
from quire.types import Snapshot

GROUPS, HEADS, N, DIM = 2, 4, 3, 5
WIDTH = HEADS * DIM + 2 * GROUPS * N
RATE = np.array([-1.0, 0.5, -3.0, 1.0], np.float32)
BIAS = np.array([0.1, -2.0, 1.0, 0.0], np.float32)
SKIP = np.array([0.3, -1.0, 0.0, 2.0], np.float32)
LIMITS = (0.05, 1.5)


class One:
    """One state space over inputs that are fixed by position."""

    def __init__(self) -> None:
        b = Builder()
        h = b.embed(W / "e", 4, 4)
        x, step = b.linear(h, W / "x", WIDTH), b.linear(h, W / "step", HEADS)
        self.program = b.program(b.state_space(x, step, W, GROUPS, N, LIMITS))
        self.op = self.program.ops[-1]
        rng = np.random.default_rng(0)
        self.inputs = [rng.standard_normal((300, n)).astype(np.float32) for n in (WIDTH, HEADS)]
        self.states = States.empty(self.program.caches[0], 2, 2)

    def run(self, start: int, count: int, slot: int = 0, **more: Any) -> np.ndarray:
        batch = batch_of([(Sequence([0] * 300, [0] * 5, computed=start, slot=slot), count)], 64)
        weights = {"w.A_log": RATE, "w.dt_bias": BIAS, "w.D": SKIP}
        run = Run(replace(batch, **more), weights, [self.states], [0])
        return self.op.reference(run, *(x[start : start + count] for x in self.inputs))


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
    one = One()
    np.testing.assert_allclose(one.run(0, 300), recurrence(*one.inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ends", [[1, 2, 3, 64, 65, 300], [63, 127, 128, 129, 250, 300], [64, 300]], ids=str)
def test_rows_may_end_anywhere(ends: list[int]) -> None:
    whole, one = One().run(0, 300), One()
    parts = [one.run(start, end - start) for start, end in pairwise([0, *ends])]
    assert same_bits(np.concatenate(parts), whole)


@pytest.mark.parametrize("row", [(0, 50), (70, 1), (64, 3), (120, 20), (3, 290)], ids=str)
def test_cost_is_what_is_read_and_kept(row: tuple[int, int]) -> None:
    """Numbers are read when NaN in their place shows in the output, and kept when they change."""
    one, read = One(), 0
    if row[0]:
        one.run(0, row[0])
    before = deepcopy(one.states)
    for name in ("borders", "inputs"):
        for place in range(getattr(before, name).shape[1]):
            one.states = deepcopy(before)
            spoilt = getattr(one.states, name)[0, place]
            spoilt[:] = np.nan
            read += spoilt.nbytes * bool(np.isnan(one.run(*row)).any())
    one.states = deepcopy(before)
    one.run(*row)
    pairs = ((before.borders, one.states.borders), (before.inputs, one.states.inputs))
    written = sum(4 * np.count_nonzero(old != new) for old, new in pairs)
    assert one.op.kv_bytes(Load((row,), 1)) == (read, written)


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
