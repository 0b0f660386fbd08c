"""Passes: fusing changes no bit of any model, and planned buffers never hold two values at once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tiny import CONFIGS, VOCAB, Paged, Sequence, batch_of, load_of, random_weights, same_bits, tiny

from quire.program import Builder, Load, Names, Program
from quire.program.ops import Add, AddNorm, GatedActivation, GatedLinear, LayerNorm, Linear, RMSNorm
from quire.program.passes import fuse, plan_buffers
from quire.program.program import Run

W = Names("w")
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 70).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_fusing_changes_no_bit(name: str) -> None:
    program = tiny(name).program
    weights = random_weights(program)
    outs = [Paged(p, weights) for p in (program, fuse(program))]
    plain, fused = (paged.prefill(paged.sequence(TOKENS), [33]) for paged in outs)
    assert same_bits(fused, plain)


def kinds(program: Program) -> Counter[type]:
    return Counter(type(op) for op in program)


def test_what_is_fused() -> None:
    """Of two layers: four sums, the last one read by the choice of rows; two gated projections."""
    fused = kinds(fuse(tiny("llama").program))
    assert (fused[AddNorm], fused[Add], fused[RMSNorm]) == (3, 1, 2)
    assert (fused[GatedLinear], fused[GatedActivation], fused[Linear]) == (2, 0, 11)
    gpt2 = kinds(fuse(tiny("gpt2").program))
    assert (gpt2[AddNorm], gpt2[Add], gpt2[LayerNorm]) == (4, 1, 1)
    assert kinds(fuse(tiny("llama-mqa-bias").program))[GatedLinear] == 0
    assert kinds(fuse(tiny("phi3").program))[GatedLinear] == 0


def test_fusing_keeps_weights_layers_and_output() -> None:
    for name in CONFIGS:
        program = tiny(name).program
        fused = fuse(program)
        assert fused.weights() == program.weights()
        assert (fused.output, fused.caches) == (program.output, program.caches)
        assert fuse(fused).ops == fused.ops


def test_a_projection_that_others_read_is_kept() -> None:
    b = Builder()
    x = b.embed(W / "e", 4, 6)
    gate, up = b.linear(x, W / "gate", 5), b.linear(x, W / "up", 5)
    read_twice = b.program(b.add(b.gated_activation(gate, up, "silu"), gate))
    assert kinds(fuse(read_twice))[GatedLinear] == 0
    b = Builder()
    x = b.embed(W / "e", 4, 6)
    gate, up = b.linear(x, W / "gate", 5), b.linear(x, W / "up", 5)
    b.gated_activation(gate, up, "silu")
    assert kinds(fuse(b.program(gate)))[GatedLinear] == 0


def test_projections_of_two_inputs_are_kept() -> None:
    b = Builder()
    x = b.embed(W / "e", 4, 6)
    gate, up = b.linear(x, W / "gate", 5), b.linear(b.scale(x, 2.0), W / "up", 5)
    assert kinds(fuse(b.program(b.gated_activation(gate, up, "silu"))))[GatedLinear] == 0


def test_a_sum_that_is_also_a_gate_is_kept() -> None:
    b = Builder()
    x = b.embed(W / "e", 4, 6)
    total = b.add(x, b.scale(x, 2.0))
    normed = b.rms_norm(total, W / "norm", 1e-5)
    fused = fuse(b.program(b.gated_activation(total, normed, "silu")))
    assert kinds(fused)[AddNorm] == 1
    assert kinds(fused)[GatedActivation] == 1


def lives(program: Program) -> dict[int, tuple[int, int]]:
    """Value -> (number of the op that writes it, number of the last op that needs it), found by search."""
    found = {}
    for i, op in enumerate(program.ops):
        for value in op.outputs():
            readers = [j for j, other in enumerate(program.ops) if value in other.inputs()]
            end = len(program.ops) if value == program.output else max([i, *readers])
            found[value.index] = (i, end)
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_two_living_values_share_a_buffer(name: str, fused: bool) -> None:
    program = fuse(tiny(name).program) if fused else tiny(name).program
    plan, life = plan_buffers(program), lives(program)
    assert plan.last_use == {index: end for index, (_, end) in life.items()}
    values = {v.index: v for op in program for v in op.outputs()}
    assert set(plan.buffer) == set(values)
    for a, (a_from, a_to) in life.items():
        count, row_bytes = plan.sizes[plan.buffer[a]]
        assert count == values[a].count
        assert row_bytes == 4 * values[a].width  # rows of both lie at the same places
        for b, (b_from, _) in life.items():
            if a != b and plan.buffer[a] == plan.buffer[b]:
                assert not a_from <= b_from <= a_to
    load = Load(((0, 100),), 3)
    total = sum(4 * load.size(v.count) * v.width for v in values.values())
    widest = max(v.width for v in values.values())
    assert plan.nbytes(load) == sum(load.size(count) * row_bytes for count, row_bytes in plan.sizes)
    assert 4 * load.num_tokens * widest <= plan.nbytes(load) < 0.6 * total


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_in_the_planned_buffers_gives_the_same_bits(name: str) -> None:
    """Every value really written into its buffer, which still holds what was there before."""
    program = fuse(tiny(name).program)
    weights = random_weights(program)
    paged = Paged(program, weights)
    expected = paged.prefill(paged.sequence(TOKENS))

    plan = plan_buffers(program)
    batch = batch_of([(Sequence(TOKENS, list(range(5))), len(TOKENS))], 16)
    load = load_of([(Sequence(TOKENS, []), len(TOKENS))])
    memory = [np.full(load.size(count) * size // 4, np.nan, np.float32) for count, size in plan.sizes]
    caches = Paged(program, weights, num_blocks=5).backend._caches
    run = Run(batch, {n: w.array for n, w in weights.items()}, caches, (0,) * len(caches))
    for op in program:
        views = {}
        for v in (*op.inputs(), *op.outputs()):
            shape = (load.size(v.count), *v.shape)
            views[v.index] = memory[plan.buffer[v.index]][: np.prod(shape)].view(v.dtype).reshape(shape)
        result = op.reference(run, *(views[v.index].copy() for v in op.inputs()))
        results = result if isinstance(result, tuple) else (result,)
        for value, array in zip(op.outputs(), results, strict=True):
            assert array.dtype == value.dtype
            views[value.index][...] = array
    logits = memory[plan.buffer[program.output.index]][: expected.size].reshape(expected.shape)
    assert same_bits(logits, expected)
