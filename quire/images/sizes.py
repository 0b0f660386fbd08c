"""Sizes to which the images of a model are resized, by rules that a process without NumPy can follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_RATIO = 200  # of the sides of an image


@dataclass(frozen=True, slots=True)
class FixedSize:
    """All images become `height` x `width` pixels."""

    height: int
    width: int

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to which an image is resized."""
        return self.height, self.width


@dataclass(frozen=True, slots=True)
class KeptShape:
    """Images keep their proportions, with sides that are multiples of `unit`, and so many pixels."""

    unit: int
    min_pixels: int
    max_pixels: int

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to which an image is resized. Raises ValueError if it is too narrow."""
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ValueError(
                f"an image of {width} x {height} pixels is too narrow: its sides may differ by a "
                f"factor of {MAX_RATIO}"
            )
        unit, area = self.unit, height * width
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 < self.min_pixels:
            by = math.sqrt(self.min_pixels / area)
            rows, columns = (math.ceil(side * by / unit) for side in (height, width))
        if rows * columns * unit**2 > self.max_pixels:
            by = math.sqrt(area / self.max_pixels)
            rows, columns = (max(1, math.floor(side / by / unit)) for side in (height, width))
            most = max(1, self.max_pixels // unit**2)  # of narrow images, whose short side was rounded up
            rows, columns = min(rows, most), min(columns, most)
        return rows * unit, columns * unit


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Images keep their proportions, with sides that are multiples of `unit`, as large as `most` squares of
    `unit` x `unit` allow: small images are made larger.
    """

    unit: int
    most: int

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to which an image is resized."""
        by = math.sqrt(self.most * self.unit**2 / (height * width))
        rows, columns = (math.floor(by * side / self.unit) for side in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, self.most)
        elif columns == 0:
            rows, columns = min(height // width, self.most), 1
        return rows * self.unit, columns * self.unit


@dataclass(frozen=True, slots=True)
class LongestSide:
    """Images keep their proportions, with sides of `longest` at most before these are rounded up to multiples
    of `unit`: small images keep their size. They are at most `most` squares of `unit` x `unit`.
    """

    unit: int
    longest: int
    most: int

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to which an image is resized."""
        by = max(height, width) / self.longest
        sides = [side if by <= 1 else max(1, math.floor(side / by)) for side in (height, width)]
        rows, columns = (-(-side // self.unit) for side in sides)
        if rows * columns > self.most:
            by = math.sqrt(self.most / math.prod(sides))
            rows, columns = (min(self.most, max(1, math.floor(side * by))) for side in sides)
        return rows * self.unit, columns * self.unit


SizeRule = FixedSize | KeptShape | TokenBudget | LongestSide
RULES: dict[str, type[SizeRule]] = {
    rule.__name__: rule for rule in (FixedSize, KeptShape, TokenBudget, LongestSide)
}
