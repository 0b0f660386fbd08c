"""Every op of the native backend against its reference twin, on every instruction set of this machine.

A program of one op: its inputs are parts of an embedding whose rows are the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from lowered import (
    BF16_ISAS,
    FORMATS,
    ISAS,
    OneOp,
    distance,
    on_native,
    on_reference,
    rounds_to_bf16,
)
from tiny import same_bits

from quire.models.apertus import xielu
from quire.program import Builder, Names, Value, WeightSpec, ops
from quire.program.numerics import ACTIVATIONS
from quire.program.ops.experts import ExpertWeights, Routing
from quire.program.rope import Rope
from quire.quantize.kinds import DTYPES

Record = Callable[..., Value]
W = Names("w")
WIDTHS = [*range(1, 20), 31, 32, 33, 47, 48, 49, 63, 64, 65, 70]
EXTREMES = [0.0, -0.0, 0.3, -0.7, 0.624, 0.626, 1e-30, 3e-39, 20, -20, 87.2, -87.4, 88.6, -88.8, 100, -100]
EXTREMES += [1e30, -1e30, 3e38, -3e38, np.inf, -np.inf, np.nan]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy reports infinities


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def fused_multiply_add(isa: str) -> bool:
    return isa != "portable"


# Matrix products


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_linear(format: str, isa: str) -> None:
    """Sums of integers have no order: with quantized weights the bits are those of the reference."""
    for inputs, outputs in product([1, 31, 32, 33, 90, 130], [1, 15, 17, 33]):
        for bias, tokens in ((True, 19), (False, 2)):
            op = OneOp([draw(tokens, inputs)], lambda b, x, n=outputs, c=bias: b.linear(x, W, n, bias=c))
            rounded = rounds_to_bf16(isa, format)
            found, expected = op.native(isa, format), op.reference(format, rounded=rounded)
            if format in ("int8", "int4") and fused_multiply_add(isa):
                assert same_bits(found, expected), (inputs, outputs)
            assert distance(found, expected) < 2e-6, (inputs, outputs)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if fused_multiply_add(isa)])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_largest_sums_of_quantized_products_fit(format: str, isa: str) -> None:
    """Whether products of a group have one sign, or half of them each."""
    signs = np.sign(draw(6, 96))
    op = OneOp([np.concatenate([signs, np.ones_like(signs), -signs])], lambda b, x: b.linear(x, W, 24))
    op.weights["w.weight"].array[:] = np.concatenate(
        [signs, np.ones_like(signs), -signs, -np.ones_like(signs)]
    )
    assert same_bits(op.native(isa, format), op.reference(format))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_its_bits_beside_any_number_of_others(format: str, isa: str) -> None:
    """Numbers of rows around those that tiles take together, inputs that fill the last tile and do not."""
    for inputs in (64, 90, 161):
        op = OneOp([draw(70, inputs)], lambda b, x: b.linear(x, W, 33, bias=True))
        whole = op.native(isa, format)
        for count in (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 49):
            op.lengths = (count,)
            assert same_bits(op.native(isa, format), whole[:count]), (inputs, count)
        op.lengths = (70,)


@pytest.mark.parametrize("isa", ISAS)
def test_gated_linear(isa: str) -> None:
    def record(b: Builder, x: Value, inner: int, activation: str) -> Value:
        gate, up = (b.linear(x, W / name, inner) for name in ("gate", "up"))
        return b.gated_activation(gate, up, activation)

    for format, activation, inner in product(FORMATS, ACTIVATIONS, [1, 33]):
        op = OneOp([draw(11, 50)], lambda b, x, n=inner, a=activation: record(b, x, n, a))
        found = op.native(isa, format)
        expected = op.reference(format, rounded=rounds_to_bf16(isa, format))
        assert distance(found, expected) < 4e-6, (format, activation, inner)


def assert_close_in_formats(isa: str, record: Record, formats: dict[str, str]) -> None:
    """With some weights stored as said and the others in float32."""
    op = OneOp([draw(9, 40)], record)
    checkpoint = op.checkpoint(**{n: op.weights[n].array.astype(DTYPES[f]) for n, f in formats.items()})
    found = op.run(on_native(op.program, checkpoint, "f32", isa))
    expected = op.run(on_reference(op.program, checkpoint, "f32"))
    assert distance(found, expected) < (2e-2 if isa in BF16_ISAS else 2e-6), formats


@pytest.mark.parametrize("isa", ISAS)
def test_products_of_one_value_in_unlike_formats(isa: str) -> None:
    """A checkpoint may mix float formats: each product finds the value's rows laid out for its own weight."""

    def record(b: Builder, x: Value) -> Value:
        first, second, third = (b.linear(x, W / name, 20) for name in "abc")
        return b.add(b.add(first, second), third)

    assert_close_in_formats(isa, record, {"w.b.weight": "f16", "w.c.weight": "bf16"})


