"""Windows: squares of an image's tokens within which some layers of a vision tower attend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Windows:
    """Squares of `side` x `side` tokens, less where an image ends; a token has so many `patches`.

    A tower takes the patches of one window after those of another, and so gives the tokens.
    """

    side: int
    patches: int

    @property
    def most(self) -> int:
        """The maximum number of patches of a window."""
        return self.side**2 * self.patches

    def order(self, rows: int, columns: int) -> np.ndarray:
        """Return the tokens of an image, counted row by row, window after window, [tokens]."""
        y, x = np.indices((rows, columns)).reshape(2, -1)
        return np.lexsort((x, y, x // self.side, y // self.side))

    def places(self, rows: int, columns: int) -> np.ndarray:
        """Return where each token of an image, counted row by row, is in that order, [tokens]."""
        return np.argsort(self.order(rows, columns))

    def offsets(self, rows: int, columns: int) -> np.ndarray:
        """Return where the patches of each window begin, and the end of the last, [windows + 1]."""
        heights, widths = (np.diff([*range(0, count, self.side), count]) for count in (rows, columns))
        return np.append(0, np.cumsum(np.outer(heights, widths) * self.patches))
