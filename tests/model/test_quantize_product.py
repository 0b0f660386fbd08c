"""Products with quantized weights: equal to their definition bit for bit, whatever the company of a row."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCAB, Dense, Paged, Sequence, batch_of, random_weights, tiny

from quire.program import WeightSpec
from quire.program.numerics import fma, quantize_rows, silu
from quire.program.ops import Embed, Experts, GatedLinear, Linear
from quire.program.ops.experts import ExpertWeights, Routing
from quire.program.passes import fuse
from quire.program.program import Run, Value
from quire.quantize.integers import Int4, Int8, unpack
from quire.quantize.round_to_nearest import quantize

F = np.float32
SCHEMES = pytest.mark.parametrize("scheme", ["int8", "int4"])


def quantized(array: np.ndarray, scheme: str) -> Int8 | Int4:
    return quantize(WeightSpec("w", array.shape, ("w",), quantizable=True), array, scheme)


def random(seed: int, *shape: int, spread: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) * spread)).astype(F)


def rounded(exact: Fraction) -> np.float32:
    """The float32 nearest to a fraction, ties to even: decided among the neighbours of a first guess."""
    guess = F(float(exact))
    near = [np.nextafter(guess, F(-np.inf)), guess, np.nextafter(guess, F(np.inf))]
    return min(near, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(np.uint32)) & 1))


def rows_by_hand(row: np.ndarray, block_scaled: bool) -> tuple[list[int], list[int], list[np.float32]]:
    q: list[int] = []
    block_scales: list[int] = []
    scales: list[np.float32] = []
    steps = F(127 * 127) if block_scaled else F(127)
    for block in (row[i : i + 128] for i in range(0, len(row), 128)):
        amax = max(abs(block))
        inverse = steps / amax if amax else F(0)
        for group in (block[i : i + 32] for i in range(0, len(block), 32)):
            block_scale = min(int(np.ceil(max(abs(group)) * (inverse / F(127)))), 127) if block_scaled else 1
            q += [int(np.rint(x * (inverse / F(block_scale)))) if block_scale else 0 for x in group]
            block_scales.append(block_scale)
        scales.append(amax / steps)
    return q, block_scales, scales


def by_hand(x: np.ndarray, weight: Int8 | Int4, output: int) -> np.float32:
    """One number of the product, from Python's integers and fractions."""
    block_scaled = isinstance(weight, Int8)
    q_x, row_scales, scales = rows_by_hand(x, block_scaled)
    whole = weight.values if isinstance(weight, Int8) else unpack(weight.packed, weight.width).astype(int) - 8
    q_w, block_scales = whole[output].tolist(), weight.scales[output].tolist()
    sums = [0] * len(scales)
    for group, (block_scale, row_scale) in enumerate(zip(block_scales, row_scales, strict=True)):
        dot = sum(q_w[k] * q_x[k] for k in range(group * 32, min(group * 32 + 32, len(x))))
        sums[group // 4] += block_scale * (row_scale * ((dot + 8) // 16) if block_scaled else dot)
    assert max(map(abs, sums)) < 2**31
    total = F(0)
    for s, scale in zip(sums, scales, strict=True):
        factor = Fraction(float(scale * F(16 if block_scaled else 1)))
        total = rounded(Fraction(float(rounded(Fraction(s)))) * factor + Fraction(float(total)))
    return total * weight.channel_scales[output]


@given(st.integers(0, 2**32 - 1), st.integers(1, 700), st.sampled_from(["int8", "int4"]))
@settings(max_examples=30)
def test_every_bit_is_the_one_defined(seed: int, width: int, scheme: str) -> None:
    x, weight = random(seed, 3, width), quantized(random(seed + 1, 5, width), scheme)
    product = weight.product(x)
    assert product.dtype == F
    for row in range(3):
        for output in range(5):
            assert product[row, output] == by_hand(x[row], weight, output)


@pytest.mark.parametrize("block_scaled", [True, False])
def test_quantized_rows(block_scaled: bool) -> None:
    x = random(0, 4, 300)
    q, block_scales, scales = quantize_rows(x, block_scaled)
    assert (q.shape, block_scales.shape, scales.shape) == ((4, 300), (4, 10), (4, 3))
    for row in range(4):
        assert (q[row].tolist(), block_scales[row].tolist(), scales[row].tolist()) == rows_by_hand(
            x[row], block_scaled
        )
    assert (np.abs(q).reshape(-1).max(), np.abs(q[:, 256:]).max()) == (127, 127)
    assert (len(np.unique(block_scales)) > 5, block_scales.max()) == (
        block_scaled,
        127 if block_scaled else 1,
    )
    halves = np.array([[127, 0.5, 1.5, 2.5, -0.5, -3.5]], F)
    assert quantize_rows(halves, block_scaled)[0].tolist() == [[127, 0, 2, 2, 0, -4]]


def test_a_small_group_beside_a_large_one_keeps_its_precision() -> None:
    """A block scale is rounded up: up to that many steps are lost, and no number is clipped."""
    x = random(9, 50, 128, spread=0.0)
    x[:, :32] /= np.geomspace(1, 300, 50, dtype=F)[:, None]
    q, block_scales, scales = quantize_rows(x, block_scaled=True)
    back = q * np.repeat(block_scales, 32, axis=1) * scales
    tops = np.abs(x).reshape(50, 4, 32).max(-1)
    steps = tops / 127 + scales
    assert (np.abs(back - x).reshape(50, 4, 32).max(-1) <= steps * 0.5001).all()
    assert (np.abs(q) <= 127).all()


@SCHEMES
@pytest.mark.parametrize("width", [32, 172, 512])
def test_a_row_has_the_same_bits_in_any_company(scheme: str, width: int) -> None:
    x, weight = random(1, 130, width), quantized(random(2, 65, width), scheme)
    whole = weight.product(x).tobytes()
    for size in (1, 2, 7, 64):
        parts = [weight.product(x[i : i + size]) for i in range(0, 130, size)]
        assert np.concatenate(parts).tobytes() == whole
    outputs = [weight[i : i + 1].product(x) for i in range(65)]
    assert np.concatenate(outputs, axis=1).tobytes() == whole
    assert weight.product(x[:0]).shape == (0, 65)


@SCHEMES
def test_the_largest_integers_are_exact(scheme: str) -> None:
    """All weights, block_scales and activations near their limits: far more than a float32 sum can hold."""
    rng = np.random.default_rng(0)
    near, x = rng.uniform(0.9, 1, (40, 256)).astype(F), rng.uniform(0.9, 1, 256).astype(F)
    weight = quantized(near, scheme)
    assert weight.product(x[None])[0].tolist() == [by_hand(x, weight, output) for output in range(40)]
    weight = quantized(np.full((2, 256), -1, F), scheme)
    sign = np.array([[1], [-1]], F)
    product = weight.product(sign * np.ones(256, F))
    assert [row[0] for row in product] == [by_hand(row * np.ones(256, F), weight, 0) for row in sign]
    np.testing.assert_allclose(product, -256 * sign * np.ones(2), rtol=0.005)


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(1 << 23, 1 << 24, 3000).astype(F) for _ in range(2))
    c = (rng.choice([-1, 1], 3000) * 2.0 ** rng.integers(20, 80, 3000)).astype(F)
    for x, y, z, result in zip(a, b, c, fma(a, b, c), strict=True):
        assert result == rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
    # (1 + 2^-12)^2 lies halfway between two float32. What is added is lost in float64, and decides.
    edge = np.full(3, 1 + 2.0**-12, F)
    result = fma(edge, edge, np.array([0, 2.0**-60, -(2.0**-60)], F))
    assert result.tolist() == [1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11]
    result = fma(-edge, edge, np.array([0, -(2.0**-60), 2.0**-60], F))
    assert result.tolist() == [-1 - 2.0**-11, -1 - 2.0**-11 - 2.0**-23, -1 - 2.0**-11]
    odd = fma(edge, edge * F(1 + 2.0**-12), np.array([2.0**-23, 2.0**-23, 2.0**-23], F))
    exact = Fraction(float(edge[0])) * Fraction(float(edge[0] * F(1 + 2.0**-12))) + Fraction(2) ** -23
    assert odd[0] == rounded(exact)


