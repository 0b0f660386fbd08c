"""Patches: the numbers of an image as the vision tower of a model takes them, [T, columns] float32.

The columns are the pixels of a patch, and after them its place: rows of a grid of learned positions with
their factors, as MixedRows takes them, and for towers that rotate by place its row and column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from quire.errors import ConfigError
from quire.images.learned import Learned
from quire.images.normalization import Normalization
from quire.images.sizes import (
    CanvasTiles,
    GridTiles,
    KeptShape,
    LongestSide,
    OneSquare,
    SizeRule,
    SquareTiles,
    Tiles,
    TokenBudget,
)


class Patching(Protocol):
    """The rule by which the images of a model are resized and cut."""

    @property
    def size(self) -> SizeRule:
        """The rule for the size to which images are resized, and the parts into which they are cut."""
        ...

    @property
    def resample(self) -> int:
        """The filter of resizing, by Pillow's number."""
        ...

    @property
    def most(self) -> tuple[int, int]:
        """The maximum numbers of patches and of tokens of an image, or of a part of one."""
        ...

    @property
    def most_of_all(self) -> int:
        """The maximum number of tokens of an image, in all its parts."""
        ...

    def bounded(self, max_tokens: int) -> Patching:
        """Return one whose images have at most so many tokens. Raises ConfigError if that is impossible."""
        ...

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tokens of a resized image."""
        ...

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """Return the patches of a resized image [height, width, 3] uint8, [T, columns] float32."""
        ...


class Squares:
    """Patches of `patch` x `patch` pixels, of which squares of `merge` x `merge` become one token."""

    __slots__ = ()
    patch: int
    merge: int

    @property
    def most(self) -> tuple[int, int]:
        raise NotImplementedError

    @property
    def most_of_all(self) -> int:
        """The maximum number of tokens of an image, in all its parts."""
        return self.most[1]

    @property
    def unit(self) -> int:
        """The pixels of a side of a token."""
        return self.patch * self.merge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tokens of a resized image."""
        return height // self.unit, width // self.unit


