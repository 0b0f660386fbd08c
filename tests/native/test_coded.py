"""Weights of other formats on the native backend, on every instruction set of this machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from coded import GGUF_KINDS, Mixed, coded
from lowered import ISAS, OneOp, distance, on_native, on_reference, planned
from tiny import same_bits

from quire.backends.native.coding import format_of
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops.experts import Experts, ExpertWeights, Routing
from quire.quantize.coded import Coded
from quire.quantize.mixed import MixedStorage
from quire.weights.gguf.blocks import CODINGS

W = Names("w")

# What kernels multiply: every number of bits, size of groups, and form of scales, minimums and zeros.
KINDS: dict[str, dict[str, Any]] = {
    **GGUF_KINDS,
    "awq": {"bits": 4, "group": 128, "zeros": True},
    "gptq of a row": {"bits": 4, "group": None, "zeros": True, "scales": "bf16"},
    "w8a16": {"bits": 8, "table": "offset", "group": 64, "scales": "bf16"},
    "w8 of a row": {"bits": 8, "table": "signed", "group": None, "scales": "f32"},
    "w8a8 with zeros": {"bits": 8, "group": None, "scales": "f32", "zeros": True},
    "mlx": {"bits": 6, "group": 64, "scales": "bf16", "minimums": "bf16"},
    "mlx of 5 bits": {"bits": 5, "group": 128, "scales": "bf16", "minimums": "bf16"},
    "mlx of 2 bits": {"bits": 2, "group": 32, "scales": "bf16", "minimums": "bf16"},
    "gptq of 4 bits": {"bits": 4, "table": "offset", "group": 64},
    "gptq of 3 bits": {"bits": 3, "table": "offset", "group": 64},
    "3 bits of a row": {"bits": 3, "table": "signed", "group": None, "scales": "f32"},
    "powers": {"bits": 4, "table": "signed", "scales": "e8m0"},
    "long groups": {"bits": 4, "group": 512, "scales": "f32", "minimums": "f32"},
    "groups of 48": {"bits": 5, "group": 48, "scales": "f16", "minimums": "f16"},
    "groups of 192": {"bits": 4, "group": 192, "scales": "bf16", "zeros": True},
    "tq2_0": {"bits": 2, "group": 256, "zeros": True},
    "bitnet": {"bits": 2, "table": "offset", "group": None, "scales": "bf16"},
    "7 bits": {"bits": 7, "table": "signed", "group": 64},
    "7 bits offset": {"bits": 7, "table": "offset", "scales": "f32"},
    "act-order": {"bits": 4, "group": 128, "zeros": True, "ordered": True},
    "groups of 8": {"bits": 2, "table": "offset", "group": 8},
    "groups of 12": {"bits": 8, "table": "signed", "group": 12, "scales": "f32"},
    "groups of 20": {"bits": 3, "group": 20, "minimums": "bf16"},
    "groups of 24": {"bits": 5, "group": 24},
    "groups of 40": {"bits": 4, "group": 40, "scales": "bf16", "zeros": True, "ordered": True},
    "groups of 56": {"bits": 6, "table": "offset", "group": 56},
    "table in groups of 24": {"bits": 4, "table": "fp4", "group": 24, "scales": "f32"},
}

# What no kernel multiplies: a group that 4 does not divide, tables of floats for other bits.
UNPACKED: dict[str, dict[str, Any]] = {
    "groups of 10": {"bits": 5, "group": 10},
    "floats of 3 bits": {"bits": 3, "table": (-4.0, -2.5, -1.0, 0.0, 0.3, 1.0, 2.0, 5.0), "group": 64},
}


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def linear(tokens: int, inputs: int, outputs: int) -> OneOp:
    return OneOp([draw(tokens, inputs)], lambda b, x: b.linear(x, W, outputs))


def held(op: OneOp, coded: dict[str, Coded]) -> Mixed:
    """The weights of a program, some of them coded."""
    arrays = {name: weight.array for name, weight in op.weights.items()} | {"x.weight": op.table}
    return Mixed(arrays, coded)


def check(op: OneOp, coded: dict[str, Coded], isa: str, bound: float = 0) -> None:
    """Compare with the reference: bits where the machine rounds a multiply-add once, unless bounded."""
    found = op.run(on_native(op.program, held(op, coded), "f32", isa))
    expected = op.run(on_reference(op.program, held(op, coded), "f32"))
    if isa != "portable" and not bound:
        assert same_bits(found, expected)
    assert distance(found, expected) < (bound or 4e-6)


def test_every_type_of_gguf_has_a_kernel() -> None:
    """What has none is unpacked to float32, up to 16 times as large."""
    assert [name for name, coding in CODINGS.items() if format_of(coding.storage) == "f32"] == []


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", KINDS)
def test_products_have_the_bits_of_the_reference(name: str, isa: str) -> None:
    """Widths that fill blocks, units and groups, and those that do not; whole tiles, and pairs of panels."""
    for inputs, outputs, tokens in [(32, 16, 1), (90, 33, 3), (256, 17, 8), (1000, 20, 22), (768, 40, 45)]:
        check(linear(tokens, inputs, outputs), {"w.weight": coded((outputs, inputs), **KINDS[name])}, isa)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_its_bits_beside_any_number_of_others(name: str) -> None:
    op = linear(17, 300, 33)
    weights = held(op, {"w.weight": coded((33, 300), **KINDS[name])})
    whole = op.run(on_native(op.program, weights, "f32", ISAS[0]))
    for count in range(1, 17):
        op.lengths = (count,)
        assert same_bits(op.run(on_native(op.program, weights, "f32", ISAS[0])), whole[:count])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_table_are_exact(name: str, isa: str) -> None:
    for width in (24, 100, 256, 520):
        table = coded((40, width), **KINDS[name])
        op = OneOp([draw(40, 1)], lambda b, x, n=width: b.embed(W, 40, n, tied=True))
        found = op.run(on_native(op.program, held(op, {"w.weight": table}), "f32", isa))
        assert same_bits(found, table.dense())


@pytest.mark.parametrize("isa", ISAS)
def test_kinds_that_share_their_activations(isa: str) -> None:
    """Products of one value in several kinds; a gate and an up matrix of different bits."""

    def record(b: Builder, x: Value) -> Value:
        gate, up = (b.linear(x, W / name, 20) for name in ("gate", "up"))
        both = b.gated_activation(gate, up, "silu")
        for name in "abcd":
            both = b.add(both, b.linear(x, W / name, 20))
        return both

    op = OneOp([draw(11, 300)], record)
    names = {"gate": "q4_k", "up": "q6_k", "a": "q4_k", "b": "q6_k", "c": "q8_0", "d": "q4_0"}
    weights = {f"w.{n}.weight": coded((20, 300), **KINDS[kind]) for n, kind in names.items()}
    check(op, weights, isa, bound=1e-5)
    check(op, weights | {"w.up.weight": coded((20, 300), **KINDS["q8_0"])}, isa, bound=1e-5)
    orders = {n: coded((20, 300), **KINDS["act-order"], seed=i) for i, n in enumerate(weights)}
    check(op, orders, isa, bound=1e-5)
    same = weights | dict.fromkeys(("w.gate.weight", "w.up.weight", "w.a.weight"), orders["w.a.weight"])
    check(op, same, isa, bound=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_a_gate_in_float32_beside_a_table_of_floats(isa: str) -> None:
    """Both meet the same packed activations, but no kernel multiplies them together."""

    def record(b: Builder, x: Value) -> Value:
        gate, up = (b.linear(x, W / name, 20) for name in ("gate", "up"))
        return b.gated_activation(gate, up, "silu")

    op = OneOp([draw(9, 300)], record)
    table = tuple(np.linspace(-1, 1, 16).tolist())
    weight = coded((20, 300), 4, table=table, group=64, scales="f32")
    for name in ("up", "gate"):
        check(op, {f"w.{name}.weight": weight}, isa, bound=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_experts(isa: str) -> None:
    def spec(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(W / name, (4, *shape), (W / name,), quantizable=True)

    w = ExpertWeights(spec("gate", 64, 40), spec("up", 64, 40), spec("down", 40, 64))

    def record(b: Builder, x: Value) -> Value:
        return b.experts(x, b.linear(x, W / "router", 4), w, routing=Routing(2))

    op = OneOp([draw(9, 40)], record)
    for gate, up, down in product(("q4_k", "q8_0", "act-order"), ("q4_k",), ("q6_k", "act-order")):
        kinds = {w.gate.name: gate, w.up.name: up, w.down.name: down}
        weights = {n: coded(op.weights[n].array.shape, **KINDS[kind]) for n, kind in kinds.items()}
        check(op, weights, isa, bound=1e-5)
    assert {len(matrix.shape) for matrix in weights.values()} == {3}


@pytest.mark.parametrize("isa", ISAS)
def test_experts_of_different_kinds(isa: str) -> None:
    """Codes of several widths and orders, floats, and what is unpacked, in one layer."""

    def spec(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(W / name, (4, *shape), (W / name,), quantizable=True)

    w = ExpertWeights(spec("gate", 64, 40), spec("up", 64, 40), spec("down", 40, 64))
    op = OneOp(
        [draw(9, 40)],
        lambda b, x: b.experts(x, b.linear(x, W / "router", 4), w, routing=Routing(2)),
    )
    kinds = [KINDS["q4_k"], KINDS["act-order"], UNPACKED["groups of 10"], KINDS["q8_0"]]
    arrays = {name: weight.array for name, weight in op.weights.items()} | {"x.weight": op.table}
    experts = dict[str, Coded]()
    for number, name in enumerate((w.gate.name, w.up.name, w.down.name)):
        for expert, matrix in enumerate(arrays.pop(name)):
            own = f"{name}.{expert}"
            if (kind := kinds[(expert + number) % 4]) == KINDS["q8_0"]:
                arrays[own] = matrix
            else:
                experts[own] = coded(matrix.shape, **kind, seed=number)

    def apart(spec: WeightSpec) -> WeightSpec:
        return replace(spec, sources=tuple(f"{spec.name}.{expert}" for expert in range(4)))

    own = ExpertWeights(*(apart(replace(s, sources=())) for s in (w.gate, w.up, w.down)))
    ops = [replace(one, experts=own) if isinstance(one, Experts) else one for one in op.program]
    program, held = replace(op.program, ops=tuple(ops)), Mixed(arrays, experts)
    kept = planned(program, held).storage[w.gate.name]
    assert isinstance(kept, MixedStorage)
    assert [kind.kind for kind in kept.kinds] == ["made", "made", "f32", "f32"]
    found = op.run(on_native(program, held, "f32", isa))
    assert distance(found, op.run(on_reference(program, held, "f32"))) < 2e-2
    dense = {own: experts[own].dense() for own in experts}
    exact = op.run(on_reference(program, Mixed(arrays | dense, {}), "f32"))
    assert distance(found, exact) < 2e-2


@pytest.mark.parametrize("name", UNPACKED)
def test_what_no_kernel_multiplies_is_unpacked(name: str) -> None:
    """To float32, in which its products have the bits of those of the same floats."""
    op = linear(5, 90, 33)
    weight = coded((33, 90), **UNPACKED[name])
    found = op.run(on_native(op.program, held(op, {"w.weight": weight}), "f32", ISAS[0]))
    dense = op.checkpoint(**{"w.weight": weight.dense()})
    assert same_bits(found, op.run(on_native(op.program, dense, "f32", ISAS[0])))
