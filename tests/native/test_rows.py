"""Ops on whole rows, of models that give vectors, against their reference twins on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from lowered import ISAS, OneOp, distance
from tiny import Dense, same_bits

from quire.models.pooling import attend_both, embed_segments, pool
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops.attention import Distances

LENGTHS = (150, 1, 65, 64, 20)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def attention(
    heads: int = 4,
    groups: int = 2,
    dim: int = 8,
    value_dim: int = 8,
    reach: int | None = None,
    alone: slice | None = None,
    longest: int | None = None,
) -> OneOp:
    """Of texts of these lengths, or of one of them alone."""
    sizes = ((heads, dim), (groups, dim), (groups, value_dim))
    inputs = [2 * draw(sum(LENGTHS), *size, seed=i) for i, size in enumerate(sizes)]

    def record(b: Builder, q: Value, k: Value, v: Value) -> Value:
        distances = None
        if longest is not None:
            distances = Distances(WeightSpec("distances", (32, heads), ("distances",)), longest)
        return attend_both(b, q, k, v, reach, biases=distances)

    op = OneOp(inputs, record, LENGTHS) if alone is None else OneOp([x[alone] for x in inputs], record)
    if longest is not None:
        op.weights["distances"] = Dense(draw(32, heads))
    return op


SHAPES = [
    {},
    {"heads": 3, "groups": 3, "dim": 5},
    {"heads": 12, "groups": 12, "dim": 32, "value_dim": 32},
    {"heads": 6, "groups": 1, "dim": 17, "value_dim": 3},
    {"reach": 1},
    {"reach": 64},
    {"reach": 20, "dim": 33},
    {"reach": 500},
    {"longest": 150},
    {"longest": 512, "heads": 3, "groups": 1},
    {"longest": 200, "reach": 30, "heads": 6, "groups": 6},
]


@pytest.mark.parametrize("isa", ISAS)
def test_attention_on_both_sides(isa: str) -> None:
    for shape in SHAPES:
        op = attention(**shape)
        assert distance(op.native(isa), op.reference()) < 3e-6, shape


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("reach", "longest"), [(None, None), (30, None), (None, 160)])
def test_a_text_has_its_bits_alone_and_with_any_number_of_threads(
    reach: int | None, longest: int | None, isa: str
) -> None:
    op = attention(reach=reach, longest=longest)
    whole = op.native(isa, threads=3)
    first = 0
    for length in LENGTHS:
        rows = slice(first, first + length)
        assert same_bits(attention(reach=reach, longest=longest, alone=rows).native(isa), whole[rows]), length
        first += length


@pytest.mark.parametrize("isa", ISAS)
def test_a_text_of_several_segments(isa: str) -> None:
    for reach in (None, 64, 530):
        inputs = [draw(1100, 2, 8, seed=i) for i in range(3)]
        op = OneOp(inputs, lambda b, q, k, v, reach=reach: attend_both(b, q, k, v, reach), (1100,))
        found = op.native(isa)
        assert distance(found, op.reference()) < 3e-6, reach
        assert same_bits(op.native(isa, threads=3), found), reach


@pytest.mark.parametrize("isa", ISAS)
def test_pooled_rows(isa: str) -> None:
    for method, width in (("mean", 7), ("cls", 7), ("mean", 33)):
        op = OneOp([draw(sum(LENGTHS), width)], lambda b, x, m=method: pool(b, x, m), LENGTHS)
        assert same_bits(op.native(isa), op.reference()), (method, width)


@pytest.mark.parametrize("isa", ISAS)
def test_segments_begin_after_separators(isa: str) -> None:
    """OneOp numbers the tokens of all rows: 5 and 9 are in the first row, 155 in the third."""
    for count, separator in ((2, 5), (2, 155), (1, 5), (2, -1)):

        def record(b: Builder, x: Value, count: int = count, separator: int = separator) -> Value:
            return b.add(x, embed_segments(b, Names("segments"), count, 6, separator))

        op = OneOp([draw(sum(LENGTHS), 6)], record, LENGTHS)
        found = op.native(isa)
        assert same_bits(found, op.reference()), (count, separator)
        second = np.zeros(sum(LENGTHS), bool)
        if count > 1 and separator == 5:
            second[6:150] = True
        elif count > 1 and separator == 155:
            second[156:216] = True
        table = op.weights["segments.weight"].array
        expected = op.table + np.where(second[:, None], table[-1], table[0])
        np.testing.assert_allclose(found, expected, rtol=1e-6)
