"""Text that the processors of some models write around the parts of an image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """Text around the tokens of images: `alone` before those of an image with one part, and `end`, a token,
    after all of any.

    Of an image in tiles, `begin` is before all, `tile` before each, with its {row}, {column} and {number}
    from 1 on, `between` the tiles of a row, `row_end` after each row, and `overview` before the part that is
    all of the image. `after` is after each part of any.
    """

    alone: str
    tile: str
    overview: str
    end: str
    begin: str = ""
    row_end: str = ""
    after: str = ""
    between: str = ""

    def around(self, rows: int, columns: int, count: int) -> list[str]:
        """Return the texts before each of `count` parts of an image, and that after the last."""
        first, *rest = [self.alone, self.end] if count == 1 else self._of_tiles(rows, columns, count)
        return [first, *(self.after + text for text in rest)]

    def _of_tiles(self, rows: int, columns: int, count: int) -> list[str]:
        grid = [
            [
                self.between * (column > 0) + self._tile(row, column, row * columns + column)
                for column in range(columns)
            ]
            for row in range(rows)
        ]
        for row in grid[1:]:
            row[0] = self.row_end + row[0]
        texts = [text for row in grid for text in row]
        after = [self.overview] if count > len(texts) else []
        texts, after = [self.begin + texts[0], *texts[1:]], [*after, self.end]
        return [*texts, self.row_end + after[0], *after[1:]]

    def _tile(self, row: int, column: int, number: int) -> str:
        return self.tile.format(row=row + 1, column=column + 1, number=number + 1)
