"""Products with a matrix for each head (MLA) whose matrices are codes of other formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from coded import GGUF_KINDS, Mixed, coded
from lowered import distance, rounding_to_bf16
from on_accelerator import interpreted, wide
from test_coded_kernels import FLOATS, INTEGERS, NF4, activations, weight_of
from test_whole_models import TOKENS, in_parts
from tiny import Paged, same_bits

from quire.backends.backend import Capacity
from quire.backends.cuda.asked import require_compiled
from quire.backends.cuda.device import cuda_device
from quire.backends.cuda.interpreted import InterpretedAccelerator
from quire.backends.device import plan_weights
from quire.program import Builder, Names, Program
from quire.program.passes import fuse
from quire.program.program import WeightSpec
from quire.quantize.coded import Coded
from quire.quantize.kinds import Dense
from quire.weights.load import load
from quire.weights.plan import WeightPlan, all_in

HEADS, OUTPUTS, TOKEN_COUNT = 3, 18, 18
# `kv_b_proj` as published models have it, and as their quantizations do.
PUBLISHED: dict[str, dict[str, Any]] = {
    **{name: GGUF_KINDS[name] for name in ("q8_0", "q4_k", "q6_k", "q2_k")},
    "q5_1": {"bits": 5, "minimums": "f16"},
    "fp8 in blocks": {"bits": 8, "table": "e4m3", "group": 128, "scales": "f32"},
    "gptq with act-order": {"bits": 4, "group": 128, "zeros": True, "ordered": True},
    "gptq of 3 bits": {"bits": 3, "group": 128, "zeros": True},
    "w4a16": {"bits": 4, "table": "offset", "group": 128, "scales": "bf16"},
    "w8a8": {"bits": 8, "table": "signed", "group": None, "scales": "bf16"},
    "nf4": {"bits": 4, "table": NF4, "group": 64, "scales": "f32"},
    "mlx of 3 bits": {"bits": 3, "group": 64, "scales": "bf16", "minimums": "bf16"},
    "mlx of 8 bits": {"bits": 8, "group": 64, "scales": "bf16", "minimums": "bf16"},
}


def by_head(weight: Coded, x: np.ndarray) -> np.ndarray:
    """Return what the accelerator computes for x [T, heads, in]: for one token, then for the others."""
    tokens, heads, inputs = x.shape
    b, spec = Builder(), WeightSpec("w", weight.shape, ("w",))
    rows = b.sampled_rows(b.embed(Names("table"), tokens, heads * inputs))
    program = b.program(b.linear_by_head(b.slice(rows, 0, (heads, inputs)), spec))
    weights = {"table.weight": Dense(x.reshape(tokens, -1)), "w": weight}
    paged = Paged(program, weights, make=interpreted)
    return paged.prefill(paged.sequence(range(tokens)), (1,)).reshape(tokens, heads, -1)


@pytest.mark.parametrize("name", INTEGERS)
def test_products_have_the_bits_of_the_reference(name: str) -> None:
    """A width that fills neither groups nor spans, in both tiles."""
    weight = weight_of(name, HEADS, OUTPUTS, 172)
    x = activations(TOKEN_COUNT * HEADS, 172).reshape(TOKEN_COUNT, HEADS, 172)
    wanted = np.stack([weight[head].product(x[:, head]) for head in range(HEADS)], axis=1)
    assert same_bits(by_head(weight, x), wanted)


@pytest.mark.parametrize("name", FLOATS)
def test_products_of_floats(name: str) -> None:
    """8-bit floats meet activations rounded to bfloat16, tables of floats those that are not rounded."""
    weight = weight_of(name, HEADS, OUTPUTS, 176)
    x = activations(TOKEN_COUNT * HEADS, 176).reshape(TOKEN_COUNT, HEADS, 176)
    found = by_head(weight, x).astype(np.float64)
    x = x.astype(ml_dtypes.bfloat16) if isinstance(weight.table, str) else x
    own, matrices = x.astype(np.float64), weight.dense().astype(np.float64)
    bound = np.einsum("thi,hoi->tho", np.abs(own), np.abs(matrices))
    assert (np.abs(found - np.einsum("thi,hoi->tho", own, matrices)) < 1e-6 * bound).all()


def test_matrices_may_have_orders_of_their_own() -> None:
    weight = weight_of("act-order", 2, OUTPUTS, 128)
    assert weight.order is not None
    weight = replace(weight, order=np.stack([weight.order[0], weight.order[0][::-1]]))
    x = activations(TOKEN_COUNT * 2, 128).reshape(TOKEN_COUNT, 2, 128)
    wanted = np.stack([weight[head].product(x[:, head]) for head in range(2)], axis=1)
    assert same_bits(by_head(weight, x), wanted)


def source_shape(spec: WeightSpec) -> tuple[int, ...]:
    """Return the shape that a checkpoint has of the only source of a weight."""
    heads, *matrix = spec.shape
    if spec.by_head:
        rows, width = matrix if spec.by_head == "outputs" else matrix[::-1]
        heads, matrix = heads * rows, [width]
    return (heads // spec.rows.taken * spec.rows.period if spec.rows else heads, *matrix)


def planned(program: Program, kind: str) -> WeightPlan:
    """Return the weights of a model as the cuda backend has them: kv_b_proj in codes, others in bfloat16."""
    shapes = {spec.sources[0]: source_shape(spec) for spec in program.weights().values()}
    rng, arrays, codes = np.random.default_rng(4), dict[str, np.ndarray](), dict[str, Coded]()
    for name, shape in shapes.items():
        numbers = rng.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) > 1 else np.ones(shape)
        arrays[name] = numbers.astype(ml_dtypes.bfloat16)
        if "kv_b_proj" in name:
            made = coded(shape, **PUBLISHED[kind])
            if made.table == "e4m3":
                made.packed[...] &= 0xBF  # finite
            codes[name] = replace(made, by_row=kind == "w8a8")
    device = cuda_device("cuda-interpreted")
    return plan_weights(device, program, Mixed(arrays, codes), None, all_in("bf16"))


@pytest.mark.parametrize("kind", PUBLISHED)
def test_models(kind: str) -> None:
    """Values are multiplied in codes, keys in bfloat16: nothing is refused, and chunks have the same bits."""
    program = fuse(wide("minicpm3", num_hidden_layers=1, kv_lora_rank=256).program)
    plan, prompts = planned(program, kind), [TOKENS[:9], TOKENS[40:43]]
    kinds = [str(plan.storage[name].kind) for name in plan.storage if "kv_b_proj" in name]
    assert sorted(kinds) == ["bf16", "made"]
    capacity = Capacity([8] * len(program.cache_groups), 16, "bfloat16", 4)
    require_compiled(program, plan.layout, capacity, InterpretedAccelerator())
    weights: Any = load(plan)
    with rounding_to_bf16():
        reference = Paged(program, weights)
        wanted = reference.prefill(reference.sequence(prompts[0]))
    whole = Paged(program, weights, make=interpreted)
    first = whole.prefill(whole.sequence(prompts[0]))
    assert distance(first, wanted) < 1e-2
    parts = Paged(program, weights, block_size=4, make=interpreted, seed=1)
    chunked, _ = in_parts(parts, prompts, [(3, 1, 5), (1, 1, 1)])
    assert same_bits(chunked, first)
