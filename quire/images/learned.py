"""Learned positions of a square of places, stretched over the patches of an image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_A = -0.75  # of the cubic kernel (Keys, 1981) as usual with images


@dataclass(frozen=True, slots=True)
class Learned:
    """Learned positions of `side` x `side` places, stretched over an image.

    Each patch mixes those around it: two of each line, or four if `cubic`. The first and the last place of a
    line are those of an image if `ends`, else their outer edges are.
    """

    side: int
    cubic: bool = False
    ends: bool = False

    @property
    def number(self) -> int:
        """The number of places that a patch mixes."""
        return 16 if self.cubic else 4

    def mixed(self, y: np.ndarray, x: np.ndarray) -> list[np.ndarray]:
        """Return the rows of the table that patches in these rows and columns mix, and their factors."""
        (lines, down), (columns, across) = self._stretched(y), self._stretched(x)
        rows = [self.side * line + column for line in lines for column in columns]
        return [*rows, *(v * h for v in down for h in across)]

    def _stretched(self, at: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the places around each patch of a line, and their factors."""
        count = int(at.max()) + 1
        if self.ends:
            exact = np.linspace(0, self.side - 1, count, dtype=np.float32)[at]
        else:
            scale, half = np.float32(self.side) / np.float32(count), np.float32(0.5)
            exact = (at.astype(np.float32) + half) * scale - half
        before = np.floor(exact).astype(np.int64)
        offsets, factors = (range(-1, 3), _cubic) if self.cubic else (range(2), _linear)
        places = [np.clip(before + offset, 0, self.side - 1) for offset in offsets]
        return places, factors(exact - before)


def _linear(between: np.ndarray) -> list[np.ndarray]:
    return [1 - between, between]


def _cubic(between: np.ndarray) -> list[np.ndarray]:
    near = [((_A + 2) * x - (_A + 3)) * x * x + 1 for x in (between, 1 - between)]
    first, last = (((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A for x in (1 + between, 2 - between))
    return [first, *near, last]
