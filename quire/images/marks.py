"""Text that the processors of some models write around the parts of an image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """Text around the tokens of images: `alone` before those of an image with one part, and `end`, a token,
    after all of any.

    Of an image in tiles, `begin` is before all, `tile` before each, with its {row} and {column} from 1 on,
    `between` the tiles of a row, `row_end` after each row, and `overview` before the part that is all of the
    image.
    """

    alone: str
    tile: str
    overview: str
    end: str
    begin: str = ""
    row_end: str = ""
    between: str = ""

    def around(self, rows: int, columns: int, count: int) -> list[str]:
        """Return the texts before each of `count` parts of an image, and that after the last."""
        if count == 1:
            return [self.alone, self.end]
        grid = [
            [
                self.between * (column > 0) + self.tile.format(row=row + 1, column=column + 1)
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