@SCHEMES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_nan_and_harms_no_other(scheme: str, bad: float) -> None:
    x, weight = random(3, 3, 300), quantized(random(4, 5, 300), scheme)
    clean = weight.product(x)
    x[1, 200] = bad
    product = weight.product(x)
    scales = quantize_rows(x, weight.block_scaled_rows)[2][1]
    assert np.flatnonzero(np.isnan(scales)).tolist() == [1]
    assert np.isnan(product[1]).all()
    assert product[[0, 2]].tobytes() == clean[[0, 2]].tobytes()


@SCHEMES
def test_zeros_and_extremes(scheme: str) -> None:
    weight = quantized(random(5, 4, 160), scheme)
    assert not weight.product(np.zeros((2, 160), F)).any()
    for size in (1e-45, 1e-38, 1e-37, 1e30):
        assert np.isfinite(weight.product(np.full((1, 160), size, F))).all()
    tiny_row = np.full((1, 5), 1e-37, F)
    np.testing.assert_array_equal(quantize_rows(tiny_row, weight.block_scaled_rows)[0], np.zeros((1, 5)))


@SCHEMES
def test_outliers_harm_only_their_own_group(scheme: str) -> None:
    """A few inputs 100 times as large as all others, in one group of the activations, or one block."""
    rng = np.random.default_rng(6)
    x, w = rng.standard_normal((64, 512)).astype(F), rng.standard_normal((256, 512)).astype(F)
    weight = quantized(w, scheme)
    x[:, 140] *= 100
    x[:, 155] *= 100
    own = slice(128, 160 if weight.block_scaled_rows else 256)
    rest = np.delete(np.arange(512), np.arange(own.start, own.stop))
    there = np.zeros_like(x)
    there[:, own] = x[:, own]

    def error(x: np.ndarray, inputs: Any) -> float:
        exact = x.astype(np.float64) @ weight.dense().T.astype(np.float64)
        outside = np.linalg.norm(x[:, inputs].astype(np.float64) @ weight.dense().T[inputs])
        return float(np.linalg.norm(weight.product(x) - exact) / outside)

    assert error(x - there, rest) < 0.01
    # With the outliers the error is that of their group, and what the others add to it is as small.
    wrong = weight.product(x).astype(np.float64) - weight.product(there)
    exact = (x - there).astype(np.float64) @ weight.dense().T.astype(np.float64)
    assert np.linalg.norm(wrong - exact) < 0.01 * np.linalg.norm(exact)


