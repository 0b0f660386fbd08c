"""Philox against the published answers, and the random numbers made of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sampling.philox import philox4x32, uniform

# Random123 (Salmon et al.), file tests/kat_vectors, the lines "philox4x32 10": counter, key, answer.
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""
VECTORS = [[int(word, 16) for word in line.split()] for line in KNOWN_ANSWERS.split("\n") if line]

int64 = st.integers(-(2**63), 2**63 - 1)
row = st.tuples(int64, st.integers(0, 127), st.integers(0, 2**40))


@pytest.mark.parametrize("vector", VECTORS)
def test_known_answers(vector):
    assert philox4x32(tuple(vector[:4]), tuple(vector[4:6])) == tuple(vector[6:])


def test_uniform_is_made_of_the_first_two_words():
    # Seed, position and sequence of the third vector; its first two words give the number.
    _, _, sequence, draw, key_low, key_high, first, second = VECTORS[2][:8]
    position = VECTORS[2][0] | VECTORS[2][1] << 32
    bits = (first >> 5 << 26) + (second >> 6)
    assert uniform(key_low | key_high << 32, sequence, position, draw) == bits / 2**53


@given(row, st.integers(0, 3))
def test_range_and_every_coordinate_matters(r, draw):
    seed, sequence, position = r
    u = uniform(seed, sequence, position, draw)
    assert 0 <= u < 1
    others = [
        uniform(seed ^ 1, sequence, position, draw),
        uniform(seed ^ (1 << 40), sequence, position, draw),
        uniform(seed, sequence + 1, position, draw),
        uniform(seed, sequence, position + 1, draw),
        uniform(seed, sequence, position + 2**32, draw),
        uniform(seed, sequence, position, draw + 1),
    ]
    assert len({u, *others}) == 7


def test_signed_and_unsigned_seeds_of_equal_bits_are_one_seed():
    assert uniform(-1, 0, 5) == uniform(2**64 - 1, 0, 5)
    assert uniform(-(2**63), 0, 5) == uniform(2**63, 0, 5)


@pytest.mark.parametrize("axis", range(3))
def test_uniform_along_each_coordinate(axis):
    """Moments, pairs of neighbours, and the number of draws in each of 64 cells, along one coordinate."""
    count = 16384
    coordinates = np.tile([11, 3, 1000], (count, 1))
    coordinates[:, axis] = np.arange(count)
    u = np.array([uniform(*row) for row in coordinates.tolist()])
    assert abs(u.mean() - 1 / 2) < 4 / np.sqrt(12 * count)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / np.sqrt(count)
    cells = np.bincount((u * 64).astype(int), minlength=64)
    expected = count / 64
    chi_square = float(((cells - expected) ** 2 / expected).sum())
    assert 63 - 4 * np.sqrt(126) < chi_square < 63 + 4 * np.sqrt(126)
    low_bits = np.bincount((u * 2**53).astype(np.int64) % 64, minlength=64)
    assert float(((low_bits - expected) ** 2 / expected).sum()) < 63 + 4 * np.sqrt(126)
