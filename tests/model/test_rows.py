"""Ops on whole rows against formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tiny import Paged, random_weights, same_bits

from quire.models.pooling import attend_both
from quire.program import Builder, Load, Names, Program, Value

LENGTHS = (70, 1, 23)


def program(reach: int | None) -> Program:
    b = Builder()
    x = b.embed(Names("x"), sum(LENGTHS), 4 * 8 + 2 * 8 + 2 * 8)
    parts: list[Value] = [b.slice(x, 0, (4, 8)), b.slice(x, 32, (2, 8)), b.slice(x, 48, (2, 8))]
    return b.program(b.sampled_rows(attend_both(b, parts[0], parts[1], parts[2], reach)))


@pytest.mark.parametrize("reach", [None, 1, 3, 40])
def test_a_token_sees_both_sides(reach: int | None) -> None:
    of = program(reach)
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
