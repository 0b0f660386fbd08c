"""Mixture of experts: routing and mixing against a float64 loop over tokens, and the bits of each row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Sequence, batch_of, same_bits

from quire.errors import ConfigError
from quire.program import Builder, Names, WeightSpec
from quire.program.ops import Experts
from quire.program.ops.experts import ExpertWeights
from quire.program.program import Run

P = Names("experts")


def stack(count: int, hidden: int, inner: int, biases: bool = False) -> ExpertWeights:
    def spec(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(P / name, (count, *shape), (P / name,))

    matrices = (spec("gate", inner, hidden), spec("up", inner, hidden), spec("down", hidden, inner))
    if not biases:
        return ExpertWeights(*matrices)
    return ExpertWeights(*matrices, spec("gate_b", inner), spec("up_b", inner), spec("down_b", hidden))


def recorded(weights: ExpertWeights, **options) -> Experts:
    b = Builder()
    count, hidden, _ = weights.down.shape
    x = b.embed(Names("e"), 2, hidden)
    out = b.experts(x, b.linear(x, Names("router"), count), weights, **options)
    op = b.program(out).ops[-1]
    assert isinstance(op, Experts)
    return op


def run(op: Experts, x: np.ndarray, scores: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    batch = batch_of([(Sequence([0] * len(x), [0]), len(x))], 1024)
    return op.reference(Run(batch, weights, []), x, scores)


def expected(op: Experts, x: np.ndarray, scores: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    """Token by token, expert by expert, in float64."""
    wide = {name.split(".")[-1]: w.astype(float) for name, w in weights.items()}
    out = np.zeros(x.shape)
    for t, (row, score) in enumerate(zip(x.astype(float), scores.astype(float), strict=True)):
        best = sorted(range(len(score)), key=lambda e: (-score[e], e))[: op.chosen]
        over = best if op.routing == "softmax_of_chosen" else range(len(score))
        total = sum(np.exp(score[e]) for e in over)
        for e in best:
            gate, up = (row @ wide[n][e].T + wide.get(n + "_b", np.zeros((99, 1)))[e] for n in ("gate", "up"))
            if op.limit is None:
                inner = gate / (1 + np.exp(-gate)) * up
            else:
                gate, up = np.minimum(gate, op.limit), np.clip(up, -op.limit, op.limit)
                inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            mixed = inner @ wide["down"][e].T + wide.get("down_b", np.zeros((99, 1)))[e]
            out[t] += np.exp(score[e]) / total * mixed
    return out


def draw(weights: ExpertWeights, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {w.name: rng.standard_normal(w.shape).astype(np.float32) for w in weights.all()}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 12),
    st.sampled_from(["softmax", "softmax_of_chosen"]),
    st.none() | st.sampled_from([0.5, 7.0]),
    st.booleans(),
    st.integers(0, 99),
)
def test_experts(count, chosen, hidden, inner, rows, routing, limit, biases, seed) -> None:
    weights = stack(count, hidden, inner, biases)
    op = recorded(weights, chosen=min(chosen, count), routing=routing, limit=limit)
    rng = np.random.default_rng(seed)
    arrays = draw(weights, rng)
    x, scores = (rng.standard_normal((rows, n)).astype(np.float32) for n in (hidden, count))
    out = run(op, x, scores, arrays)
    np.testing.assert_allclose(out, expected(op, x, scores, arrays), rtol=2e-4, atol=2e-4)
    for first in range(rows):
        for last in (first + 1, first + 3, rows):
            assert same_bits(run(op, x[first:last], scores[first:last], arrays), out[first:last])


def test_ties_go_to_the_lower_number() -> None:
    op = recorded(stack(6, 2, 2), chosen=3, routing="softmax")
    picked, shares = op.route(np.array([[1, 2, 2, 1, 1, 0], [0, 0, 0, 0, 0, 0]], np.float32))
    assert picked.tolist() == [[1, 2, 0], [0, 1, 2]]
    np.testing.assert_allclose(shares[1], [1 / 6] * 3, rtol=1e-6)
    many = recorded(stack(200, 2, 2), chosen=8, routing="softmax")
    scores = np.random.default_rng(0).integers(0, 4, (50, 200)).astype(np.float32)
    for row, best in zip(scores.tolist(), many.route(scores)[0].tolist(), strict=True):
        assert best == sorted(range(200), key=lambda e: (-row[e], e))[:8]


def test_shares_survive_large_scores() -> None:
    scores = np.array([[1e4, -1e4, 9.9e3, 1e4]], np.float32)
    for routing in ("softmax", "softmax_of_chosen"):
        _, shares = recorded(stack(4, 2, 2), chosen=2, routing=routing).route(scores)
        np.testing.assert_allclose(shares, [[0.5, 0.5]], rtol=1e-6)


def test_only_chosen_experts_are_read() -> None:
    """An expert whose weights are NaN harms nobody who does not choose it."""
    weights = stack(3, 4, 5)
    op = recorded(weights, chosen=1, routing="softmax")
    rng = np.random.default_rng(0)
    arrays = draw(weights, rng)
    arrays[P / "down"][1] = np.nan
    x = rng.standard_normal((2, 4)).astype(np.float32)
    out = run(op, x, np.array([[0, 5, 0], [5, 0, 0]], np.float32), arrays)
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("chosen", [0, 5])
def test_a_number_of_experts_that_there_are_not(chosen: int) -> None:
    with pytest.raises(ConfigError, match="experts"):
        recorded(stack(4, 2, 2), chosen=chosen, routing="softmax")