@SCHEMES
def test_ops_multiply_quantized_weights(scheme: str) -> None:
    x, value = random(7, 9, 64), Value(0, "T", (64,))
    specs = [WeightSpec(name, (48, 64), (name,), quantizable=True) for name in ("gate", "up")]
    weights = {s.name: quantized(random(i, 48, 64), scheme) for i, s in enumerate(specs)}
    run = Run(batch_of([(Sequence(list(range(9)), [0]), 9)], 64), {"bias": random(8, 48)}, quantized=weights)
    gate, up = (weights[name].product(x) for name in ("gate", "up"))
    out = Value(1, "T", (48,))
    linear = Linear(out, value, specs[0], WeightSpec("bias", (48,), ("bias",)))
    np.testing.assert_array_equal(linear.reference(run, x), gate + run.weights["bias"])
    gated = GatedLinear(out, value, *specs, "silu")
    np.testing.assert_array_equal(gated.reference(run, x), silu(gate) * up)
    embed = Embed(Value(1, "T", (64,)), specs[0])
    np.testing.assert_array_equal(embed.reference(run), weights["gate"].dense()[:9])


@SCHEMES
def test_experts_multiply_quantized_weights(scheme: str) -> None:
    arrays = {"gate": random(0, 3, 48, 64), "up": random(1, 3, 48, 64), "down": random(2, 3, 64, 48)}
    specs = {name: WeightSpec(name, a.shape, (name,), quantizable=True) for name, a in arrays.items()}
    weights = {name: quantize(specs[name], a, scheme) for name, a in arrays.items()}
    x, scores = random(3, 5, 64), random(4, 5, 3)
    values = Value(0, "T", (64,)), Value(1, "T", (3,)), Value(2, "T", (64,))
    op = Experts(values[2], *values[:2], ExpertWeights(**specs), Routing(1, normalized=True), "silu")
    out = op.reference(Run(batch_of([(Sequence([0] * 5, [0]), 5)], 64), {}, quantized=weights), x, scores)
    for token, expert in enumerate(scores.argmax(-1)):
        gate, up, down = (
            quantize(WeightSpec("w", arrays[n].shape[1:], ("w",)), arrays[n][expert], scheme)
            for n in ("gate", "up", "down")
        )
        row = x[token : token + 1]
        inner = silu(gate.product(row)) * up.product(row)
        np.testing.assert_array_equal(out[token : token + 1], down.product(inner))


@SCHEMES
def test_the_backend_keeps_weights_as_they_are_stored(scheme: str) -> None:
    program = fuse(tiny("llama").program)
    weights, specs = random_weights(program), program.weights()
    small = {
        name: quantize(specs[name], w.array, scheme) if specs[name].quantizable else w
        for name, w in weights.items()
    }
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()

    def logits(weights: dict[str, Any]) -> np.ndarray:
        paged = Paged(program, weights)
        kept = {**paged.backend._weights, **paged.backend._quantized}
        assert {n: w for n, w in kept.items() if not isinstance(w, np.ndarray)} == {
            n: w for n, w in weights.items() if not isinstance(w, Dense)
        }
        return paged.step([(paged.sequence(tokens), 40)])[0]

    ours, floats = logits(small), logits({n: Dense(w.dense()) for n, w in small.items()})
    error = np.linalg.norm(ours - floats) / np.linalg.norm(floats)
    assert 1e-4 < error < 0.05  # of the activations, which float weights do not round
