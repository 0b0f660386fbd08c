"""Stateless random numbers: a draw is a pure function of (seed, sequence, position).

Philox4x32-10 from Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011):
ten rounds of multiplication over a counter of four 32-bit words, under a key of two. Nothing is carried from
one draw to the next, so a request draws the same whether preempted, batched differently or speculated on.
"""

from __future__ import annotations

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # golden ratio, square root of 3 less 1
_MASK32 = 0xFFFFFFFF
_MASK64 = (1 << 64) - 1
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random 32-bit words from a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK32
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, sequence: int, position: int, draw: int = 0) -> float:
    """Return a number in [0, 1) with 53 random bits.

    `seed` is a 64-bit integer, signed or not; `sequence` is the index among the n sequences of the request;
    `position` is the index of the token to be drawn, counted from the start of the prompt; `draw` tells apart
    several draws for one position. The counter is (position low, position high, sequence, draw),
    the key is (seed low, seed high).
    """
    seed &= _MASK64
    high, low, _, _ = philox4x32(
        (position & _MASK32, position >> 32, sequence, draw), (seed & _MASK32, seed >> 32)
    )
    return ((high >> 5) * (1 << 26) + (low >> 6)) * 2.0**-53
