"""Every op against a plain float64 formula, and the bits of each row in any company.

Attention, rope and experts have files of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from math import erf, tanh

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Sequence, batch_of, same_bits

from quire.errors import ConfigError
from quire.program import Builder, Names, Program, Value
from quire.program.numerics import ACTIVATIONS, ROW_TILE, matmul
from quire.program.ops import AddNorm, GatedLinear
from quire.program.passes import fuse
from quire.program.program import Op, Run

W = Names("w")
SHAPES = [(1, 1), (1, 7), (2, 4), (3, 5), (7, 1), (16, 16), (31, 33), (48, 100), (64, 3), (65, 129)]
SHAPES += [(100, 17), (172, 64), (255, 31), (300, 1), (512, 48), (777, 130)]
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def run(op: Op, *inputs: np.ndarray, **weights: np.ndarray) -> np.ndarray:
    """The op's reference on a batch of one sequence, weights by their last name."""
    tokens = Sequence([0] * len(inputs[0]), [0])
    names = {spec.name: weights[spec.name.split(".")[-1]] for spec in op.weights()}
    return op.reference(Run(batch_of([(tokens, len(inputs[0]))], 1 << 20), names), *inputs)


def last(b: Builder, value: Value) -> Op:
    return b.program(value).ops[-1]


def source(b: Builder, *shape: int) -> Value:
    """A value of any shape to start from."""
    return b.linear(b.embed(W / "e", 3, 2), W / "source", shape)


def rows_are_alone(op: Op, inputs: list[np.ndarray], **weights: np.ndarray) -> None:
    """Assert that every row has the same bits alone, in pairs, and in the whole."""
    whole = run(op, *inputs, **weights)
    for first in range(len(whole)):
        for count in (1, 2, 5, 16):
            part = run(op, *(x[first : first + count] for x in inputs), **weights)
            assert same_bits(part, np.ascontiguousarray(whole[first : first + count]))


# Matrix products


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_linear(width: int, out: int) -> None:
    x, weight, bias = draw(9, width), draw(out, width, seed=1), draw(out, seed=2)
    expected = np.einsum("ti,oi->to", x.astype(float), weight.astype(float))
    b = Builder()
    plain = run(last(b, b.linear(source(b, width), W, out)), x, weight=weight)
    np.testing.assert_allclose(plain, expected, rtol=1e-5, atol=1e-5 * np.sqrt(width))
    op = last(b, b.linear(source(b, width), W, out, bias=True))
    np.testing.assert_allclose(
        run(op, x, weight=weight, bias=bias), expected + bias, rtol=1e-5, atol=1e-5 * np.sqrt(width)
    )


def test_linear_joins_and_splits_heads() -> None:
    b = Builder()
    op = last(b, b.linear(source(b, 3, 4), W, (5, 2)))
    x, weight = draw(6, 3, 4), draw(10, 12)
    expected = (x.reshape(6, 12).astype(float) @ weight.T.astype(float)).reshape(6, 5, 2)
    np.testing.assert_allclose(run(op, x, weight=weight), expected, **TOLERANCE)


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_matmul_bits_of_a_row_do_not_depend_on_its_company(width: int, out: int) -> None:
    """Every position in the tile, any number of rows, any neighbours."""
    x, weight = draw(100, width), draw(out, width, seed=1)
    whole = matmul(x, weight)
    for count in range(1, 101):
        assert same_bits(matmul(x[:count], weight), whole[:count])
        assert same_bits(matmul(x[100 - count :], weight), whole[100 - count :])
    repeated = matmul(np.repeat(x[:1], 40, axis=0), weight)
    assert all(same_bits(row, whole[0]) for row in repeated)


