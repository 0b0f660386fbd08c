"""Kernels of weights of other formats in Triton's interpreter: codes that are integers bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from coded import GGUF_KINDS, coded
from on_accelerator import interpreted
from tiny import Paged, same_bits

from quire.backends.backend import Capacity
from quire.backends.cuda import coded_packing
from quire.backends.cuda.accelerator import Launch
from quire.backends.cuda.asked import require_compiled
from quire.backends.cuda.device import cuda_device
from quire.backends.cuda.interpreted import InterpretedAccelerator, view_of
from quire.backends.cuda.lower import scratch_row_bytes
from quire.backends.cuda.segments import MEMORY_BYTES
from quire.backends.cuda.weights import format_of, place_weights, plan_layout
from quire.program import Builder, Names, Program, numerics
from quire.program.numerics import silu
from quire.program.ops import GatedLinear, experts
from quire.program.ops.experts import ExpertWeights, Routing
from quire.program.passes import fuse
from quire.program.program import WeightSpec
from quire.quantize.coded import Coded
from quire.quantize.kinds import Dense
from quire.quantize.scales import Scales
from quire.weights.plan import WeightPlan

NF4 = tuple(float(np.float32(x)) for x in np.linspace(-1, 1, 16) ** 3)
# Every number of bits, unit of sums, form of scales, and what is added to them, as the formats have them.
INTEGERS: dict[str, dict[str, Any]] = {
    **GGUF_KINDS,
    "iq4_xs": {"bits": 4, "table": "iq4nl", "scales": "i8", "group": 16},
    "mxfp4": {"bits": 4, "table": "fp4", "scales": "e8m0"},
    "nvfp4": {"bits": 4, "table": "fp4", "group": 16, "scales": "e4m3"},
    "nvfp4 divided": {"bits": 4, "table": "fp4", "group": 16, "scales": "over"},
    "awq": {"bits": 4, "group": 128, "zeros": True},
    "gptq of a row": {"bits": 4, "group": None, "zeros": True, "scales": "bf16"},
    "gptq of 8 bits": {"bits": 8, "group": 64, "zeros": True},
    "w8 of a row": {"bits": 8, "table": "signed", "group": None, "scales": "f32"},
    "mlx": {"bits": 6, "group": 64, "scales": "bf16", "minimums": "bf16"},
    "mlx of 8 bits": {"bits": 8, "group": 64, "scales": "bf16", "minimums": "bf16"},
    "signed": {"bits": 4, "table": "signed", "group": 256, "scales": "f32"},
    "groups of 48": {"bits": 5, "group": 48, "minimums": "f16"},
    "tq2_0": {"bits": 2, "zeros": True, "group": 256},
    "bitnet": {"bits": 2, "table": "offset", "group": None, "scales": "bf16"},
    "7 bits": {"bits": 7, "table": "signed", "group": 64},
    "7 bits with zeros": {"bits": 7, "zeros": True, "group": 128},
    "act-order": {"bits": 4, "group": 128, "zeros": True, "ordered": True},
    "w8a8": {"bits": 8, "table": "signed", "group": None, "scales": "bf16", "by_row": True},
}
NO_TABLES = {"act-order", "w8a8", "tq2_0", "bitnet"}
FLOATS: dict[str, dict[str, Any]] = {
    "fp8": {"bits": 8, "table": "e4m3", "group": 128, "scales": "f32"},
    "fp8 of a row": {"bits": 8, "table": "e4m3", "group": None, "scales": "bf16"},
    "e5m2": {"bits": 8, "table": "e5m2", "group": None, "scales": "f32"},
    "mxfp8": {"bits": 8, "table": "e4m3", "scales": "e8m0"},
    "nf4": {"bits": 4, "table": NF4, "group": 64, "scales": "f32"},
}


def weight_of(name: str, *shape: int, seed: int = 0) -> Coded:
    """Return a weight by chance, whose 8-bit floats are finite."""
    how = dict((INTEGERS | FLOATS)[name])
    if name.startswith("nvfp4"):
        divided = how.pop("scales") == "over"
        made = coded(shape, seed=seed, **how)
        codes = made.scales.values.astype(ml_dtypes.float8_e4m3fn)
        whole = np.random.default_rng(seed).random((*shape[:-1], 1)).astype(np.float32) + np.float32(0.1)
        return replace(made, scales=Scales(whole, codes, 0, divided=divided))
    by_row = how.pop("by_row", False)
    made = replace(coded(shape, seed=seed, **how), by_row=by_row)
    if made.table in ("e4m3", "e5m2"):
        made.packed[...] &= 0xBF  # exponents below half of the largest
    return made


def activations(rows: int, inputs: int, seed: int = 1) -> np.ndarray:
    """Return rows of very different sizes, with a group of zeros."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(3 * rng.standard_normal((rows, -(-inputs // 8)))).repeat(8, 1)[:, :inputs]
    x = rng.standard_normal((rows, inputs)) * sizes
    x[0, :32] = 0
    return x.astype(np.float32)


