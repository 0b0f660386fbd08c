"""Compressed attention: against formulas in float64, and the bits of each row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Paged, random_weights, same_bits

from quire.backends.cuda.refused import require_kernels
from quire.errors import ConfigError
from quire.models.compressed import choose_entries, compress, compressed_attention
from quire.program import Builder, Load, Names, PagedInputs, PagedVectors, Program, Value
from quire.program.caches import block_bytes
from quire.program.ops import ChoosePositions, Compress, CompressedAttention
from quire.program.rope import Rope

E = Names("e")


@dataclass(frozen=True)
class Shape:
    every: int
    overlapping: bool = False
    number: int = 0  # of chosen entries; 0: tokens attend to all
    heads: int = 3
    dim: int = 6
    window: int = 9
    index_heads: int = 4
    index_dim: int = 2
    entries: bool = True

    @property
    def widths(self) -> dict[str, tuple[int, ...]]:
        """Of what a token gives to the ops."""
        features = 2 if self.overlapping else 1
        found: dict[str, tuple[int, ...]] = {"q": (self.heads, self.dim), "k": (1, self.dim)}
        if self.entries:
            found["values"] = found["gates"] = (features * self.dim,)
        if self.number:
            found["index_q"], found["factors"] = (self.index_heads, self.index_dim), (self.index_heads,)
            found["index_values"] = found["index_gates"] = (features * self.index_dim,)
        return found


def record(shape: Shape, b: Builder, given: dict[str, Value]) -> Value:
    """Attention with entries made of the values of tokens, without norms and rotations."""

    def entries(of: str) -> Value:
        values, gates = given[of + "values"], given[of + "gates"]
        return compress(b, values, gates, E / (of + "bias"), shape.every, overlapping=shape.overlapping)

    made = entries("") if shape.entries else None
    chosen = None
    if shape.number:
        keys = entries("index_")
        chosen = choose_entries(b, given["index_q"], given["factors"], keys, shape.every, shape.number)
    how = {"window": shape.window, "scale": 0.7, "sinks": E / "sinks", "chosen": chosen}
    return compressed_attention(b, given["q"], given["k"], made, shape.every, **how)


def program(shape: Shape, tokens: int) -> Program:
    """The inputs of a token are the row of its id."""
    b, first, given = Builder(), 0, {}
    x = b.embed(E, tokens, sum(int(np.prod(width)) for width in shape.widths.values()))
    for name, width in shape.widths.items():
        given[name] = b.slice(x, first, width)
        first += given[name].width
    return b.program(record(shape, b, given))


def parts(shape: Shape, table: np.ndarray) -> dict[str, np.ndarray]:
    ends = np.cumsum([int(np.prod(width)) for width in shape.widths.values()])
    split = np.split(table, ends[:-1], axis=1)
    return {
        name: part.reshape(len(table), *width)
        for part, (name, width) in zip(split, shape.widths.items(), strict=True)
    }


def entries_of(shape: Shape, values: np.ndarray, gates: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """All complete entries: one by one, by the definition."""
    found, dim = [], values.shape[1] // (2 if shape.overlapping else 1)
    for first in range(0, len(values) - shape.every + 1, shape.every):
        terms = [(at, -dim) for at in range(first, first + shape.every)]
        if shape.overlapping and first:
            terms += [(at, 0) for at in range(first - shape.every, first)]
        own = [(at, slice(begin, begin + dim or None)) for at, begin in terms]
        weights = np.exp([gates[at, some] + bias[at % shape.every, some] for at, some in own])
        sums = sum(w * values[at, some] for w, (at, some) in zip(weights, own, strict=True))
        found.append(sums / weights.sum(axis=0))
    return np.array(found).reshape(-1, dim)


def expected(shape: Shape, table: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    of = parts(shape, table.astype(np.float64))
    made, keys = np.zeros((0, shape.dim)), np.zeros((0, shape.index_dim))
    if shape.entries:
        made = entries_of(shape, of["values"], of["gates"], weights["e.bias"])
    if shape.number:
        keys = entries_of(shape, of["index_values"], of["index_gates"], weights["e.index_bias"])
    out = np.empty(of["q"].shape)
    for token in range(len(table)):
        seen = list(range((token + 1) // shape.every)) if shape.entries else []
        if shape.number and len(seen) > shape.number:
            scores = of["factors"][token] @ np.maximum(0, of["index_q"][token] @ keys[seen].T)
            seen = sorted(sorted(seen, key=lambda e, s=scores: (-s[e], e))[: shape.number])
        context = np.concatenate([of["k"][max(0, token + 1 - shape.window) : token + 1, 0], made[seen]])
        scores = np.exp(0.7 * of["q"][token] @ context.T)
        total = scores.sum(axis=-1, keepdims=True) + np.exp(weights["e.sinks"])[:, None]
        out[token] = scores / total @ context
    return out


def draw(shape: Shape, tokens: int, seed: int = 0) -> np.ndarray:
    width = sum(int(np.prod(each)) for each in shape.widths.values())
    return np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)


def computed(
    shape: Shape, table: np.ndarray, chunks: tuple[int, ...] = (), **how: object
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """What tokens get, and the weights they got it with."""
    made = program(shape, len(table))
    weights = random_weights(made)
    weights["e.weight"].array[...] = table
    paged = Paged(made, weights, **how)
    found = paged.prefill(paged.sequence(range(len(table))), chunks)
    kept = {name: weight.array for name, weight in weights.items()}
    return found.reshape(len(table), shape.heads, shape.dim), kept


SHAPES = st.builds(
    Shape,
    st.sampled_from([1, 2, 4, 16, 32]),
    st.booleans(),
    st.integers(0, 12),
    window=st.integers(1, 80),
)


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(1, 100), st.integers(0, 99))
def test_attention_to_a_window_and_entries(shape: Shape, tokens: int, seed: int) -> None:
    table = draw(shape, tokens, seed)
    found, weights = computed(shape, table)
    np.testing.assert_allclose(found, expected(shape, table, weights), rtol=1e-4, atol=1e-4)


def test_attention_to_a_window_alone() -> None:
    shape = Shape(0, entries=False, window=70)
    table = draw(shape, 150)
    found, weights = computed(shape, table)
    np.testing.assert_allclose(found, expected(shape, table, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [Shape(4, True, 5), Shape(4, True), Shape(16), Shape(64)], ids=str)
def test_bits_are_equal_in_any_chunks_and_blocks(shape: Shape, dtype: str) -> None:
    table = draw(shape, 150)
    whole, _ = computed(shape, table, kv_cache_dtype=dtype)
    for block_size, chunks in ((8, (1,) * 150), (16, (63, 1, 1, 70)), (64, (7, 64)), (4, (1, 2, 3, 5))):
        how = {"block_size": block_size, "kv_cache_dtype": dtype}
        assert same_bits(computed(shape, table, chunks, **how)[0], whole), chunks


def test_what_rejected_tokens_wrote_is_written_again() -> None:
    """Drafts that were computed beyond the end, and then other tokens in their places."""
    shape = Shape(4, True, 5)
    table = draw(shape, 120)
    whole, _ = computed(shape, table)
    made = program(shape, 120)
    weights = random_weights(made)
    weights["e.weight"].array[...] = table
    paged = Paged(made, weights)
    sequence = paged.sequence([*range(70), *range(100, 115)])
    paged.step([(sequence, 70)])
    paged.step([(sequence, 15)])
    sequence.computed = 70
    sequence.token_ids[70:] = list(range(70, 85))
    (found,) = paged.step([(sequence, 15)])
    assert same_bits(found.reshape(15, shape.heads, shape.dim), whole[70:85])


@np.errstate(invalid="ignore")
def test_a_token_that_is_not_finite_reaches_those_who_see_it() -> None:
    shape = Shape(4, True, window=3)
    table = draw(shape, 60)
    clean, _ = computed(shape, table)
    for name, first, last in (("k", 20, 23), ("values", 23, 60), ("gates", 23, 60)):
        for lost in (np.nan, np.inf):
            spoiled = table.copy()
            parts(shape, spoiled)[name].reshape(60, -1)[20, -1] = lost  # it ends the entry of 20 to 23
            found, _ = computed(shape, spoiled)
            assert np.isnan(found[first:last]).all(), (name, lost)
            rest = (np.delete(x, np.s_[first:last], 0) for x in (found, clean))
            assert same_bits(*rest), (name, lost)


def test_entries_rotate_as_their_first_tokens_do() -> None:
    rope = Rope(4, 100.0, interleaved=True)
    positions, variants = np.arange(3, 20), np.zeros(17, np.int64)
    for found, plain in zip(
        replace(rope, behind=3).cos_sin(positions, variants),
        rope.cos_sin(positions - 3, variants),
        strict=True,
    ):
        assert same_bits(found, plain)


def test_bytes_of_blocks() -> None:
    """Entries of a block lie together; one that stands for several blocks takes the last of them."""
    assert block_bytes(PagedVectors(8), 16, 2) == 16 * 16
    assert block_bytes(PagedVectors(8, 4), 16, 2) == 4 * 16
    assert block_bytes(PagedVectors(8, 4), 16, 1, 4) == 4 * 12
    assert block_bytes(PagedVectors(8, 128), 16, 2) == 16
    assert block_bytes(PagedInputs(8, 4), 16, 1, 4) == 16 * 32
    with pytest.raises(ConfigError, match="entries of 4 tokens do not fit into blocks of 6"):
        block_bytes(PagedVectors(8, 4), 6, 2)


@pytest.mark.parametrize("shape", [Shape(4, True, 5), Shape(0, entries=False)], ids=str)
def test_the_cuda_backend_refuses_it_by_name(shape: Shape) -> None:
    words = "compressed attention" if shape.entries else "attention to vectors that are keys and values"
    with pytest.raises(ConfigError, match=f"the cuda backend has no kernels for {words}"):
        require_kernels(program(shape, 9), {})


def test_shapes_are_checked() -> None:
    b = Builder()
    q, k, w = (b.value(shape) for shape in ((2, 6), (1, 6), (1, 5)))
    with pytest.raises(ConfigError, match="cannot become entries"):
        compress(b, k, w, E, 4)
    with pytest.raises(ConfigError, match="cannot become entries"):
        compress(b, w, w, E, 4, overlapping=True)
    with pytest.raises(ConfigError, match="shapes differ"):
        compressed_attention(b, q, w, window=4, scale=1.0)
    with pytest.raises(ConfigError, match="shapes differ"):
        compressed_attention(b, q, k, w, 4, window=4, scale=1.0)
    with pytest.raises(ConfigError, match="shapes differ"):
        choose_entries(b, q, b.value((3,)), k, 4, 5)


def test_costs() -> None:
    shape = Shape(4, True, 5, window=7)
    made = program(shape, 9)
    make, _, choose, attend = (
        op for op in made if isinstance(op, Compress | ChoosePositions | CompressedAttention)
    )
    load = Load(((0, 4), (8, 8), (40, 1)), 1, 2)
    assert made.caches == (
        PagedInputs(24, 8),
        PagedInputs(8, 8),
        PagedVectors(2, 4),
        PagedVectors(6, window=7),
        PagedVectors(6, 4),
    )
    assert make.kv_bytes(load) == (13 * 24 * 4, 13 * 24 * 4)
    assert make.flops(load) == 5 * 13 * 12
    beyond = 41  # positions of a token that sees more than 5 entries: the only one
    assert choose.flops(load) == 2 * beyond / 4 * 4 * (2 + 1)
    assert choose.flops(Load(((20, 3),), 0, 2)) == choose.kv_bytes(Load(((20, 3),), 0, 2))[0] == 0
    assert choose.kv_bytes(load) == (beyond / 4 * 4, 13 / 4 * 4)
    pairs = 1 + 2 + 3 + 4 + 8 * 7 + 7 + (1 + 2 + 3 + 4 + sum(range(9, 17)) + 20) / 4
    assert attend.flops(load) == 2 * pairs * 2 * 18
    assert attend.kv_bytes(load) == (12 * (4 + 14 + 7) + 3 * (4 + 16 + 20), 12 * 13 + 3 * 13)