@dataclass(frozen=True, slots=True)
class MergedPatches(Squares):
    """Squares of `merge` x `merge` patches become one token (Qwen-VL). An image keeps its proportions.

    Patches of one square follow one another. Each is repeated `frames` times, as if it were a film, and has a
    mix of `learned` positions, unless there are none. `enlarged` is as in KeptShape.
    """

    patch: int
    merge: int
    frames: int
    learned: Learned | None
    min_pixels: int
    max_pixels: int
    normalization: Normalization
    resample: int = 3  # of Pillow: bicubic
    enlarged: str = ""

    @property
    def size(self) -> KeptShape:
        return KeptShape(self.unit, self.min_pixels, self.max_pixels, self.enlarged)

    @property
    def most(self) -> tuple[int, int]:
        tokens = max(1, self.max_pixels // self.unit**2)
        return tokens * self.merge**2, tokens

    def bounded(self, max_tokens: int) -> MergedPatches:
        most = min(self.max_pixels, max_tokens * self.unit**2)
        return replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most)

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        cut, y, x = _in_squares(self.normalization.apply(pixels), self.patch, self.merge)
        cut = cut[:, :, None].repeat(self.frames, axis=2).reshape(len(cut), -1)
        mixed = [] if self.learned is None else self.learned.mixed(y, x)
        places = (*mixed, y, x)
        return np.concatenate([cut, np.stack(places, axis=1)], axis=1, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class BudgetedPatches(Squares):
    """Squares of `merge` x `merge` patches become one token (Gemma 4). An image keeps its proportions.

    It has as many tokens as these allow, at most `max_tokens`. Patches of one square follow one another, and
    the channels of one pixel. Each has two learned positions: that of its column, and that of its row, which
    is `side` rows of the table later.
    """

    patch: int
    merge: int
    max_tokens: int
    side: int
    normalization: Normalization
    resample: int

    @property
    def size(self) -> TokenBudget:
        return TokenBudget(self.unit, self.max_tokens)

    @property
    def most(self) -> tuple[int, int]:
        return self.max_tokens * self.merge**2, self.max_tokens

    def bounded(self, max_tokens: int) -> BudgetedPatches:
        return replace(self, max_tokens=min(self.max_tokens, max_tokens))

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        cut, y, x = _in_squares(self.normalization.apply(pixels), self.patch, self.merge)
        one = np.ones(len(y))
        places = np.stack((x, self.side + y, one, one, x, y), axis=1)
        cut = cut.transpose(0, 2, 1).reshape(len(y), -1)
        return np.concatenate([cut, places], axis=1, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class TiledPatches(Squares):
    """Squares of `merge` x `merge` patches become one token. Images become one square (Gemma 3, Llava), or
    tiles of one size (Idefics3, InternVL).

    Patches of one square follow one another. Each has a learned position. Pixels that are left over at the
    right and below have no patch. With `classed`, a class token comes after the patches (`_beside_class`).
    """

    patch: int
    merge: int
    size: OneSquare | SquareTiles | GridTiles
    normalization: Normalization
    resample: int
    classed: bool = False

    @property
    def most(self) -> tuple[int, int]:
        tokens = (self.size.side // self.unit) ** 2
        return tokens * self.merge**2 + self.classed, tokens

    @property
    def most_of_all(self) -> int:
        return self.size.parts * self.most[1]

    def bounded(self, max_tokens: int) -> TiledPatches:
        _require_tokens(self.most[1], max_tokens)
        return replace(self, size=self.size.bounded(max_tokens // self.most[1]))

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        used = self.size.side // self.unit * self.unit
        values = self.normalization.apply(pixels[:used, :used])
        found = _in_one_grid(values, self.patch, self.merge)
        return _beside_class(found) if self.classed else found


@dataclass(frozen=True, slots=True)
class ClassedPatches(Squares):
    """Squares of `merge` x `merge` patches become one token (Llama 4). Images become tiles of one size.

    Patches of one square follow one another, and after all of them is the place of a class. Each has a
    learned position, whether it is the class, and its column and row, from 1 on; those of the class are 0.
    """

    patch: int
    merge: int
    size: CanvasTiles
    normalization: Normalization
    resample: int

    @property
    def most(self) -> tuple[int, int]:
        tokens = (self.size.side // self.unit) ** 2
        return tokens * self.merge**2 + 1, tokens

    @property
    def most_of_all(self) -> int:
        return self.size.parts * self.most[1]

    def bounded(self, max_tokens: int) -> ClassedPatches:
        _require_tokens(self.most[1], max_tokens)
        tiles = max(1, max_tokens // self.most[1] - 1)
        return replace(self, size=replace(self.size, tiles=min(self.size.tiles, tiles)))

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        cut, y, x = _in_squares(self.normalization.apply(pixels), self.patch, self.merge)
        row, one, none = y * (pixels.shape[1] // self.patch) + x, np.ones(len(y)), np.zeros(len(y))
        places = np.stack((row, one, none, none, x + 1, y + 1), axis=1)
        found = np.zeros((len(y) + 1, 3 * self.patch**2 + 6), np.float32)
        found[:-1] = np.concatenate([cut.reshape(len(y), -1), places], axis=1)
        found[-1, -6:] = len(y), 1, 0, 1, 0, 0
        return found


@dataclass(frozen=True, slots=True)
class NaflexPatches(Squares):
    """Squares of `merge` x `merge` patches become one token (LFM2-VL). An image keeps its proportions.

    Patches of one square follow one another, and the channels of one pixel. Learned positions are those of a
    square of `side` x `side`, resized to an image: of each patch there are the shares of all `side` x `side`.
    """

    patch: int
    merge: int
    side: int
    size: Tiles
    normalization: Normalization
    resample: int

    @property
    def most(self) -> tuple[int, int]:
        tokens = self.size.most_of_part
        return tokens * self.merge**2, tokens

    @property
    def most_of_all(self) -> int:
        return self.size.most_of_all

    def bounded(self, max_tokens: int) -> NaflexPatches:
        return replace(self, size=self.size.bounded(max_tokens))

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        cut, y, x = _in_squares(self.normalization.apply(pixels), self.patch, self.merge)
        down, across = (self._shares(at) for at in (y, x))
        shares = (down[:, :, None] * across[:, None]).reshape(len(y), -1)
        cut = cut.transpose(0, 2, 1).reshape(len(y), -1)
        return np.concatenate([cut, shares], axis=1, dtype=np.float32)

    def _shares(self, at: np.ndarray) -> np.ndarray:
        """Return the shares of the positions of a line in each place: linear, wider where it gets shorter."""
        scale = np.float32(self.side) / np.float32(at.max() + 1)
        centres = (at.astype(np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
        apart = np.abs(np.arange(self.side, dtype=np.float32) - centres[:, None])
        shares = np.maximum(1 - apart / np.maximum(scale, np.float32(1)), 0)
        return shares / shares.sum(axis=1, keepdims=True)


@dataclass(frozen=True, slots=True)
class BoundedPatches(Squares):
    """Squares of `merge` x `merge` patches become one token (Pixtral). An image keeps its proportions.

    No side is longer than `longest`, rounded up to whole squares, of which there are `max_tokens` at most, or
    if `loose` to whole patches: those beside the squares come after them, and become no token (LightOnOCR).
    Patches of one square follow one another. Columns are multiplied by `across`: along them pairs rotate
    slower than along rows by this factor.
    """

    patch: int
    merge: int
    longest: int
    max_tokens: int
    across: float
    normalization: Normalization
    resample: int
    loose: bool = False

    @property
    def size(self) -> LongestSide:
        if self.loose:
            return LongestSide(self.patch, self.longest, self.max_tokens, self.merge)
        return LongestSide(self.unit, self.longest, self.max_tokens)

    @property
    def most(self) -> tuple[int, int]:
        beside = (self.merge - 1) * (2 * -(-self.longest // self.patch) + 1) if self.loose else 0
        return self.max_tokens * self.merge**2 + beside, self.max_tokens

    def bounded(self, max_tokens: int) -> BoundedPatches:
        return replace(self, max_tokens=min(self.max_tokens, max_tokens))

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        cut, y, x = _in_squares(self.normalization.apply(pixels), self.patch, 1)
        (row, down), (column, right) = (np.divmod(at, self.merge) for at in (y, x))
        rows, columns = self.grid(*pixels.shape[:2])
        beside = (row >= rows) | (column >= columns)
        places = np.stack((y, x * self.across), axis=1)
        found = np.concatenate([cut.reshape(len(y), -1), places], axis=1, dtype=np.float32)
        return found[np.lexsort((right, down, column, row, beside))]


def _require_tokens(tokens: int, max_tokens: int) -> None:
    if tokens > max_tokens:
        problem = f"images of this model have {tokens} tokens, and max_image_tokens = {max_tokens}"
        raise ConfigError(problem, f"allow {tokens}, or no images: max_images = 0")


def _in_one_grid(values: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Return the patches of a square, each with its learned position, which is used alone."""
    cut, y, x = _in_squares(values, patch, merge)
    places = y * (len(values) // patch) + x, np.ones(len(y))
    return np.concatenate([cut.reshape(len(y), -1), np.stack(places, axis=1)], axis=1, dtype=np.float32)


def _beside_class(patches: np.ndarray) -> np.ndarray:
    """Return patches that have a learned position, and a class token, which has no pixels and the first one.

    Further columns have the row of a table of patches alone, and its factor, and the same of the class token.
    """
    count = len(patches)
    pixels = np.concatenate([patches[:, :-2], np.zeros((1, patches.shape[1] - 2))])
    places = np.append(patches[:, -2] + 1, 0)
    is_class, zeros = np.arange(count + 1) == count, np.zeros(count + 1)
    columns = places, zeros + 1, zeros, ~is_class, zeros, is_class
    return np.concatenate([pixels, np.stack(columns, axis=1)], axis=1, dtype=np.float32)


def _in_squares(values: np.ndarray, patch: int, merge: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut an image [height, width, 3] into patches [T, 3, pixels]; return them, their rows and columns.

    Those of a square of `merge` x `merge` follow one another.
    """
    rows, columns = (side // (patch * merge) for side in values.shape[:2])
    cut = values.reshape(rows, merge, patch, columns, merge, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    inner = np.indices((rows, columns, merge, merge)).reshape(4, -1)
    y, x = inner[0] * merge + inner[2], inner[1] * merge + inner[3]
    return cut.reshape(len(y), 3, -1), y, x
