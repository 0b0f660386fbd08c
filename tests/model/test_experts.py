"""Mixture of experts: routing and mixing against a float64 loop over tokens, and the bits of each row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Sequence, batch_of, same_bits

from quire.errors import ConfigError
from quire.program import Builder, Names, WeightSpec
from quire.program.ops import Experts
from quire.program.ops.experts import ExpertWeights, Routing
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
        for e, share in shares_of(op.routing, score, wide.get("bias", np.zeros(len(score)))).items():
            gate, up = (row @ wide[n][e].T + wide.get(n + "_b", np.zeros((99, 1)))[e] for n in ("gate", "up"))
            if op.limit is not None:
                gate, up = np.minimum(gate, op.limit), np.clip(up, -op.limit, op.limit)
            shifted = op.limit is not None and op.shifted
            inner = gate / (1 + np.exp(-(1.702 if shifted else 1) * gate)) * (up + shifted)
            mixed = inner @ wide["down"][e].T + wide.get("down_b", np.zeros((99, 1)))[e]
            out[t] += share * wide.get("factors", np.ones(len(score)))[e] * mixed
    return out


def shares_of(how: Routing, score: np.ndarray, bias: np.ndarray) -> dict[int, float]:
    """The experts of one token and their shares."""
    of_all = np.exp(score) / np.exp(score).sum()
    if how.affinity != "softmax":
        sigmoid = how.affinity == "sigmoid"
        of_all = 1 / (1 + np.exp(-score)) if sigmoid else np.sqrt(np.log1p(np.exp(score)))
    rank = of_all + bias
    groups = np.split(np.arange(len(score)), how.groups)
    depth = {"max": 1, "top2": 2}[how.group_rank]
    kept = sorted(groups, key=lambda g: -sum(sorted(rank[g])[-depth:]))[: how.kept_groups]
    best = sorted((e for group in kept for e in group), key=lambda e: (-rank[e], e))[: how.chosen]
    total = sum(of_all[e] for e in best) + how.floor if how.normalized else 1.0
    return {e: how.scaling * of_all[e] / total for e in best}


def draw(weights: ExpertWeights, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {w.name: rng.standard_normal(w.shape).astype(np.float32) for w in weights.all()}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 12),
    st.booleans(),
    st.none() | st.sampled_from([0.5, 7.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_experts(count, chosen, hidden, inner, rows, normalized, limit, shifted, biases, seed) -> None:
    weights = stack(count, hidden, inner, biases)
    how = {"limit": limit, "shifted": shifted}
    op = recorded(weights, routing=Routing(min(chosen, count), normalized=normalized), **how)
    rng = np.random.default_rng(seed)
    arrays = draw(weights, rng)
    x, scores = (rng.standard_normal((rows, n)).astype(np.float32) for n in (hidden, count))
    out = run(op, x, scores, arrays)
    np.testing.assert_allclose(out, expected(op, x, scores, arrays), rtol=2e-4, atol=2e-4)
    for first in range(rows):
        for last in (first + 1, first + 3, rows):
            assert same_bits(run(op, x[first:last], scores[first:last], arrays), out[first:last])


def test_ties_go_to_the_lower_number() -> None:
    op = recorded(stack(6, 2, 2), routing=Routing(3))
    picked, shares = op.routing.shares(np.array([[1, 2, 2, 1, 1, 0], [0, 0, 0, 0, 0, 0]], np.float32))
    assert picked.tolist() == [[1, 2, 0], [0, 1, 2]]
    np.testing.assert_allclose(shares[1], [1 / 6] * 3, rtol=1e-6)
    many = recorded(stack(200, 2, 2), routing=Routing(8))
    scores = np.random.default_rng(0).integers(0, 4, (50, 200)).astype(np.float32)
    for row, best in zip(scores.tolist(), many.routing.shares(scores)[0].tolist(), strict=True):
        assert best == sorted(range(200), key=lambda e: (-row[e], e))[:8]


def test_experts_that_are_listed_by_token_id() -> None:
    """Whatever the scores, which give their shares; twice if listed twice; ids beyond have id 0's."""
    listed = np.array([[0, 1], [3, 2], [2, 2]])
    name, rng = P / "table", np.random.default_rng(0)
    weights, table = stack(4, 5, 6), WeightSpec(P / "table", (6,), (P / "table",), below=4)
    routing = Routing(2, "sqrtsoftplus", True, scaling=1.5, floor=1e-20, listed=table)
    op = recorded(weights, routing=routing)
    arrays = {**draw(weights, rng), name: listed.astype(np.float32).reshape(-1)}
    x, scores = (rng.standard_normal((5, n)).astype(np.float32) for n in (5, 4))
    ids = [1, 2, 0, 7, 1]
    out = op.reference(Run(batch_of([(Sequence(ids, [0]), 5)], 1024), arrays, []), x, scores)
    for row, own, score, token in zip(out, x, scores.astype(float), ids, strict=True):
        picked = listed[token if token < 3 else 0]
        affinities = np.sqrt(np.log1p(np.exp(score)))[picked]
        shares = 1.5 * affinities / affinities.sum()
        each = []
        for expert in picked:
            gate, up, down = (arrays[P / n][expert].astype(float) for n in ("gate", "up", "down"))
            each.append(down @ (gate @ own / (1 + np.exp(-gate @ own)) * (up @ own)))
        np.testing.assert_allclose(row, shares @ np.array(each), rtol=2e-5, atol=2e-5)


