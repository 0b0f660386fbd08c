"""Sizes to which the images of a model are resized, by rules that a process without NumPy can follow."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

MAX_RATIO = 200  # of the sides of an image
Size = tuple[int, int]  # height and width


class Cut(NamedTuple):
    """An image is resized to the size `before`, if any, then to `size`, filled up with black to that of
    `canvas`, if any, and cut into `rows` x `columns` tiles, its parts: all of it, or the `middle` of this
    size.

    The last part is all of it in the size of `overview`, unless that is None. With `before` it is made of
    what is cut, else of the image as it came.
    """

    size: Size
    rows: int = 1
    columns: int = 1
    overview: Size | None = None
    before: Size | None = None
    middle: Size | None = None
    canvas: Size | None = None


class OnePart:
    """A rule by which images are not cut."""

    __slots__ = ()

    def of(self, height: int, width: int) -> Size:
        """Return the (height, width) to which an image is resized."""
        raise NotImplementedError

    def cut(self, height: int, width: int) -> Cut:
        """Return how an image becomes parts."""
        return Cut(self.of(height, width))


@dataclass(frozen=True, slots=True)
class OneSquare:
    """All images become `side` x `side` pixels. With `middle` they keep their proportions, and what a longer
    side has more is left out at both ends.
    """

    side: int
    middle: bool = False

    @property
    def parts(self) -> int:
        """The number of parts of an image."""
        return 1

    def bounded(self, parts: int) -> OneSquare:
        """Return a rule by which images have at most so many parts."""
        return self

    def cut(self, height: int, width: int) -> Cut:
        """Return how an image becomes parts. Raises ValueError if it is too narrow."""
        square = self.side, self.side
        if not self.middle:
            return Cut(square)
        _require_width((height, width), (height, width))
        rows, columns = (self.side * side // min(height, width) for side in (height, width))
        return Cut((rows, columns), middle=square)


@dataclass(frozen=True, slots=True)
class KeptShape(OnePart):
    """Images keep their proportions, with sides that are multiples of `unit`, and so many pixels.

    Those with a side shorter than `unit` are `enlarged` first: by one factor ("once"), by the height and then
    by the width ("twice"), or not ("").
    """

    unit: int
    min_pixels: int
    max_pixels: int
    enlarged: str = ""

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to which an image is resized. Raises ValueError if it is too narrow."""
        enlarged = _ENLARGED[self.enlarged](height, width, self.unit)
        _require_width(enlarged, (height, width))
        height, width = enlarged
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


def _once(height: int, width: int, unit: int) -> Size:
    by = max(1.0, unit / height, unit / width)
    return int(height * by), int(width * by)


def _twice(height: int, width: int, unit: int) -> Size:
    if height < unit:
        height, width = unit, round(width * unit / height)
    if width < unit:
        height, width = round(height * unit / width), unit
    return height, width


_ENLARGED = {"": lambda height, width, unit: (height, width), "once": _once, "twice": _twice}