def linear(outputs: int, inputs: int, rows: int, bias: bool = False) -> Program:
    """Return a program that multiplies the rows of a table."""
    b, w = Builder(), Names("")
    x = b.sampled_rows(b.embed(w / "table", rows, inputs))
    return b.program(b.linear(x, w / "matrix", outputs, bias=bias))


def run(program: Program, rows: int, weights: dict[str, Any]) -> np.ndarray:
    """Return what the accelerator computes for the first rows of a table: for one, then for the others."""
    paged = Paged(program, weights, make=interpreted)
    return paged.prefill(paged.sequence(range(rows)), (1,))


@pytest.mark.parametrize("name", INTEGERS)
def test_products_have_the_bits_of_the_reference(name: str) -> None:
    """A width that fills neither groups nor spans, in both tiles."""
    weight, x = weight_of(name, 18, 172), activations(18, 172)
    weights = {"table.weight": Dense(x), "matrix.weight": weight}
    assert same_bits(run(linear(18, 172, 18), 18, weights), weight.product(x))


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q6_k", "nvfp4", "nvfp4 divided"])
def test_steps_of_fewer_groups_have_the_same_bits(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels in units of 16 are compiled with fewer groups in a step for some targets."""
    launch = InterpretedAccelerator.launch

    def shorter(self: InterpretedAccelerator, asked: Launch) -> None:
        own = {"AT_ONCE": at_once} if asked.kernel == "coded_product" else {}
        launch(self, replace(asked, constants={**asked.constants, **own}))

    monkeypatch.setattr(InterpretedAccelerator, "launch", shorter)
    weight, x = weight_of(name, 18, 300), activations(18, 300)
    weights = {"table.weight": Dense(x), "matrix.weight": weight}
    assert same_bits(run(linear(18, 300, 18), 18, weights), weight.product(x))


@pytest.mark.parametrize("name", FLOATS)
def test_products_of_floats(name: str) -> None:
    """8-bit floats meet activations rounded to bfloat16, tables of floats those that are not rounded."""
    weight, x = weight_of(name, 18, 176), activations(18, 176)
    weights = {"table.weight": Dense(x), "matrix.weight": weight}
    found = run(linear(18, 176, 18), 18, weights)
    x = x.astype(ml_dtypes.bfloat16) if isinstance(weight.table, str) else x
    wanted = x.astype(np.float64) @ weight.dense().T.astype(np.float64)
    bound = np.abs(x.astype(np.float64)) @ np.abs(weight.dense().T.astype(np.float64))
    assert (np.abs(found - wanted) < 1e-6 * bound).all()


def test_w8a8_with_infinity_and_zeros_has_the_bits_of_the_reference() -> None:
    """Rows of activations have one scale, and a row has one sum of integers."""
    weight, x = weight_of("w8a8", 18, 172), activations(18, 172)
    x[3, 5], x[4] = np.inf, 0
    weights = {"table.weight": Dense(x), "matrix.weight": weight}
    assert same_bits(run(linear(18, 172, 18), 18, weights), weight.product(x))


def test_activations_that_are_not_finite_and_largest_sums() -> None:
    """A row that is not finite is NaN alone; products of the largest numbers are exact integers."""
    x = np.ones((18, 256), np.float32)
    x[1, 3], x[2, 200], x[3] = np.nan, -np.inf, 1e-39
    for name in ("gptq of 8 bits", "q6_k"):
        weight = weight_of(name, 18, 256)
        weight.packed[...] = 0xFF
        found = run(linear(18, 256, 18), 18, {"table.weight": Dense(x), "matrix.weight": weight})
        assert np.isnan(found[1:3]).all()
        assert np.array_equal(found, weight.product(x), equal_nan=True)


def test_the_smallest_and_the_invalid_scale_of_mxfp4() -> None:
    """Half of the smallest is a subnormal number; the invalid one makes its outputs NaN."""
    x, scales = activations(18, 64), np.array([[0, 1], [255, 120]], np.uint8)
    weight = Coded("mxfp4", np.full((2, 32), 0x35, np.uint8), 4, 64, "fp4", 32, Scales(scales))
    found = run(linear(2, 64, 18), 18, {"table.weight": Dense(x), "matrix.weight": weight})
    assert np.array_equal(found, weight.product(x), equal_nan=True)
    assert np.isnan(found[:, 1]).all()
    assert (found[1:, 0] != 0).any()


def test_bias() -> None:
    program, rng = linear(18, 96, 18, bias=True), np.random.default_rng(3)
    for name in ("q4_k", "fp8"):
        weight, x, bias = weight_of(name, 18, 96), activations(18, 96), rng.standard_normal(18).astype("f4")
        weights: dict[str, Any] = {"table.weight": Dense(x), "matrix.weight": weight}
        without = run(linear(18, 96, 18), 18, weights)
        assert same_bits(run(program, 18, weights | {"matrix.bias": Dense(bias)}), without + bias)


@pytest.mark.parametrize("name", [*sorted(INTEGERS.keys() - NO_TABLES), *FLOATS])
def test_rows_of_a_table_are_exact(name: str) -> None:
    table, b = weight_of(name, 12, 300), Builder()
    program = b.program(b.sampled_rows(b.embed(Names("w"), 12, 300)))
    assert same_bits(run(program, 3, {"w.weight": table}), table.dense()[:3])


@pytest.mark.parametrize("name", ["q5_k", "act-order", "nf4"])
def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A weight that is packed some rows at a time has the same bytes."""
    weight, b, w = weight_of(name, 40, 300), Builder(), Names("")
    program = b.program(b.linear(b.sampled_rows(b.embed(w / "table", 3, 300)), w / "matrix", 40))
    weights = {"table.weight": Dense(activations(3, 300)), "matrix.weight": weight}
    whole = place_weights(program, weights, InterpretedAccelerator())["matrix.weight"]
    monkeypatch.setattr(coded_packing, "_PIECE", 1000)
    found = place_weights(program, weights, InterpretedAccelerator())["matrix.weight"]
    for own, other in zip(found.arrays, whole.arrays, strict=True):
        assert (view_of(own).view(np.uint8) == view_of(other).view(np.uint8)).all()


def test_memory_of_steps_is_planned() -> None:
    """A step allocates what was planned for it, with the gate of a layer in scratch memory."""
    b, w, tokens = Builder(), Names(""), 18
    rows = b.embed(w / "table", tokens, 64)
    gated = b.gated_activation(b.linear(rows, w / "gate", 96), b.linear(rows, w / "up", 96), "silu")
    program = fuse(b.program(b.linear(b.sampled_rows(gated), w / "matrix", 16)))
    shapes = {"gate": ("q4_k", 96, 64), "up": ("q6_k", 96, 64), "matrix": ("q8_0", 16, 96)}
    weights: dict[str, Any] = {"table.weight": Dense(activations(tokens, 64))}
    weights |= {f"{name}.weight": weight_of(*how) for name, how in shapes.items()}
    kinds = {name: weight.storage for name, weight in weights.items()}
    plan = WeightPlan(program.weights(), kinds, kinds)
    paged = Paged(program, weights, make=interpreted)
    accelerator: Any = paged.backend._accelerator  # type: ignore[attr-defined]
    before = accelerator.num_bytes
    paged.prefill(paged.sequence(range(tokens)))
    planned = cuda_device("cuda-interpreted").step_bytes(program, plan, tokens) - MEMORY_BYTES
    assert accelerator.num_bytes - before <= planned + 2048
    formats = {name: format_of(kind) for name, kind in kinds.items()}
    assert scratch_row_bytes(program, formats) == 4 * 96 + 128 + 32 + 16  # gate, integers, sums, scale


@pytest.mark.parametrize("kinds", [("q4_k", "q6_k"), ("fp8", "fp8"), ("q8_0", "bf16")])
def test_gates_and_the_rest_may_have_two_kinds(kinds: tuple[str, str]) -> None:
    """Their products are those of one alone, whatever lies in scratch memory."""
    b, w, x = Builder(), Names(""), activations(18, 64) / 50
    rows = b.embed(w / "table", 18, 64)
    gated = b.gated_activation(b.linear(rows, w / "gate", 32), b.linear(rows, w / "up", 32), "silu")
    program = fuse(b.program(b.linear(b.sampled_rows(gated), w / "matrix", 16)))
    assert any(isinstance(op, GatedLinear) for op in program)
    weights: dict[str, Any] = {"table.weight": Dense(x), "matrix.weight": weight_of("q4_0", 16, 32)}
    for seed, (name, kind) in enumerate(zip(("gate", "up"), kinds, strict=True)):
        own = np.random.default_rng(seed).standard_normal((32, 64)).astype(ml_dtypes.bfloat16)
        weights[f"{name}.weight"] = Dense(own) if kind == "bf16" else weight_of(kind, 32, 64, seed=seed)
    apart = []
    for name in ("gate", "up"):
        weight = weights[f"{name}.weight"]
        apart.append(run(linear(32, 64, 18), 18, {"table.weight": Dense(x), "matrix.weight": weight}))
    wanted = weights["matrix.weight"].product(silu(apart[0]) * apart[1])
    assert np.abs(run(program, 18, weights) - wanted).max() < 2e-2 * np.abs(wanted).max()


_KINDS = (
    *(("q4_k", "q6_k", "q5_k"), ("nvfp4", "awq", "q8_0"), ("fp8", "q2_k", "mxfp8")),
    *(("w8a8", "w8a8", "w8a8"), ("nf4", "e5m2", "mlx"), ("w8 of a row", "gptq of 8 bits", "tq2_0")),
)
_ORDERED = (
    *(("act-order", "act-order", "act-order"), ("act-order", "q4_k", "q6_k"), ("awq", "act-order", "nf4")),
)


@pytest.mark.parametrize(
    ("kinds", "on_inputs"),
    [*product(_KINDS + _ORDERED, [False]), *product(_KINDS[:1] + _ORDERED, [True])],
)
def test_experts_of_three_kinds(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, str, str], on_inputs: bool
) -> None:
    """gate, up and down in kinds of their own: each expert has its own matrix, in steps of any size."""

    def rounded(x: np.ndarray, weight: Coded) -> np.ndarray:
        if weight.table in ("e4m3", "e5m2"):
            x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        return numerics.matmul(x, weight)

    monkeypatch.setattr(experts, "matmul", rounded)
    hidden, inner, number = 144, 48, 3
    b, w, shapes = Builder(), Names(""), ((inner, hidden), (inner, hidden), (hidden, inner))
    matrices = [WeightSpec(f"{i}", (number, *shape), (f"{i}",)) for i, shape in enumerate(shapes)]
    x = b.embed(w / "table", 34, hidden)
    scores, routing = b.linear(x, w / "router", number), Routing(2)
    if on_inputs:
        routing = Routing(2, affinity="sigmoid", normalized=False, on_inputs=True)
    mixed = b.experts(x, scores, ExpertWeights(*matrices), routing=routing, activation="relu")
    program = b.program(b.sampled_rows(mixed))
    weights: dict[str, Any] = {
        "table.weight": Dense(activations(34, hidden) / np.float32(50)),
        "router.weight": Dense(activations(number, hidden, 2)),
    }
    for seed, (name, shape) in enumerate(zip(kinds, shapes, strict=True)):
        weights[f"{seed}"] = weight_of(name, number, *shape, seed=seed)
    layout = plan_layout(program, {name: weight.storage for name, weight in weights.items()})
    require_compiled(program, layout, Capacity([8], 16, "float32", 4), InterpretedAccelerator())
    reference, own = Paged(program, weights), Paged(program, weights, make=interpreted)
    wanted = reference.prefill(reference.sequence(range(34)))
    found = own.prefill(own.sequence(range(34)))
    assert np.abs(found - wanted).max() < 3e-6 * np.abs(wanted).max()
    assert same_bits(own.prefill(own.sequence(range(34)), (2, 1)), found)