@pytest.mark.parametrize("isa", ISAS)
def test_a_gate_and_an_up_matrix_in_unlike_formats(isa: str) -> None:
    def record(b: Builder, x: Value) -> Value:
        gate, up = (b.linear(x, W / name, 20) for name in ("gate", "up"))
        return b.gated_activation(gate, up, "silu")

    assert_close_in_formats(isa, record, {"w.gate.weight": "bf16"})
    assert_close_in_formats(isa, record, {"w.up.weight": "bf16"})


@pytest.mark.parametrize("isa", ISAS)
def test_matrices_of_experts_in_unlike_formats(isa: str) -> None:
    weights = stack(4, 40, 24, biases=False)

    def record(b: Builder, x: Value) -> Value:
        return b.experts(x, b.linear(x, W / "router", 4), weights, routing=Routing(2))

    assert_close_in_formats(isa, record, {"w.down": "bf16"})
    assert_close_in_formats(isa, record, {"w.up": "bf16"})


# Embeddings


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_embeddings(format: str, isa: str) -> None:
    """Rows of a table that is the output head too are widened exactly; `start` moves the positions."""
    for width in (1, 31, 33, 64, 130):
        op = OneOp([draw(40, 1)], lambda b, x, n=width: b.embed(W, 40, n, tied=True))
        assert same_bits(op.native(isa, format), op.reference(format)), width
        op = OneOp([draw(40, 1)], lambda b, x, n=width: b.embed(W, 25, (1, n)))  # ids beyond it: row 0
        assert same_bits(op.native(isa, format), op.reference(format)), width
        op = OneOp([draw(40, 1)], lambda b, x, n=width: b.embed(W, 40, n, replaced=(7, 30)))
        found = op.native(isa, format)
        assert same_bits(found, op.reference(format)), width
        assert same_bits(found[7], found[30]), width
        op = OneOp([draw(20, 1)], lambda b, x, n=width: b.position_embed(W, 40, n))
        assert same_bits(op.native(isa, format, 13), op.reference(format, 13)), width


# Norms