@dataclass(frozen=True, slots=True)
class TokenBudget(OnePart):
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
class LongestSide(OnePart):
    """Images keep their proportions, with sides of `longest` at most before these are rounded up to multiples
    of `unit`: small images keep their size. They are at most `most` squares of `merge` x `merge` units, and
    what is left over beside these.
    """

    unit: int
    longest: int
    most: int
    merge: int = 1

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to which an image is resized. Raises ValueError if it has no square."""
        by, merge = max(height, width) / self.longest, self.merge
        sides = [side if by <= 1 else max(1, math.floor(side / by)) for side in (height, width)]
        rows, columns = (-(-side // self.unit) for side in sides)
        if min(rows, columns) < merge:
            problem = f"an image of {width} x {height} pixels is too small or too narrow"
            raise ValueError(f"{problem}: it has less than {merge * self.unit} pixels a side, as resized")
        if (rows // merge) * (columns // merge) > self.most:
            by = math.sqrt(self.most / math.prod(sides))
            rows, columns = (merge * min(self.most, max(1, math.floor(side * by))) for side in sides)
        return rows * self.unit, columns * self.unit


@dataclass(frozen=True, slots=True)
class Tiles:
    """Images keep their proportions, with sides that are multiples of `unit`: `least` to `most` squares of
    `unit` x `unit`. Those with more than `tolerance` times the most are cut into `fewest` to `tiles` tiles of
    `side` x `side` pixels, in about their proportions, with an overview if `overview`; 0 tiles: into none.
    """

    patch: int
    unit: int
    least: int
    most: int
    side: int
    fewest: int
    tiles: int
    tolerance: float
    overview: bool

    @property
    def of_tile(self) -> int:
        """The tokens of a tile."""
        return (self.side // self.unit) ** 2

    @property
    def most_of_part(self) -> int:
        """The maximum number of tokens of a part."""
        return max(self.most, self.of_tile if self.tiles else 0)

    @property
    def most_of_all(self) -> int:
        """The maximum number of tokens of all parts of an image."""
        return max(self.most, self.tiles * self.of_tile + self.overview * self.most)

    def bounded(self, max_tokens: int) -> Tiles:
        """Return a rule by which the parts of an image have at most so many tokens together."""
        most = min(self.most, max_tokens)
        tiles = min(self.tiles, (max_tokens - self.overview * most) // self.of_tile)
        return replace(
            self, least=min(self.least, most), most=most, tiles=tiles if tiles >= self.fewest else 0
        )

    def cut(self, height: int, width: int) -> Cut:
        """Return how an image becomes parts."""
        whole = self._whole(height, width)
        area = math.prod(max(self.patch, round(side / self.unit) * self.unit) for side in (height, width))
        if not self.tiles or area <= self.most * self.unit**2 * self.tolerance:
            return Cut(whole)
        rows, columns = _nearest_grid(height, width, self.side, self.fewest, self.tiles)
        size = rows * self.side, columns * self.side
        return Cut(size, rows, columns, whole if self.overview else None)

    def _whole(self, height: int, width: int) -> Size:
        """Return the size of an image that is not cut, or of the overview of one that is."""
        unit, area = self.unit, height * width
        rows, columns = (max(1, round(side / unit)) for side in (height, width))
        if rows * columns > self.most:
            by = math.sqrt(area / (self.most * unit**2))
            rows, columns = (max(1, math.floor(side / by / unit)) for side in (height, width))
        elif rows * columns < self.least:
            by = math.sqrt(self.least * unit**2 / area)
            rows, columns = (math.ceil(side * by / unit) for side in (height, width))
        if rows <= columns:  # a short side that was rounded up makes too many
            rows = min(rows, self.most)
            columns = min(columns, self.most // rows)
        else:
            columns = min(columns, self.most)
            rows = min(rows, self.most // columns)
        return rows * unit, columns * unit


@dataclass(frozen=True, slots=True)
class GridTiles:
    """Images become `fewest` tiles of `side` x `side` pixels or more, in about their proportions, and an
    overview of this size if these are several. They have `parts` at most. `fitted` ones have the tiles by
    which they are made larger by the least, or if none are so large, smaller by the least.
    """

    side: int
    fewest: int
    parts: int
    fitted: bool = False

    def bounded(self, parts: int) -> GridTiles:
        """Return a rule by which images have at most so many parts."""
        return replace(self, parts=min(self.parts, parts))

    def cut(self, height: int, width: int) -> Cut:
        """Return how an image becomes parts."""
        most = max(1, self.parts - 1)
        if self.fitted:
            rows, columns = _fitting_grid(height, width, self.side, most)
        else:
            rows, columns = _nearest_grid(height, width, self.side, min(self.fewest, most), most)
        overview = (self.side, self.side) if rows * columns > 1 else None
        return Cut((rows * self.side, columns * self.side), rows, columns, overview)


@dataclass(frozen=True, slots=True)
class SquareTiles:
    """Images become squares of `side` x `side` pixels: tiles, after their longer side was made `longest`, and
    an overview. They have `parts` at most, and so a shorter side, or no tiles.
    """

    longest: int
    side: int
    parts: int

    def bounded(self, parts: int) -> SquareTiles:
        """Return a rule by which images have at most so many parts."""
        return replace(self, parts=min(self.parts, parts))

    def cut(self, height: int, width: int) -> Cut:
        """Return how an image becomes parts."""
        square = self.side, self.side
        for count in range(-(-self.longest // self.side), 1, -1):
            before = _scaled(height, width, min(self.longest, count * self.side))
            rows, columns = self._grid(*before)
            if rows * columns < self.parts:
                return Cut((rows * self.side, columns * self.side), rows, columns, square, before)
        return Cut(square, before=_scaled(height, width, self.longest))

    def _grid(self, height: int, width: int) -> Size:
        """Return the rows and columns of tiles of an image of this size."""
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.side)
            return math.ceil(int(columns * self.side / ratio) / self.side), columns
        rows = math.ceil(height / self.side)
        return rows, math.ceil(int(rows * self.side * ratio) / self.side)


def _single(value: float) -> float:
    """Round to float32."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def _require_width(size: Size, stated: Size) -> None:
    """Raise ValueError if `size` is too narrow, of an image that has the `stated` one."""
    if max(size) > MAX_RATIO * min(size):
        height, width = stated
        raise ValueError(
            f"an image of {width} x {height} pixels is too narrow: its sides may differ by a "
            f"factor of {MAX_RATIO}"
        )


