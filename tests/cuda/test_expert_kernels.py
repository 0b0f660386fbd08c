"""Kernels of experts in Triton's interpreter, against quire.program.ops.experts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quire.backends.cuda import interpreter, packing
from quire.backends.cuda.kernels import experts, grouped, quantized
from quire.program.numerics import silu
from quire.program.ops.experts import Routing
from quire.program.program import WeightSpec
from quire.quantize.integers import Int4, Int8, pack

BF16 = np.dtype(ml_dtypes.bfloat16)
TOKENS, EXPERTS, CHOSEN, HIDDEN, INNER = 11, 6, 3, 48, 40


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def routed(routing: Routing, scores: np.ndarray, bias: np.ndarray, factors: np.ndarray) -> Any:
    """Return picked experts and shares."""
    picked = np.empty((len(scores), routing.chosen), np.int32)
    shares, constants = np.empty(picked.shape, np.float32), {"EXPERTS": 8}
    constants["FACTORS"] = routing.factors is not None
    sizes, scaling = [scores.shape[1], routing.chosen], np.array([routing.scaling])
    if routing.margin is not None:
        args = [picked, shares, scores, factors, *sizes, scaling, np.array([routing.margin])]
        interpreter.run(experts.route_apart, (len(scores),), args, constants)
        return picked, shares
    sizes += [routing.groups, routing.kept_groups]
    args = [picked, shares, scores, bias, factors, *sizes, scaling, np.array([routing.floor])]
    constants |= {
        "SIGMOID": routing.affinity == "sigmoid",
        "NORMALIZED": routing.normalized,
        "BIAS": routing.bias is not None,
        "GROUPS": routing.group_rank if routing.groups > 1 else "",
    }
    interpreter.run(experts.route, (len(scores),), args, constants)
    return picked, shares


SPEC = WeightSpec("w", (EXPERTS,), ("w",))


@pytest.mark.parametrize(
    "routing",
    [
        Routing(CHOSEN),
        Routing(CHOSEN, normalized=True),
        Routing(CHOSEN, "sigmoid", normalized=True, bias=SPEC, scaling=2.5, floor=1e-20),
        Routing(1, "sigmoid", factors=SPEC),
        Routing(2, "sigmoid", bias=SPEC, groups=3, kept_groups=2, group_rank="top2"),
        Routing(CHOSEN, groups=2, kept_groups=1, group_rank="max"),
        Routing(2, margin=0.2, scaling=2.0),
        Routing(2, margin=0.0),
    ],
    ids=str,
)
def test_route(routing: Routing) -> None:
    scores, bias, factors = normal(0, TOKENS, EXPERTS), normal(1, EXPERTS), normal(2, EXPERTS)
    scores[3], scores[4, 1:4] = 0.5, 2.0  # ties
    scores[5, 2] = np.nan
    scores[6] = -1000.0  # whose sigmoids are 0, as is their sum
    picked, shares = routed(routing, scores, bias, factors)
    own_bias, own_factors = (
        None if w is None else a for w, a in ((routing.bias, bias), (routing.factors, factors))
    )
    wanted, wanted_shares = routing.shares(scores, own_bias, own_factors)
    valid = np.arange(TOKENS) != 5
    assert (picked == wanted)[valid].all()
    assert np.isnan(shares[5]).all()
    assert np.allclose(shares[valid], wanted_shares[valid], rtol=1.2e-7, atol=0)


def pairs_of(seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return picked experts [T, chosen] (one of which no token has), shares, order and offsets."""
    rng = np.random.default_rng(seed)
    picked = np.array([rng.permutation([0, 1, 2, 4, 5])[:CHOSEN] for _ in range(TOKENS)], np.int32)
    order, offsets = np.full(picked.size, -1, np.int32), np.full(EXPERTS + 1, -1, np.int32)
    interpreter.run(experts.sort_by_expert, (EXPERTS,), [order, offsets, picked, picked.size], {"BLOCK": 16})
    return picked, rng.random(picked.shape).astype(np.float32), order, offsets


def test_sort_by_expert() -> None:
    picked, _, order, offsets = pairs_of()
    assert (order == np.argsort(picked.ravel(), kind="stable")).all()
    assert (np.diff(offsets) == np.bincount(picked.ravel(), minlength=EXPERTS)).all()
    assert offsets[0] == 0


def test_sum_in_order_of_experts() -> None:
    picked, shares, _, _ = pairs_of()
    x, out = normal(0, TOKENS, CHOSEN, HIDDEN), np.empty((TOKENS, HIDDEN), np.float32)
    args = [out, x, picked, shares, HIDDEN, CHOSEN]
    for weighted in (True, False):
        constants = {"WEIGHTED": weighted, "CHOSEN": 4, "BLOCK": 64}
        interpreter.run(experts.sum_experts, (TOKENS, 1), args, constants)
        wanted = np.zeros_like(out)
        for expert in range(EXPERTS):
            tokens, rank = np.nonzero(picked == expert)
            share = shares[tokens, rank][:, None] if weighted else 1
            wanted[tokens] += share * x[tokens, rank]
        assert (out == wanted).all()


