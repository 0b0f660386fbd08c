"""Ops on whole rows against formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tiny import Paged, random_weights, same_bits

from quire.models.pooling import attend_both
from quire.program import Builder, Load, Names, Program, WeightSpec
from quire.program.ops.attention import Distances

LENGTHS = (70, 1, 23)


def program(reach: int | None, distances: Distances | None = None) -> Program:
    b = Builder()
    x = b.embed(Names("x"), sum(LENGTHS), 4 * 8 + 2 * 8 + 2 * 8)
    q, k, v = (b.slice(x, 0, (4, 8)), b.slice(x, 32, (2, 8)), b.slice(x, 48, (2, 8)))
    return b.program(b.sampled_rows(attend_both(b, q, k, v, reach, biases=distances)))


def bucket(distance: int) -> int:
    """Of 32: T5's, for distances up to 128, in integers."""
    far = abs(distance)
    own = far if far < 8 else min(15, 8 + ((far * far) // 64).bit_length() - 1)
    return own + (16 if distance > 0 else 0)


def test_buckets_of_distances() -> None:
    table = np.arange(64, dtype=np.float32).reshape(32, 2)
    found = Distances(WeightSpec("d", (32, 2), ("d",)), 300).biases(table)
    assert found.shape == (2, 299 + 320)
    assert found[0].tolist() == [2 * bucket(distance) for distance in range(-299, 320)]
    assert (found[1] == found[0] + 1).all()


@pytest.mark.parametrize(
    ("reach", "biased"), [(None, False), (1, False), (3, False), (40, False), (None, True), (3, True)]
)
def test_a_token_sees_both_sides(reach: int | None, biased: bool) -> None:
    of = program(reach, Distances(WeightSpec("d", (32, 4), ("d",)), 70) if biased else None)
    weights = random_weights(of)
    table, first = weights["x.weight"].array.astype(np.float64), 0
    paged = Paged(of, weights)
    rows = [paged.sequence(range(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1]))) for i in range(len(LENGTHS))]
    found = paged.step([(row, len(row.token_ids)) for row in rows])
    for row, own, length in zip(rows, found, LENGTHS, strict=True):
        x = table[first : first + length]
        q, k, v = x[:, :32].reshape(-1, 4, 8), x[:, 32:48].reshape(-1, 2, 8), x[:, 48:].reshape(-1, 2, 8)
        k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(8)
        if biased:
            biases = weights["d"].array
            scores += [
                [[biases[bucket(j - i), head] for j in range(length)] for i in range(length)]
                for head in range(4)
            ]
        apart = np.abs(np.arange(length)[:, None] - np.arange(length))
        scores[:, apart > (length if reach is None else reach)] = -np.inf
        odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
        odds /= odds.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(own, np.einsum("hts,shd->thd", odds, v).reshape(length, -1), atol=2e-6)
        again = Paged(of, weights)
        assert same_bits(again.prefill(again.sequence(row.token_ids)), own)
        first += length


@pytest.mark.parametrize(("reach", "pairs"), [(None, 70**2 + 1 + 23**2), (3, 7 * 70 - 12 + 1 + 7 * 23 - 12)])
def test_the_cost_counts_every_visible_pair(reach: int | None, pairs: int) -> None:
    of = program(reach)
    load = Load(tuple((0, length) for length in LENGTHS), 3)
    (attention,) = (op for op in of if type(op).__name__ == "RowAttention")
    assert attention.flops(load) == 2 * pairs * (32 + 32)