def _nearest_grid(height: int, width: int, side: int, fewest: int, most: int) -> Size:
    """Return the rows and columns of the `fewest` to `most` tiles with the nearest proportions to an image.

    Of equal ones the larger, if the image is larger than half of it.
    """
    best, nearest = (1, 1), math.inf
    for rows, columns in _grids(fewest, most):
        apart = abs(width / height - columns / rows)
        larger = height * width > 0.5 * side**2 * rows * columns
        if apart < nearest or (apart == nearest and larger):
            best, nearest = (rows, columns), apart
    return best


def _fitting_grid(height: int, width: int, side: int, most: int) -> Size:
    """Return the rows and columns of at most so many tiles to which an image is enlarged by the least.

    Of grids that are all smaller than it, those to which it is made smaller by the least.
    """
    factors = {(y, x): min(x * side / width, y * side / height) for y, x in _grids(1, most)}
    larger = [grid for grid, factor in factors.items() if factor >= 1]
    return min(larger, key=factors.__getitem__) if larger else max(factors, key=factors.__getitem__)


def _grids(fewest: int, most: int) -> list[Size]:
    """Return the rows and columns of so many tiles, smaller grids first, then those with fewer columns."""
    counts = range(1, most + 1)
    grids = [(rows, columns) for columns in counts for rows in counts]
    return sorted((grid for grid in grids if fewest <= math.prod(grid) <= most), key=math.prod)


def _scaled(height: int, width: int, longest: int) -> Size:
    """Return a size with a longer side of `longest`. The other is rounded down, then up to an even one."""
    if width >= height:
        return max(1, -(-int(longest / (width / height)) // 2) * 2), longest
    return longest, max(1, -(-int(longest * (width / height)) // 2) * 2)


@dataclass(frozen=True, slots=True)
class CanvasTiles:
    """Images keep their proportions on a canvas of at most `tiles` squares of `side` x `side` pixels, with an
    overview if these are several. No side gets longer but for one that is shorter than a square.
    """

    side: int
    tiles: int

    @property
    def parts(self) -> int:
        """The maximum number of parts of an image."""
        return self.tiles + (self.tiles > 1)

    def cut(self, height: int, width: int) -> Cut:
        """Return how an image becomes parts."""
        rows, columns = _fitting_grid(height, width, self.side, self.tiles)
        canvas = rows * self.side, columns * self.side
        overview = (self.side, self.side) if rows * columns > 1 else None
        return Cut(self._size(height, width, canvas), rows, columns, overview, canvas=canvas)

    def _size(self, height: int, width: int, canvas: Size) -> Size:
        """Return the largest size on a canvas, in the precision of the model's own processor."""
        (rows, tall, rounded_tall), (columns, wide, rounded_wide) = (
            self._side(*sides) for sides in zip((height, width), canvas, strict=True)
        )
        if wide < tall:
            return max(1, min(math.floor(rounded_wide(height * wide)), rows)), columns
        return rows, max(1, min(math.floor(rounded_tall(width * tall)), columns))

    def _side(self, side: int, most: int) -> tuple[int, float, Callable[[float], float]]:
        """Return the pixels that a side may get, by which factor, and how products with that are rounded."""
        longest = max(side, self.side)
        rounded = _single if longest > most else float
        return min(longest, most), rounded(min(longest, most) / side), rounded


SizeRule = OneSquare | KeptShape | TokenBudget | LongestSide | Tiles | GridTiles | SquareTiles | CanvasTiles
RULES: dict[str, type[SizeRule]] = {
    rule.__name__: rule
    for rule in (OneSquare, KeptShape, TokenBudget, LongestSide, Tiles, GridTiles, SquareTiles, CanvasTiles)
}