def test_an_order_that_depends_on_the_number_of_rows_is_noticed() -> None:
    """The control: a product that splits its sum when there are several rows changes bits at some shape."""

    def careless(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        half = x.shape[1] // 2 if len(x) > 1 else 0
        return matmul(x[:, :half], weight[:, :half]) + matmul(x[:, half:], weight[:, half:])

    differ = [
        (width, out)
        for width, out in SHAPES
        for x, weight in [(draw(100, width), draw(out, width, seed=1))]
        if not same_bits(careless(x[:1], weight), careless(x, weight)[:1])
    ]
    assert differ


_DIGEST = """
import hashlib, numpy as np
from threadpoolctl import ThreadpoolController
from quire.program.numerics import matmul
ThreadpoolController().select(user_api="blas").limit(limits=1)  # as the reference backend does
digest = hashlib.sha256()
for width, out in [(64, 64), (100, 17), (257, 300), (512, 512), (1024, 1000), (333, 2048)]:
    rng = np.random.default_rng(width)
    x, w = (rng.standard_normal((n, width)).astype(np.float32) for n in (40, out))
    digest.update(matmul(x, w).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("width", [8, 24, 64, 288, 576])
@pytest.mark.parametrize("out", [8, 16, 33, 100, 512])
def test_matmul_bits_do_not_depend_on_the_place_in_a_tile(width: int, out: int) -> None:
    weight, row = draw(out, width, seed=1), draw(1, width)
    alone = matmul(row, weight)
    for place in range(1, 2 * ROW_TILE):
        company = draw(place, width, seed=2)
        assert same_bits(matmul(np.concatenate([company, row]), weight)[-1:], alone)


def test_matmul_bits_do_not_depend_on_threads() -> None:
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, **dict.fromkeys(names, threads)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2", "4")
    }
    assert len(digests) == 1


# Norms


@pytest.mark.parametrize("shape", [(1,), (5,), (16,), (63,), (200,), (3, 8), (1, 1)], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape: tuple[int, ...], offset: float) -> None:
    b = Builder()
    op = last(b, b.rms_norm(source(b, *shape), W, 1e-5, offset))
    x, weight = draw(20, *shape) * 3, draw(shape[-1], seed=1)
    wide = x.astype(float)
    root = np.sqrt((wide**2).sum(-1, keepdims=True) / shape[-1] + 1e-5)
    np.testing.assert_allclose(run(op, x, weight=weight), wide / root * (weight + offset), **TOLERANCE)
    rows_are_alone(op, [x], weight=weight)


@pytest.mark.parametrize("shape", [(1,), (5,), (63,), (200,), (3, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(shape: tuple[int, ...], bias: bool) -> None:
    b = Builder()
    op = last(b, b.layer_norm(source(b, *shape), W, 1e-5, bias=bias))
    x, weight, shift = draw(20, *shape) * 3 + 1, draw(shape[-1], seed=1), draw(shape[-1], seed=2)
    wide = x.astype(float)
    normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    expected = normed * weight + (shift if bias else 0)
    np.testing.assert_allclose(run(op, x, weight=weight, bias=shift), expected, **TOLERANCE)
    rows_are_alone(op, [x], weight=weight, bias=shift)


def test_norms_of_zeros_are_finite() -> None:
    b = Builder()
    x = np.zeros((2, 8), np.float32)
    for value in (b.rms_norm(source(b, 8), W, 1e-6), b.layer_norm(source(b, 8), W, 1e-6, bias=False)):
        assert not run(last(b, value), x, weight=draw(8)).any()


# Elementwise

FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "gelu_new": lambda x: x * 0.5 * (1 + tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "gelu_pytorch_tanh": lambda x: x * 0.5 * (1 + tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "gelu": lambda x: x * 0.5 * (1 + erf(x / 2**0.5)),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "linear": lambda x: x,
    "tanh": tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    b = Builder()
    x, up = draw(50, 7) * 4, draw(50, 7, seed=1)
    expected = np.array([FORMULAS[name](v) for v in x.astype(float).ravel()]).reshape(x.shape)
    unary = last(b, b.activation(source(b, 7), name))
    np.testing.assert_allclose(run(unary, x), expected, rtol=3e-6, atol=1e-6)
    gated = last(b, b.gated_activation(source(b, 7), source(b, 7), name))
    np.testing.assert_allclose(run(gated, x, up), expected * up, rtol=3e-6, atol=1e-6)
    rows_are_alone(unary, [x])
    rows_are_alone(gated, [x, up])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_at_the_ends(name: str) -> None:
    """Large numbers give the limits without a warning: x or 0 of most."""
    limits = {"sigmoid": [0, 1, 0, 1, 0.5], "relu2": [0, 1e8, 0, 1e4, 0], "linear": [-1e4, 1e4, -100, 100, 0]}
    limits["tanh"] = [-1, 1, -1, 1, 0]
    x = np.array([[-1e4, 1e4, -100.0, 100.0, 0.0]], np.float32)
    np.testing.assert_allclose(ACTIVATIONS[name](x), [limits.get(name, [0, 1e4, 0, 100, 0])], atol=1e-6)


def test_add_scale_soft_cap_slice() -> None:
    b = Builder()
    x, y = draw(12, 20) * 5, draw(12, 20, seed=1)
    assert same_bits(run(last(b, b.add(source(b, 20), source(b, 20))), x, y), x + y)
    assert same_bits(run(last(b, b.scale(source(b, 20), 0.3)), x), x * np.float32(0.3))
    capped = run(last(b, b.soft_cap(source(b, 20), 2.5)), x)
    np.testing.assert_allclose(capped, 2.5 * np.tanh(x.astype(float) / 2.5), **TOLERANCE)
    part = run(last(b, b.slice(source(b, 20), 5, (4, 3))), x)
    assert same_bits(part, x[:, 5:17].reshape(12, 4, 3).copy())
    assert part.flags.c_contiguous
    value = source(b, 20)
    assert b.scale(value, 1) is value


# Embeddings and rows


def test_embeddings_and_sampled_rows() -> None:
    b = Builder()
    table, positions = draw(6, 4), draw(9, 4, seed=1)
    first = Sequence([0, 3, 5, 1, 1], [0], computed=2)
    second = Sequence([2, 2, 4, 0, 5, 1, 3, 0], [1], computed=7)
    batch = batch_of([(first, 3), (second, 1)], 64, logits=np.array([2, 3, 3]))
    state = Run(batch, {"w.t.weight": table, "w.p.weight": positions}, [])
    embed = last(b, b.embed(W / "t", 6, 4))
    assert same_bits(embed.reference(state), table[[5, 1, 1, 0]])
    learned = last(b, b.position_embed(W / "p", 9, 4))
    assert same_bits(learned.reference(state), positions[[2, 3, 4, 7]])
    rows = b.sampled_rows(source(b, 4))
    assert rows.count == "L"
    x = draw(4, 4, seed=2)
    assert same_bits(last(b, rows).reference(state, x), x[[2, 3, 3]])


# Fused ops


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(sorted(ACTIVATIONS)), st.integers(1, 20))
def test_gated_linear(width: int, inner: int, activation: str, rows: int) -> None:
    b = Builder()
    h = source(b, width)
    gate, up = (b.linear(h, W / name, inner) for name in ("gate", "up"))
    program = fuse(b.program(b.gated_activation(gate, up, activation)))
    (op,) = (op for op in program if isinstance(op, GatedLinear))
    x, weights = draw(rows, width), [draw(inner, width, seed=seed) for seed in (1, 2)]
    tokens = Sequence([0] * rows, [0])
    named = {"w.gate.weight": weights[0], "w.up.weight": weights[1]}
    out = op.reference(Run(batch_of([(tokens, rows)], 64), named), x)
    wide = [x.astype(float) @ w.T.astype(float) for w in weights]
    expected = np.vectorize(FORMULAS[activation], otypes=[float])(wide[0]) * wide[1]
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_add_norm_is_the_two_ops_it_replaces(kind: str) -> None:
    b = Builder()
    total = b.add(source(b, 24), source(b, 24))
    out = b.rms_norm(total, W, 1e-5, 1.0) if kind == "rms" else b.layer_norm(total, W, 1e-5)
    plain: Program = b.program(out)
    (op,) = (op for op in fuse(plain) if isinstance(op, AddNorm))
    x, y, weights = draw(7, 24), draw(7, 24, seed=1), {"weight": draw(24, seed=2), "bias": draw(24, seed=3)}
    both = run(op, x, y, **weights)
    assert same_bits(both[0], x + y)
    assert same_bits(both[1], run(plain.ops[-1], x + y, **weights))
    assert op.outputs() == (total, out)
    assert op.inputs() == plain.ops[-2].inputs()


def test_an_op_reads_the_values_it_does_not_write() -> None:
    b = Builder()
    q, k, v = source(b, 4, 2), source(b, 2, 2), source(b, 2, 2)
    mixed = b.attention(q, k, v)
    out = b.linear(mixed, W, 6)
    ops = b.program(out).ops
    assert ops[0].inputs() == ()  # token ids come with the batch
    assert ops[-2].inputs() == (q, k, v)
    assert ops[-1].inputs() == (mixed,)
    assert ops[-1].outputs() == (out,)


# What the builder refuses


def test_builder_refuses_what_does_not_fit() -> None:
    b = Builder()
    x, y, heads = source(b, 6), source(b, 7), source(b, 3, 2)
    broken = [
        lambda: b.add(x, y),
        lambda: b.add(x, b.sampled_rows(x)),
        lambda: b.gated_activation(x, y, "silu"),
        lambda: b.slice(x, 3, 4),
        lambda: b.activation(x, "geluu"),
        lambda: b.attention(heads, source(b, 2, 2), source(b, 2, 2)),
        lambda: b.attention(heads, source(b, 3, 2), source(b, 1, 2)),
    ]
    for record in broken:
        with pytest.raises(ConfigError):
            record()


def test_factors_of_positions() -> None:
    b = Builder()
    op = last(b, b.scale_by_position(source(b, 2, 3), 0.3, 4))
    x = draw(10, 2, 3)
    growth = np.array([1, 1, 1, 1, 2, 2, 2, 2, 3, 3])
    expected = x * (1 + 0.3 * np.log(growth))[:, None, None]
    np.testing.assert_allclose(run(op, x), expected, **TOLERANCE)
    assert same_bits(run(op, x)[:4], x[:4])
