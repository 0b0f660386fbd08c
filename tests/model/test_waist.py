"""Programs of kinds to come, made of ops that are defined here: they pass through Step, Batch and Program as
these are, and run on the reference and the null backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from driver import ALL, Driver
from seeing import seeing
from tiny import VOCAB, Dense, random_weights, tiny

from quire.backends.backend import GetMasks
from quire.backends.null import NullBackend
from quire.backends.reference import ReferenceBackend
from quire.backends.slots import Deferred, Slots
from quire.program import Builder, Load, Names, Op, PagedKV, PagedLatent, Program, Value, WeightSpec
from quire.program.batch import Batch
from quire.program.numerics import matmul
from quire.program.ops import Attention
from quire.program.program import Run
from quire.types import RowResult, Step, StepResult

W = Names("w")
TEXTS = [np.random.default_rng(i).integers(0, VOCAB, n).tolist() for i, n in enumerate((70, 1, 23, 40))]
Inputs = np.ndarray


def reference(program: Program, weights: Mapping[str, Dense] | None = None) -> ReferenceBackend:
    held = random_weights(program) if weights is None else weights
    num_blocks = [64] * len(program.cache_groups)
    return ReferenceBackend(program, held, num_blocks=num_blocks, block_size=16)


def null(program: Program) -> NullBackend:
    return NullBackend(program, lambda spec: 4 * spec.size, 4, 16)


def rows(batch: Batch) -> list[slice]:
    """The tokens of each row."""
    return [slice(*pair) for pair in pairwise(batch.row_offsets.tolist())]


def run(program: Program, texts: list[list[int]], weights: Any = None, chunk: int = 99, **more: Any) -> list:
    """The log-probabilities of all positions of texts that are computed together, and four tokens more."""
    driver = Driver(program, reference(program, weights))
    sequences = [driver.admit(i, text, **{k: v[i] for k, v in more.items()}) for i, text in enumerate(texts)]
    lengths = {i: len(text) + 4 for i, text in enumerate(texts)}
    while left := [c for c in sequences if len(c.tokens) < lengths[c.slot]]:
        driver.step(*((c, min(chunk, len(c.tokens) - c.computed)) for c in left))
    return [sequence.scores() for sequence in sequences]


# Vectors and scores as results, of rows that are computed whole and keep nothing


@dataclass(frozen=True, slots=True)
class RowAttention(Op):
    """out[t] = softmax(q[t] K^T / sqrt(dim)) V over all tokens of the row, [T, heads, dim] each."""

    q: Value
    k: Value
    v: Value

    def flops(self, load: Load) -> float:
        return 4 * self.q.width * sum(count**2 for _, count in load.rows)

    def reference(self, run: Run, *inputs: Inputs) -> np.ndarray:
        out = np.empty_like(inputs[0])
        for tokens in rows(run.batch):
            q, k, v = (x[tokens].transpose(1, 0, 2) for x in inputs)
            scores = q @ k.transpose(0, 2, 1) / np.float32(self.q.shape[1] ** 0.5)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[tokens] = (weights / weights.sum(axis=-1, keepdims=True) @ v).transpose(1, 0, 2)
        return out


@dataclass(frozen=True, slots=True)
class Pool(Op):
    """out[r] = one vector for each row: of its first or last token, or the mean, as its admission says."""

    x: Value

    def flops(self, load: Load) -> float:
        return load.num_tokens * self.x.width

    def reference(self, run: Run, *inputs: Inputs) -> np.ndarray:
        batch = run.batch
        ways = {"cls": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.mean(axis=0)}
        asked = zip(rows(batch), batch.admissions, strict=True)
        return np.stack([ways[admission.pooling](inputs[0][tokens]) for tokens, admission in asked])


def encoder(score: bool = False) -> Program:
    b = Builder()
    x = b.embed(W / "e", VOCAB, 8)
    q, k, v = (b.linear(x, W / name, (2, 4)) for name in "qkv")
    x = b.add(x, b.linear(b.record(RowAttention(b.value((2, 4)), q, k, v)).out, W / "o", 8))
    x = b.record(Pool(b.value((8,), "L"), x)).out
    return b.program(b.linear(x, W / "score", 1) if score else x)


def pooled(backend: Any, texts: list[list[int]], methods: list[str]) -> tuple[RowResult, ...]:
    driver = Driver(backend.program, backend)
    no_scores = replace(ALL, prompt_logprobs=None)
    pairs = enumerate(zip(texts, methods, strict=True))
    sequences = [driver.admit(slot, text, no_scores, pooling=method) for slot, (text, method) in pairs]
    return driver.step(*((sequence, len(sequence.tokens)) for sequence in sequences))


METHODS = ["mean", "last", "cls", "mean"]


def test_a_vector_for_each_row() -> None:
    program = encoder()
    weights = random_weights(program)
    found = pooled(reference(program, weights), TEXTS, METHODS)
    held = {name: weight.array.astype(np.float64) for name, weight in weights.items()}
    for text, method, result in zip(TEXTS, METHODS, found, strict=True):
        x = held["w.e.weight"][text]
        heads = [(x @ held[f"w.{n}.weight"].T).reshape(-1, 2, 4).transpose(1, 0, 2) for n in "qkv"]
        odds = np.exp(heads[0] @ heads[1].transpose(0, 2, 1) / 2)
        mixed = (odds / odds.sum(axis=-1, keepdims=True) @ heads[2]).transpose(1, 0, 2).reshape(-1, 8)
        x = x + mixed @ held["w.o.weight"].T
        expected = {"mean": x.mean(axis=0), "last": x[-1], "cls": x[0]}[method]
        np.testing.assert_allclose(result.vector, expected, rtol=1e-4, atol=1e-5)
        assert (result.token_ids, result.error) == ((), None)
        assert result == pooled(reference(program, weights), [text], [method])[0]


def test_a_score_for_each_row() -> None:
    program = encoder(score=True)
    found = pooled(reference(program), TEXTS, METHODS)
    assert [len(result.vector) for result in found] == [1] * 4
    assert len({result.vector for result in found}) == 4


def test_an_encoder_keeps_nothing_and_is_counted() -> None:
    program = encoder()
    assert program.caches == program.cache_groups == ()
    backend = null(program)
    assert [result.vector for result in pooled(backend, TEXTS, METHODS)] == [(0.0,) * 8] * 4
    lengths = tuple((0, len(text)) for text in TEXTS)
    assert backend.cost == program.cost(Load(lengths, 4), lambda spec: 4 * spec.size)
    assert backend.cost.kv_read_bytes == backend.cost.kv_write_bytes == 0


def test_a_vector_that_is_not_finite_fails_its_row_alone() -> None:
    program = encoder()
    weights = random_weights(program)
    weights["w.e.weight"].array[3] = np.inf
    with np.errstate(invalid="ignore"):
        lost, kept = pooled(reference(program, weights), [[1, 3, 2], [4, 5]], ["last", "last"])
    assert lost.error is not None
    assert (lost.vector, len(kept.vector), kept.error) == ((), 8, None)


# An adapter for each row


@dataclass(frozen=True, slots=True)
class AdapterLinear(Op):
    """out[t] = x[t] weight^T + (x[t] down^T) up^T with the matrices of the adapter that the row names."""

    x: Value
    weight: WeightSpec
    adapters: tuple[tuple[str, WeightSpec, WeightSpec], ...]  # (name, down [rank, in], up [out, rank])

    def weights(self) -> tuple[WeightSpec, ...]:
        return (self.weight, *(spec for _, down, up in self.adapters for spec in (down, up)))

    def flops(self, load: Load) -> float:
        rank = self.adapters[0][1].shape[0]
        return 2 * load.num_tokens * (self.weight.size + rank * (self.x.width + self.out.width))

    def reference(self, run: Run, *inputs: Inputs) -> np.ndarray:
        (x,), out = inputs, matmul(inputs[0], run.weights[self.weight.name])
        named = {name: (down, up) for name, down, up in self.adapters}
        for tokens, admission in zip(rows(run.batch), run.batch.admissions, strict=True):
            if admission.adapter:
                down, up = (run.weights[spec.name] for spec in named[admission.adapter])
                out[tokens] += matmul(matmul(x[tokens], down), up)
        return out


def adapted(b: Builder, x: Value, name: str, out: int) -> Value:
    def spec(part: str, *shape: int) -> WeightSpec:
        return WeightSpec(f"{name}.{part}", shape, (f"{name}.{part}",))

    adapters = [(a, spec(f"{a}.down", 2, x.width), spec(f"{a}.up", out, 2)) for a in ("one", "two")]
    op = AdapterLinear(b.value((out,)), x, spec("weight", out, x.width), tuple(adapters))
    return b.record(op).out


def decoder(first: Value, b: Builder, adapters: bool = False) -> Program:
    """A layer of causal attention over an embedding, with or without adapters."""
    q, k, v = (b.linear(first, W / name, (2, 4)) for name in "qkv")
    mixed = b.attention(q, k, v)
    x = b.add(first, adapted(b, mixed, "w.o", 8) if adapters else b.linear(mixed, W / "o", 8))
    return b.program(b.linear(b.sampled_rows(x), W / "head", VOCAB))


def plain(adapters: bool = False) -> Program:
    b = Builder()
    return decoder(b.embed(W / "e", VOCAB, 8), b, adapters)


def test_rows_of_several_adapters_in_a_batch() -> None:
    """Each row is as if its adapter were the only one, and close to the model with the adapter merged."""
    program = plain(adapters=True)
    weights = random_weights(program)
    names = ["one", "", "two", "one"]
    together = run(program, TEXTS, weights, adapter=names)
    for text, name, found in zip(TEXTS, names, together, strict=True):
        assert found == run(program, [text], weights, chunk=7, adapter=[name])[0]
        held = {n: w.array for n, w in weights.items()}
        delta = held[f"w.o.{name}.up"] @ held[f"w.o.{name}.down"] if name else np.float32(0)
        merged = {**weights, "w.o.weight": Dense(weights["w.o.weight"].array + delta)}
        other = run(plain(), [text], merged)[0]
        for position in range(1, len(text)):
            assert found[position][0].token_id == other[position][0].token_id
            assert found[position][0].logprob == pytest.approx(other[position][0].logprob, abs=1e-4)
    assert len({str(run(program, TEXTS[:1], weights, adapter=[name])) for name in ("one", "two", "")}) == 3


# One latent vector a token


@dataclass(frozen=True, slots=True)
class LatentAttention(Attention):
    """Attention of all heads over one vector a token, which is key and value (k and v are the same)."""

    def kv_bytes(self, load: Load) -> tuple[float, float]:
        return tuple(part / 2 for part in Attention.kv_bytes(self, load))  # type: ignore[return-value]

    def reference(self, run: Run, *inputs: Inputs) -> np.ndarray:
        vectors = run.caches[self.layer][:, :, None]
        return Attention.reference(self, replace(run, caches={self.layer: (vectors, vectors)}), *inputs)


def latent(paged: bool) -> Program:
    b = Builder()
    x = b.embed(W / "e", VOCAB, 8)
    q, c = b.linear(x, W / "q", (3, 8)), b.linear(x, W / "c", (1, 8))
    if paged:
        layer = b.cache(PagedLatent(8, 0))
        mixed = b.record(LatentAttention(b.value((24,)), q, c, c, layer=layer, scale=0.4)).out
    else:
        mixed = b.attention(q, c, c, scale=0.4)
    x = b.add(x, b.linear(mixed, W / "o", 8))
    return b.program(b.linear(b.sampled_rows(x), W / "head", VOCAB))


@pytest.mark.parametrize("chunk", [99, 10])
def test_a_latent_cache_is_half_of_keys_and_values(chunk: int) -> None:
    program, both = latent(paged=True), latent(paged=False)
    assert (program.caches, both.caches) == ((PagedLatent(8, 0),), (PagedKV(1, 8, 8),))
    weights = random_weights(both)
    assert run(program, TEXTS, weights, chunk) == run(both, TEXTS, weights)
    load = Load(((7, 5), (0, 3)), 2)
    costs = [p.cost(load, lambda spec: 0) for p in (program, both)]
    assert [2 * costs[0].kv_read_bytes, 2 * costs[0].kv_write_bytes] == [
        costs[1].kv_read_bytes,
        costs[1].kv_write_bytes,
    ]
    assert 2 * program.kv_token_bytes(2) == both.kv_token_bytes(2)
    held = reference(program, weights)._caches
    assert held[0].nbytes == 64 * 16 * program.kv_token_bytes(4)


# A second program on the same block tables


class Drafting:
    """Two programs behind one Step: the second proposes what may follow, in caches of its own.

    `tables` has for each of its cache groups the group of the first program whose block table it reads.
    """

    name = "drafting"
    length = 3

    def __init__(self, target: ReferenceBackend, drafter: ReferenceBackend, tables: tuple[int, ...]) -> None:
        self._target, self._drafter, self._tables = target, drafter, tables
        self._slots = Slots(VOCAB, 16, len(target.program.cache_groups))
        self.proposed: list[tuple[int, ...]] = []  # of the last step, by row

    def launch(self, step: Step, masks: GetMasks | None = None) -> Deferred:
        return Deferred(lambda: self._run(step, masks))

    def execute(self, batch: Batch) -> np.ndarray:
        return self._target.execute(batch)

    def _run(self, step: Step, masks: GetMasks | None) -> StepResult:
        seen: list[Batch] = []

        def execute(batch: Batch) -> np.ndarray:
            seen.append(batch)
            return self._target.execute(batch)

        result = self._slots.run(step, execute, masks)
        (batch,) = seen
        batch = replace(batch, block_tables=tuple(batch.block_tables[i] for i in self._tables), memo={})
        self._drafter.execute(batch)
        both = zip(step.rows, result.rows, strict=True)
        rejected = np.array([len(row.drafted) + 1 - len(got.token_ids) for row, got in both])
        tokens = np.array([got.token_ids[-1] for got in result.rows])
        self._propose(batch, tokens, batch.context_lens - rejected)
        return result

    def _propose(self, batch: Batch, tokens: np.ndarray, positions: np.ndarray) -> None:
        """Let the second program go on from each row's last token, token by token."""
        proposed, each = [], np.arange(len(tokens) + 1)
        for _ in range(self.length):
            own = {"token_ids": tokens, "positions": positions, "context_lens": positions + 1}
            one = replace(batch, **own, row_offsets=each, logit_rows=each[:-1], memo={})
            tokens, positions = self._drafter.execute(one).argmax(axis=-1), positions + 1
            proposed.append(tokens)
        self.proposed = [tuple(row) for row in np.stack(proposed, axis=1).tolist()]