@pytest.mark.parametrize("isa", ISAS)
def test_norms(isa: str) -> None:
    def layer_norm(b: Builder, x: Value, bias: bool) -> Value:
        return b.layer_norm(x, W, 1e-5, bias=bias)

    kinds: list[Record] = [
        lambda b, x: b.rms_norm(x, W, 1e-5),
        lambda b, x: b.rms_norm(x, W, 1e-6, 1.0),
        lambda b, x: b.rms_norm(x, None, 1e-6),
        lambda b, x: b.match_magnitude(x, b.scale(x, 7.0), 1e-5),
        lambda b, x: b.match_magnitude(x, b.activation(x, "relu"), 4.0),
        lambda b, x: b.above_cutoff(x, 0.7),
        lambda b, x: layer_norm(b, x, bias=True),
        lambda b, x: layer_norm(b, x, bias=False),
    ]
    for number, width in product(range(len(kinds)), WIDTHS):
        shape = (3, width) if width % 2 else (width,)  # of each head, or of the whole row
        op = OneOp([draw(9, *shape) * 3 + 1], kinds[number])
        np.testing.assert_allclose(op.native(isa), op.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_norms_of_extreme_rows(isa: str) -> None:
    """Zeros give zeros, and what is not a number stays in its row."""
    x = np.ones((5, 21), np.float32)
    x[1], x[2, 20], x[3, 0] = 0, np.nan, 1e30
    for record in (lambda b, v: b.rms_norm(v, W, 1e-6), lambda b, v: b.layer_norm(v, W, 1e-6)):
        op = OneOp([x], record)
        np.testing.assert_allclose(op.native(isa), op.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_a_sum_and_its_norm(isa: str) -> None:
    def record(b: Builder, x: Value, y: Value) -> Value:
        total = b.add(x, y)
        return b.add(b.rms_norm(total, W, 1e-5), total)

    op = OneOp([draw(20, 37), draw(20, 37, seed=1)], record)
    np.testing.assert_allclose(op.native(isa), op.reference(), rtol=1e-5, atol=1e-6)


# Each number by itself


def clip(b: Builder, x: Value, y: Value) -> Value:
    low, high = (WeightSpec(f"w.{name}", (), (f"w.{name}",)) for name in ("in_min", "in_max"))
    return b.record(ops.Clip(b.value(y.shape), y, low, high)).out


def standardize(b: Builder, x: Value, y: Value) -> Value:
    bias, factors = (WeightSpec(f"w.{name}", x.shape, (f"w.{name}",)) for name in ("bias", "scale"))
    return b.record(ops.Standardize(b.value(x.shape), x, bias, factors)).out


@pytest.mark.parametrize("isa", ISAS)
def test_sums_products_and_parts_have_the_bits_of_the_reference(isa: str) -> None:
    kinds: list[Record] = [
        lambda b, x, y: b.add(x, y),
        lambda b, x, y: b.scale(x, 0.3),
        lambda b, x, y: b.scale_by_weight(x, W, 1),
        lambda b, x, y: b.gated_activation(b.slice(y, 3, 1), x, "linear"),
        lambda b, x, y: b.scale_by_weight(b.slice(x, 2, (3, 5)), W, 5),
        lambda b, x, y: b.slice(x, 5, (4, 3)),
        lambda b, x, y: b.slice(y, 16, 1),
        lambda b, x, y: b.activation(x, "relu"),
        clip,
        standardize,
    ]
    for record in kinds:
        op = OneOp([draw(12, 17), draw(12, 17, seed=1) * 5], record)
        assert same_bits(op.native(isa), op.reference())


@pytest.mark.parametrize("isa", ISAS)
def test_factors_of_positions_have_the_bits_of_the_reference(isa: str) -> None:
    for first in (0, 1):
        op = OneOp([draw(60, 3, 7)], lambda b, x, first=first: b.scale_by_position(x, 0.3, 16, first))
        for start in (0, 13, 900):
            assert same_bits(op.native(isa, start=start), op.reference(start=start)), start


@pytest.mark.parametrize("isa", ISAS)
def test_activations(isa: str) -> None:
    x = np.concatenate([np.linspace(-30, 30, 997), np.linspace(-1, 1, 301), EXTREMES]).astype(np.float32)
    x, up = np.resize(x, (20, 67)), draw(20, 67)
    kinds: list[tuple[Record, float]] = [(lambda b, v, w: b.soft_cap(v, 2.5), 2.5)]
    kinds.append((lambda b, v, w: b.soft_cap(v, 50.0), 50.0))
    for name in ACTIVATIONS:
        kinds.append((lambda b, v, w, n=name: b.activation(v, n), 1.0))
        kinds.append((lambda b, v, w, n=name: b.gated_activation(v, w, n), 1.0))
        kinds.append((lambda b, v, w, n=name: b.gated_activation(b.slice(v, 3, 1), w, n), 1.0))
    kinds.append((lambda b, v, w: xielu(b, v, W), 1.0))
    for record, unit in kinds:
        op = OneOp([x, up], record)
        np.testing.assert_allclose(op.native(isa), op.reference(), rtol=3e-6, atol=1e-6 * unit)


@pytest.mark.parametrize("isa", ISAS)
def test_gated_norms(isa: str) -> None:
    for first, heads, width, groups in (
        (False, 3, 5, 1),
        (True, 1, 34, 2),
        (False, 2, 33, 3),
        (True, 4, 16, 1),
    ):
        op = OneOp(
            [draw(19, heads, width), draw(19, heads, width, seed=1)],
            lambda b, x, g, f=first, n=groups: b.gated_rms_norm(
                x, g, W / "norm", 1e-3, gate_first=f, groups=n
            ),
        )
        np.testing.assert_allclose(op.native(isa), op.reference(), rtol=1e-5, atol=1e-6)


# Rotary


@pytest.mark.parametrize("isa", ISAS)
def test_rotary(isa: str) -> None:
    for interleaved, (dim, rotated) in product([False, True], [(2, 2), (6, 6), (34, 34), (64, 32), (80, 20)]):
        rope = Rope(rotated, 10_000.0, interleaved, attention_factor=1.2)
        op = OneOp([draw(20, 3, dim)], lambda b, x, r=rope: b.rotary(x, r))
        for start in (0, 900):
            found, expected = op.native(isa, start=start), op.reference(start=start)
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_rotary_of_the_last_numbers_and_back(isa: str) -> None:
    for interleaved, inverse, first in product([False, True], [False, True], [0, 1, 5, 16]):
        rope = Rope(20, 10_000.0, interleaved)

        def record(b: Builder, x: Value, how: tuple[Rope, int, bool] = (rope, first, inverse)) -> Value:
            return b.record(ops.Rotary(b.value(x.shape), x, *how)).out

        op = OneOp([draw(20, 3, first + 20)], record)
        np.testing.assert_allclose(op.native(isa, start=70), op.reference(start=70), rtol=1e-6, atol=1e-6)


# Experts


def stack(count: int, hidden: int, inner: int, biases: bool) -> ExpertWeights:
    def spec(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(W / name, (count, *shape), (W / name,), quantizable=len(shape) > 1)

    matrices = (spec("gate", inner, hidden), spec("up", inner, hidden), spec("down", hidden, inner))
    if not biases:
        return ExpertWeights(*matrices)
    return ExpertWeights(*matrices, spec("gate_b", inner), spec("up_b", inner), spec("down_b", hidden))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_experts(format: str, isa: str) -> None:
    """Tokens in plenty and alone, all experts chosen or one, biases or none, the bounded activation."""
    cases = [
        (40, Routing(2), "silu", False, None, True),
        (9, Routing(5, normalized=True), "gelu_new", True, None, True),
        (1, Routing(1), "relu", True, None, True),
        (23, Routing(3, normalized=True), "silu", True, 0.5, True),
        (18, Routing(1, normalized=True), "silu", False, 7.0, True),
        (29, Routing(2, "sqrtsoftplus", normalized=True), "silu", False, 0.5, False),
    ]
    for tokens, routing, activation, biases, limit, shifted in cases:
        how = {"routing": routing, "activation": activation, "limit": limit, "shifted": shifted}
        weights = stack(5, 33, 140, biases)
        x, scores = draw(tokens, 33), np.round(draw(tokens, 5, seed=1) * 2) / 2  # ties
        op = OneOp([x, scores], lambda b, v, s, w=weights, h=how: b.experts(v, s, w, **h))
        found = op.native(isa, format, threads=2)
        expected = op.reference(format, rounded=rounds_to_bf16(isa, format))
        errors = [distance(a, b) for a, b in zip(found, expected, strict=True)]
        rounds = format in ("int8", "int4") or rounds_to_bf16(isa, format)
        far = sum(error > 5e-6 for error in errors)
        assert far <= (2 if rounds else 0), (tokens, limit)  # where a number between the products rounds over
        assert max(errors) < (1e-2 if rounds else 5e-6), (tokens, limit)


@pytest.mark.parametrize("isa", ISAS)
def test_routing_has_the_bits_of_the_reference(isa: str) -> None:
    """Experts whose matrices are of ones: what differs between tokens are their experts' shares."""
    count = 24
    bias, factors = (WeightSpec(W / name, (count,), (W / name,)) for name in ("bias", "factors"))
    table = WeightSpec(W / "table", (190 * 3,), (W / "table",), below=count)  # the last tokens have no row
    weights = stack(count, 1, 1, biases=False)
    spread = {f"w.{n}": np.ones((count, 1, 1), np.float32) for n in ("gate", "up")}
    spread["w.down"] = 3.0 ** -np.arange(count, dtype=np.float32)[:, None, None]
    x = np.ones((200, 1), np.float32)
    scores = np.concatenate([np.round(draw(60, count) * 2) / 2, draw(80, count), draw(60, count) * 40])
    scores[7, 3], scores[8, 4], scores[9] = np.nan, np.inf, -np.inf
    for how in (
        Routing(4, "sigmoid", True, bias, 4, 2, "top2", 2.5, 1e-20),
        Routing(6, "softmax", False, None, 3, 1, "max", 16.0),
        Routing(8, "softmax", True, bias, 6, 3, "top2"),
        Routing(3, "sigmoid", False),
        Routing(2, "sigmoid", on_inputs=True),
        Routing(24, "softmax"),
        Routing(5, "softmax", True, scaling=0.7, factors=factors),
        Routing(4, margin=0.6),
        Routing(6, "sqrtsoftplus", True, bias, scaling=2.5, floor=1e-20),
        Routing(3, "sqrtsoftplus", True, scaling=1.5, floor=1e-20, listed=table),
    ):
        op = OneOp([x, scores], lambda b, v, s, h=how: b.experts(v, s, weights, routing=h, activation="relu"))
        kept = spread | {spec.name: draw(*spec.shape, seed=3) for spec in how.weights()}
        kept["w.table"] = np.random.default_rng(0).integers(0, count, table.shape).astype(np.float32)
        checkpoint = op.checkpoint(**kept)
        found = op.run(on_native(op.program, checkpoint, "f32", isa, threads=2))
        assert same_bits(found, op.run(on_reference(op.program, checkpoint, "f32"))), how
