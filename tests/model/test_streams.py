"""Hyper-connections against their formulas in float64, and the bits of each row in any company."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import draw, rows_are_alone, run

from quire.models.streams import Streams
from quire.program import Builder, Value
from quire.program.ops import CollapseStreams, MixStreams, RepeatStreams, StreamWeights
from quire.program.program import Op

EPS, FLOOR = 1e-5, 1e-3


def recorded(streams: int, hidden: int, rounds: int = 3, reading: bool = False) -> dict[type[Op], Op]:
    """The ops of one layer that gives what it gets."""
    b = Builder()
    of = Streams(b, streams, EPS, FLOOR, rounds)
    x = of.begin(b.value((hidden,)))
    weights = of.weights(x, "w.{}", reading)
    h = of.collapse(x, weights)
    out: Value = h if reading else of.mix(x, h, weights)
    return {type(op): op for op in b.program(out)}


def parameters(streams: int, reading: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    width = streams if reading else streams * (streams + 2)
    return {"base": draw(width, seed=seed), "scale": draw(1 if reading else 3, seed=seed + 1)}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def doubly_stochastic(m: np.ndarray, rounds: int) -> np.ndarray:
    """The paper's iteration for one token."""
    m = np.exp(m) / np.exp(m).sum(1)[:, None] + FLOOR
    m = m / (m.sum(0)[None] + FLOOR)
    for _ in range(rounds - 1):
        m = m / (m.sum(1)[:, None] + FLOOR)
        m = m / (m.sum(0)[None] + FLOOR)
    return m


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_weights(streams: int, hidden: int, rounds: int, reading: bool, seed: int) -> None:
    op = recorded(streams, hidden, rounds, reading)[StreamWeights]
    x, w = draw(6, streams, hidden, seed=seed) * 3, parameters(streams, reading, seed)
    mixed = draw(6, len(w["base"]), seed=seed + 9) * 4
    out = run(op, x, mixed, **w)
    for row, own, product in zip(out, x.astype(float), mixed.astype(float), strict=True):
        product = product / np.sqrt((own**2).mean() + EPS)
        pre, post, matrix = np.split(product, [streams, 2 * streams])
        scale, base = w["scale"].astype(float), w["base"].astype(float)
        expected = [sigmoid(pre * scale[0] + base[:streams]) + FLOOR]
        if not reading:
            expected.append(2 * sigmoid(post * scale[1] + base[streams : 2 * streams]))
            square = (matrix * scale[2] + base[2 * streams :]).reshape(streams, streams)
            expected.append(doubly_stochastic(square, rounds).reshape(-1))
        np.testing.assert_allclose(row, np.concatenate(expected), rtol=1e-6, atol=1e-7)
    rows_are_alone(op, [x, mixed], **w)


def test_rows_and_columns_sum_to_one_after_some_rounds() -> None:
    op = recorded(4, 3, rounds=30)[StreamWeights]
    out = run(op, draw(9, 4, 3), draw(9, 24), **parameters(4))[:, 8:].reshape(9, 4, 4)
    for axis in (1, 2):
        np.testing.assert_allclose(out.sum(axis), 1, atol=5e-3)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e18])
def test_extremes_are_finite(size: float) -> None:
    op = recorded(4, 3)[StreamWeights]
    x, mixed = draw(9, 4, 3) * np.float32(size), draw(9, 24) * np.float32(size)
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(run(op, x, mixed, **parameters(4))).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 99))
def test_streams_are_read_and_mixed(streams: int, hidden: int, seed: int) -> None:
    ops = recorded(streams, hidden)
    x, y = draw(7, streams, hidden, seed=seed), draw(7, hidden, seed=seed)
    w = draw(7, streams * (streams + 2), seed=seed + 1)
    read = run(ops[CollapseStreams], x, w)
    np.testing.assert_allclose(read, np.einsum("ti,tih->th", w[:, :streams], x), rtol=2e-5, atol=2e-5)
    written = w[:, streams : 2 * streams, None] * y[:, None]
    matrix = w[:, 2 * streams :].reshape(7, streams, streams)
    mixed = run(ops[MixStreams], x, y, w)
    np.testing.assert_allclose(mixed, written + np.einsum("tjk,tjh->tkh", matrix, x), rtol=2e-5, atol=3e-5)
    rows_are_alone(ops[CollapseStreams], [x, w])
    rows_are_alone(ops[MixStreams], [x, y, w])
    begun = run(ops[RepeatStreams], y)
    assert begun.shape == (7, streams, hidden)
    assert all((begun[:, i] == y).all() for i in range(streams))