GREEDY = replace(ALL, prompt_logprobs=None)


def generate(driver: Driver) -> tuple[list[list[int]], int]:
    """Forty tokens after each text, with whatever the backend proposes; and the steps that they took."""
    sequences = [driver.admit(slot, text, GREEDY) for slot, text in enumerate(TEXTS)]
    driver.step(*((sequence, len(sequence.tokens)) for sequence in sequences))
    steps, lengths = 1, [len(text) + 40 for text in TEXTS]
    while any(len(sequence.tokens) < length for sequence, length in zip(sequences, lengths, strict=True)):
        proposed = getattr(driver.backend, "proposed", [()] * len(sequences))
        driver.step(*((sequence, 1, drafts) for sequence, drafts in zip(sequences, proposed, strict=True)))
        steps += 1
    return [sequence.tokens[:length] for sequence, length in zip(sequences, lengths, strict=True)], steps


def test_a_draft_model_on_the_same_block_tables() -> None:
    """Another model proposes, and no output changes; the model itself proposes, and all of it is accepted."""
    program, other = tiny("gemma3").program, tiny("llama").program
    weights = random_weights(program)
    expected, steps = generate(Driver(program, reference(program, weights)))
    assert steps == 40
    drafters = [(reference(program, weights), (0, 1)), (reference(other), (1,))]
    found = []
    for drafter, tables in drafters:
        backend = Drafting(reference(program, weights), drafter, tables)
        driver = Driver(program, backend, ahead=backend.length)
        tokens, steps = generate(driver)
        assert tokens == expected
        found.append(steps)
    assert found[0] == 1 + 10
    assert found[1] > 11


@pytest.mark.parametrize(
    "program",
    [plain(adapters=True), seeing()[0], latent(paged=True)],
    ids=["adapters", "images", "latent"],
)
def test_the_null_backend_counts_them_all(program: Program) -> None:
    backend = null(program)
    driver = Driver(program, backend)
    sequence = driver.admit(0, TEXTS[0], adapter="one")
    driver.step((sequence, 30))
    driver.step((sequence, 40))
    assert sequence.tokens == [*TEXTS[0], 0]
    loads = (Load(((0, 30),), 30), Load(((30, 40),), 40))
    costs = [program.cost(load, lambda spec: 4 * spec.size) for load in loads]
    assert backend.cost == costs[0] + costs[1]