def test_affinities_survive_large_scores() -> None:
    scores = np.array([[1e4, -1e4, 0, -800]], np.float32)
    _, shares = Routing(4, "sqrtsoftplus").shares(scores)
    np.testing.assert_allclose(shares, [[100, np.log(2) ** 0.5, 0, 0]], rtol=1e-6)


def test_shares_survive_large_scores() -> None:
    scores = np.array([[1e4, -1e4, 9.9e3, 1e4]], np.float32)
    for normalized in (False, True):
        _, shares = Routing(2, normalized=normalized).shares(scores)
        np.testing.assert_allclose(shares, [[0.5, 0.5]], rtol=1e-6)


def test_a_margin_weighs_each_expert_among_those_near_it() -> None:
    scores = np.random.default_rng(0).standard_normal((60, 7)).astype(np.float32)
    for row, found, shares in zip(scores.tolist(), *Routing(3, margin=0.5).shares(scores), strict=True):
        left = dict(enumerate(row))
        for expert, share in zip(found.tolist(), shares.tolist(), strict=True):
            top = max(left.values())
            near = [score for score in left.values() if (top - score) / max(abs(score), top) <= 0.5]
            assert left.pop(expert) == top
            assert share == pytest.approx(np.exp(top) / np.exp(near).sum(), rel=1e-6)
    assert np.isnan(Routing(2, margin=0.1).shares(np.array([[1, np.nan, 0]], np.float32))[1]).all()


def test_only_chosen_experts_are_read() -> None:
    """An expert whose weights are NaN harms nobody who does not choose it."""
    weights = stack(3, 4, 5)
    op = recorded(weights, routing=Routing(1))
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
        recorded(stack(4, 2, 2), routing=Routing(chosen))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["softmax", "sigmoid"]),
    st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 4), (4, 1)]),
    st.sampled_from(["max", "top2"]),
    st.integers(2, 4),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_routing(affinity, groups, rank, size, chosen, normalized, biased, own, seed) -> None:
    """Groups, biases that only choose, sigmoids, shares that are scaled: in float64, token by token."""
    count, rng = groups[0] * size, np.random.default_rng(seed)
    bias = WeightSpec(P / "bias", (count,), (P / "bias",)) if biased else None
    factors = WeightSpec(P / "factors", (count,), (P / "factors",)) if own else None
    sums = {"normalized": normalized, "scaling": 2.5, "floor": 0.01, "factors": factors}
    how = Routing(min(chosen, groups[1] * size), affinity, bias=bias, group_rank=rank, **sums)
    how = replace(how, groups=groups[0], kept_groups=groups[1])
    weights = stack(count, 5, 6)
    arrays = draw(weights, rng)
    for spec in how.weights():
        arrays[spec.name] = rng.standard_normal(count).astype(np.float32)
    op = recorded(weights, routing=how)
    x, scores = (rng.standard_normal((9, n)).astype(np.float32) for n in (5, count))
    out = run(op, x, scores, arrays)
    np.testing.assert_allclose(out, expected(op, x, scores, arrays), rtol=2e-4, atol=2e-4)
    assert same_bits(run(op, x[4:6], scores[4:6], arrays), out[4:6])
    assert set(op.weights()) == {*weights.all(), *filter(None, (bias, factors))}


def test_a_token_with_a_score_that_is_no_number_has_no_result() -> None:
    scores = np.zeros((2, 6), np.float32)
    scores[1, 5] = np.nan
    for affinity in ("softmax", "sigmoid"):
        _, shares = Routing(2, affinity, groups=3, kept_groups=1).shares(scores)
        assert np.isfinite(shares[0]).all()
        assert np.isnan(shares[1]).all()


@pytest.mark.parametrize(
    ("groups", "kept", "rank"), [(3, 1, "max"), (4, 5, "max"), (4, 0, "max"), (8, 1, "top2")]
)
def test_groups_that_there_are_not(groups: int, kept: int, rank: str) -> None:
    with pytest.raises(ConfigError, match="groups"):
        recorded(stack(8, 2, 2), routing=Routing(1, groups=groups, kept_groups=kept, group_rank=rank))
