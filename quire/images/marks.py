"""Text that the processors of some models write around the parts of an image."""

from __future__ import annotations

from dataclasses import dataclass

from quire.images.reader import Parts


@dataclass(frozen=True, slots=True)
class Marks:
    """Text around the tokens of images: `alone` before those of an image with one part, and `end`, a token,
    after all of any.

    Of an image in tiles, `begin` is before all, `tile` before each, with its {row} and {column} from 1 on,
    `row_end` after each row of tiles, and `overview` before the part that is all of the image.
    """

    alone: str
    tile: str
    overview: str
    end: str
    begin: str = ""
    row_end: str = ""

    def around(self, image: Parts) -> list[str]:
        """Return the texts before each part of an image, and that after the last."""
        if len(image.parts) == 1:
            return [self.alone, self.end]
        rows = [
            [self.tile.format(row=row + 1, column=column + 1) for column in range(image.columns)]
            for row in range(image.rows)
        ]
        for row in rows[1:]:
            row[0] = self.row_end + row[0]
        texts = [text for row in rows for text in row]
        after = [self.overview] if len(image.parts) > len(texts) else []
        texts, after = [self.begin + texts[0], *texts[1:]], [*after, self.end]
        return [*texts, self.row_end + after[0], *after[1:]]