def test_inputs_of_experts_are_scaled() -> None:
    _, shares, _, _ = pairs_of()
    x, out = normal(0, TOKENS, HIDDEN), np.empty((TOKENS, CHOSEN, HIDDEN), np.float32)
    args = [out, x, shares, HIDDEN, CHOSEN]
    interpreter.run(experts.scale_pairs, (TOKENS * CHOSEN, 1), args, {"BLOCK": 64})
    assert (out == shares[..., None] * x[:, None]).all()


@pytest.mark.parametrize("by_place", [False, True])
def test_inputs_are_put_into_the_order_of_each_matrix(by_place: bool) -> None:
    picked, _, _, _ = pairs_of()
    x, out = normal(0, TOKENS, HIDDEN), np.empty((TOKENS * CHOSEN, HIDDEN), np.float32)
    orders = np.stack([np.random.default_rng(i).permutation(HIDDEN) for i in range(EXPERTS)]).astype(np.int32)
    args = [out, x, orders, picked, HIDDEN, CHOSEN, EXPERTS]
    how = {"PICKED": not by_place, "BLOCK": 64}
    interpreter.run(experts.order_inputs, (TOKENS * CHOSEN, -(-HIDDEN // 64)), args, how)
    matrices = np.arange(TOKENS * CHOSEN) % EXPERTS if by_place else picked.ravel()
    for pair, own in enumerate(out):
        assert (own == x[pair // CHOSEN][orders[matrices[pair]]]).all()


GRID = (-(-TOKENS * CHOSEN // 16) + EXPERTS, 2, 1)
TILE = {"EXPERTS": 8, "BLOCK_M": 16, "BLOCK_N": 32}


@pytest.mark.parametrize("limited", [False, True])
def test_grouped_products(limited: bool) -> None:
    """gate and up of each pair's expert, then down, with biases."""
    picked, _, order, offsets = pairs_of()
    x = normal(0, TOKENS, HIDDEN)
    gate, up = (normal(seed, EXPERTS, INNER, HIDDEN).astype(BF16) for seed in (1, 2))
    down, biases = normal(3, EXPERTS, HIDDEN, INNER).astype(BF16), normal(4, 2, EXPERTS, INNER)
    down_bias = normal(5, EXPERTS, HIDDEN)
    inner = np.full((TOKENS * CHOSEN, INNER), np.nan, np.float32)
    out = np.full((TOKENS * CHOSEN, HIDDEN), np.nan, np.float32)
    constants = TILE | {"BIAS": True, "PRECISION": "stored", "BLOCK_K": 32}
    args = [inner, x, order, offsets, gate, up, biases[0], biases[1], INNER, HIDDEN, EXPERTS, CHOSEN, 1.5]
    name = {"ACTIVATION": "limited" if limited else "silu"}
    interpreter.run(grouped.grouped_gated_product, GRID, args, constants | name)
    args = [out, inner, order, offsets, down, down_bias, HIDDEN, INNER, EXPERTS, 1]
    interpreter.run(grouped.grouped_product, GRID, args, constants)
    rows, e = x.repeat(CHOSEN, 0), picked.ravel()
    g, u = (np.einsum("pk,pnk->pn", narrow(rows), w[e].astype("f8")) for w in (gate, up))
    g, u = g + biases[0][e], u + biases[1][e]
    if limited:
        g, u = np.minimum(g, 1.5), np.clip(u, -1.5, 1.5)
        wanted = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    else:
        wanted = silu(g) * u
    assert np.abs(inner - wanted).max() < 2e-5 * np.abs(wanted).max()
    wanted = np.einsum("pk,pnk->pn", narrow(inner), down[e].astype("f8")) + down_bias[e]
    assert np.abs(out - wanted).max() < 2e-6 * np.abs(wanted).max()


def narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16).astype(np.float64)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_grouped_quantized_products_bit_for_bit(kind: str) -> None:
    picked, _, order, offsets = pairs_of()
    rng, shape = np.random.default_rng(7), (EXPERTS, INNER, 160)
    scales = rng.integers(-127, 128, (EXPERTS, INNER, 5)).astype(np.int8)
    channels = rng.random((EXPERTS, INNER)).astype(np.float32)
    weight: Int8 | Int4
    if kind == "int8":
        weight = Int8(rng.integers(-128, 128, shape).astype(np.int8), scales, channels)
    else:
        weight = Int4(pack(rng.integers(0, 16, shape)), scales, channels, 160)
    own, x = packing.packed(weight), normal(0, TOKENS, 160)
    q, blocks = np.empty((TOKENS, 256), np.int8), np.empty((TOKENS, 8), np.int32)
    x_scales, out = np.empty((TOKENS, 2), np.float32), np.full((TOKENS * CHOSEN, INNER), np.nan, np.float32)
    args: list[Any] = [q, blocks, x_scales, x, 160]
    interpreter.run(quantized.quantize_rows, (TOKENS, 2), args, {"BLOCK_SCALED": kind == "int8"})
    args = [out, q, blocks, x_scales, order, offsets, own.values, own.scales, own.channels, out]
    constants = TILE | {"KIND": kind, "BIAS": False}
    sizes = [INNER, own.spans, EXPERTS, CHOSEN]
    interpreter.run(grouped.grouped_quantized_product, GRID, [*args, *sizes], constants)
    for pair, expert in enumerate(picked.ravel().tolist()):
        token = pair // CHOSEN
        assert (out[pair] == weight[expert].product(x[token : token + 1])[0]).all()
