"""Costs against what is really there: bytes of arrays that were read or written, products that were
computed, pairs that a token really depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tiny import CONFIGS, FAMILIES, VOCAB, Dense, Paged, batch_of, load_of, random_weights, tiny

from quire.backends.null import NullBackend
from quire.program import Builder, Cost, Load, Names, Op, Program, WeightSpec
from quire.program.numerics import matmul
from quire.program.ops import (
    Attention,
    DeltaRule,
    Embed,
    Experts,
    Linear,
    SampledRows,
    ShortConvolution,
    Slice,
    StateSpace,
)
from quire.program.ops import experts as experts_module
from quire.program.ops import linear as linear_module
from quire.program.ops.experts import ExpertWeights, Routing
from quire.program.ops.slot_states import States
from quire.program.passes import fuse
from quire.program.program import Run

# (tokens in the cache, tokens to compute) of each row
LOADS = {
    "prompt": [(0, 50)],
    "chunk": [(33, 30)],
    "decode": [(5, 1), (70, 1), (0, 1), (64, 1)],
    "mixed": [(0, 40), (31, 1), (60, 9), (17, 4)],
}


OF_STATES = (ShortConvolution, DeltaRule, StateSpace)


def nbytes(spec: WeightSpec) -> int:
    return 4 * spec.size


class Reads(dict):
    """Weights that note which of them are read."""

    def __init__(self, weights: dict[str, Dense]) -> None:
        super().__init__({name: weight.array for name, weight in weights.items()})
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.add(name)
        return super().__getitem__(name)


class Traced:
    """A program run op by op on one load, with the arrays that each op really touched."""

    def __init__(self, program: Program, rows: list[tuple[int, int]]) -> None:
        self.weights = random_weights(program)
        self.paged = Paged(program, self.weights)
        rng = np.random.default_rng(0)
        tokens = [rng.integers(0, VOCAB, start + count).tolist() for start, count in rows]
        self.sequences = [self.paged.sequence(ids) for ids in tokens]
        for sequence, (start, _) in zip(self.sequences, rows, strict=True):
            if start:
                self.paged.step([(sequence, start)])
        self.rows = [(s, count) for s, (_, count) in zip(self.sequences, rows, strict=True)]
        self.program, self.load = program, load_of(self.rows)
        self.batch = batch_of(self.rows, 16, ids=self.paged.ids)

    def ops(self) -> Iterator[tuple[Op, list[np.ndarray], list[np.ndarray], set[str]]]:
        """Each op after it ran: its inputs, its outputs, the names of the weights it read."""
        reads, values = Reads(self.weights), {}
        run = Run(self.batch, reads, self.paged.backend._caches, self.program.layer_groups)
        for op in self.program:
            reads.read.clear()
            inputs = [values[v.index] for v in op.inputs()]
            result = op.reference(run, *inputs)
            outputs = list(result) if isinstance(result, tuple) else [result]
            values.update(zip((v.index for v in op.outputs()), outputs, strict=True))
            yield op, inputs, outputs, set(reads.read)


@pytest.mark.parametrize("rows", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_those_of_the_arrays(name: str, rows: list[tuple[int, int]]) -> None:
    program = tiny(name).program
    for version in (program, fuse(program)):
        traced = Traced(version, rows)
        for op, inputs, outputs, read in traced.ops():
            cost = op.cost(traced.load, nbytes)
            whole = sum(array.nbytes for array in (*inputs, *outputs))
            gathers = isinstance(op, Slice | SampledRows)
            assert cost.activation_bytes == (2 * outputs[0].nbytes if gathers else whole)
            assert {w.name for w in op.weights()} == read
            if isinstance(op, Embed):
                assert cost.weight_bytes == outputs[0].nbytes
            elif not isinstance(op, Experts):
                assert cost.weight_bytes == sum(traced.weights[n].nbytes for n in read)


def test_a_step_that_reads_everything_reads_the_whole_checkpoint() -> None:
    """As many tokens as the vocabulary has, each its own row of the table: every weight once."""
    program = tiny("llama").program
    weights = random_weights(program)
    cost = program.cost(Load(((0, VOCAB),), 1), lambda spec: weights[spec.name].nbytes)
    assert cost.weight_bytes == sum(weight.nbytes for weight in weights.values())


def sees(op: Attention, position: int, other: int) -> bool:
    window = op.window or position + 1
    if op.chunked:
        return other // window == position // window
    return 0 <= position - other < window


@pytest.mark.parametrize("rows", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_the_products_that_were_computed(
    name: str, rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = 0

    def counting(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        nonlocal done
        done += len(x) * weight.size
        return matmul(x, weight)

    monkeypatch.setattr(linear_module, "matmul", counting)
    monkeypatch.setattr(experts_module, "matmul", counting)
    traced = Traced(tiny(name).program, rows)
    for op, _, _, _ in traced.ops():
        if isinstance(op, Experts):
            inner, hidden = op.experts.up.shape[-2:]
            pairs = traced.load.num_tokens * op.routing.chosen  # of a token and an expert
            each = 5 if op.experts.gate else 4
            assert op.flops(traced.load) == 2 * done + pairs * (each * inner + 2 * hidden)
        elif isinstance(op, Linear):
            assert op.flops(traced.load) == 2 * done
        elif isinstance(op, Attention):
            pairs = sum(
                sum(sees(op, p, other) for other in range(p + 1))
                for start, count in rows
                for p in range(start, start + count)
            )
            heads, dim = op.q.shape
            assert op.flops(traced.load) == 2 * pairs * heads * (dim + op.v.shape[-1])
        done = 0


@pytest.mark.parametrize("name", CONFIGS)
def test_fusing_keeps_flops_and_saves_bytes(name: str) -> None:
    program = tiny(name).program
    load = Load(tuple(LOADS["mixed"]), 2)
    before, after = program.cost(load, nbytes), fuse(program).cost(load, nbytes)
    assert replace(before, activation_bytes=0) == replace(after, activation_bytes=0)
    fewer = len(fuse(program).ops) < len(program.ops)
    assert (after.activation_bytes < before.activation_bytes) == fewer


# The cache


def attention(window: int | None) -> tuple[Attention, Program]:
    b = Builder()
    x = b.embed(Names("e"), VOCAB, 8)
    q, k, v = (b.linear(x, Names(n), (heads, 4)) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    program = b.program(b.sampled_rows(b.attention(q, k, v, window=window)))
    return next(op for op in program if isinstance(op, Attention)), program


@np.errstate(invalid="ignore")
@pytest.mark.parametrize("window", [None, 1, 5, 16, 70])
@pytest.mark.parametrize("rows", [[(0, 9)], [(20, 1)], [(12, 7)], [(64, 3)], [(0, 2), (30, 1)]], ids=str)
def test_kv_bytes_are_what_a_row_depends_on(window: int | None, rows: list[tuple[int, int]]) -> None:
    """A position is read when NaN there shows in the output; a slot is written when it changes."""
    op, program = attention(window)
    token_bytes, read = 2 * 2 * 4 * 4, sum(count for _, count in rows)
    for i, (start, _) in enumerate(rows):
        for position in range(start):
            traced = Traced(program, rows)
            block = traced.sequences[i].blocks[position // 16]
            for part in traced.paged.backend._caches[0]:
                part[block, position % 16] = np.nan
            read += any(np.isnan(out).any() for _, _, (out, *_), _ in traced.ops())
    traced = Traced(program, rows)
    assert op.kv_bytes(traced.load)[0] == token_bytes * read

    for part in traced.paged.backend._caches[0]:
        part[:] = np.inf
    list(traced.ops())
    written = sum(np.isfinite(part).sum() * part.itemsize for part in traced.paged.backend._caches[0])
    assert op.kv_bytes(traced.load)[1] == written


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_kv_token_bytes_are_those_of_the_cache(name: str, dtype: str) -> None:
    program = tiny(name).program
    paged = Paged(program, random_weights(program), kv_cache_dtype=dtype)
    arrays = [part for layer in paged.backend._caches if not isinstance(layer, States) for part in layer]
    itemsize = arrays[0].itemsize
    per_token = sum(part.nbytes for part in arrays) / (paged.num_blocks * paged.block_size)
    assert program.kv_token_bytes(itemsize) == per_token
    load = Load(((7, 3), (0, 2)), 0, itemsize)
    written = sum(op.kv_bytes(load)[1] for op in program if not isinstance(op, OF_STATES))
    assert written == 5 * per_token


def test_scales_of_a_quantized_cache_are_counted() -> None:
    """One float32 for each token and head, for keys and for values: of two heads 16 bytes a token."""
    op, program = attention(20)
    load = Load(((30, 2), (0, 5)), 7, 1)
    plain, scaled = op.kv_bytes(load), op.kv_bytes(replace(load, kv_scale_bytes=4))
    assert [number - other for number, other in zip(scaled, plain, strict=True)] == [16 * (21 + 5), 16 * 7]
    assert scaled[1] == 7 * program.kv_token_bytes(1, 4)


# Experts


def experts_of(count: int, chosen: int) -> Experts:
    def spec(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(name, (count, *shape), (name,))

    b = Builder()
    x = b.embed(Names("e"), VOCAB, 8)
    weights = ExpertWeights(
        spec("gate", 6, 8), spec("up", 6, 8), spec("down", 8, 6), spec("gb", 6), spec("ub", 6), spec("db", 8)
    )
    scores = b.linear(x, Names("router"), count)
    op = b.program(b.experts(x, scores, weights, routing=Routing(chosen))).ops[-1]
    assert isinstance(op, Experts)
    return op


def test_one_expert_costs_what_the_ops_it_is_made_of_would() -> None:
    b, load = Builder(), Load(((0, 7),), 1)
    x = b.embed(Names("e"), VOCAB, 8)
    inner = b.gated_activation(b.linear(x, Names("g"), 6), b.linear(x, Names("u"), 6), "silu")
    program = b.program(b.add(x, b.scale(b.linear(inner, Names("d"), 8), 0.5)))
    assert experts_of(4, 1).flops(load) == program.cost(load, nbytes).flops
    assert experts_of(4, 3).flops(load) == 3 * experts_of(4, 1).flops(load)


@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (32, 4), (60, 1), (4, 4)])
@pytest.mark.parametrize("tokens", [1, 3, 20, 100])
def test_expert_bytes_are_the_mean_of_random_routing(count: int, chosen: int, tokens: int) -> None:
    op = experts_of(count, chosen)
    rng = np.random.default_rng([count, tokens])
    one = sum(nbytes(w) for w in op.weights()) / count
    touched = np.array(
        [
            len(np.unique(op.routing.shares(rng.standard_normal((tokens, count)).astype(np.float32))[0]))
            for _ in range(400)
        ]
    )
    expected = op.weight_bytes(Load(((0, tokens),), 1), nbytes) / one
    error = touched.std() / np.sqrt(len(touched))
    assert abs(touched.mean() - expected) <= 4 * error + 1e-3


def test_one_token_reads_its_chosen_experts() -> None:
    op = experts_of(16, 3)
    one = sum(nbytes(w) for w in op.weights()) / 16
    assert op.weight_bytes(Load(((40, 1),), 1), nbytes) == pytest.approx(3 * one)
    assert op.weight_bytes(Load(((0, 4000),), 1), nbytes) == pytest.approx(16 * one)


def test_experts_that_a_batch_touches_are_the_bytes_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expectation is of what the reference really reads: here every choice is counted."""
    op = experts_of(8, 2)
    touched: list[int] = []
    original = Experts._expert

    def noting(self: Experts, run: Run, expert: int, x: np.ndarray) -> np.ndarray:
        touched.append(expert)
        return original(self, run, expert, x)

    monkeypatch.setattr(Experts, "_expert", noting)
    rng = np.random.default_rng(0)
    weights = {w.name: rng.standard_normal(w.shape).astype(np.float32) for w in op.weights()}
    x, scores = (rng.standard_normal((3, 8)).astype(np.float32) for _ in range(2))
    op.reference(Run(None, weights), x, scores)
    assert sorted(touched) == np.unique(op.routing.shares(scores)[0]).tolist()


# The null backend


@pytest.mark.parametrize("name", FAMILIES)
def test_the_null_backend_sums_the_costs_of_its_batches(name: str) -> None:
    program = fuse(tiny(name).program)
    backend, total = NullBackend(program, nbytes, 2, 16), Cost()
    for rows in LOADS.values():
        traced = Traced(program, rows)
        logits = backend.execute(traced.batch)
        assert logits.shape == (traced.load.num_logits, VOCAB)
        assert not logits.any()
        total += program.cost(replace(traced.load, kv_itemsize=2), nbytes)
    assert backend.cost == total
    assert backend.cost.bytes > 0


def test_costs_add_up() -> None:
    cost = Cost(1, 2, 3, 4, 5) + Cost(10, 20, 30, 40, 50)
    assert cost == Cost(11, 22, 33, 44, 55)
    assert cost.bytes == 22 + 33 + 44 + 55
