"""Word wrap for text that arrives in pieces."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

TAB = 8


class WordWrap:
    """Wraps lines at `columns()` cells. The last word is held back until it is complete.

    A word longer than a line is broken at the end of the line. Lines may end between any two wide characters,
    such as Chinese ones.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0  # of the cursor
        self._gap = self._word = ""  # not written yet: white space, and the word after it
        self._word_cells = 0

    def push(self, text: str) -> str:
        """Return the text that can be written now."""
        written = []
        for char in text:
            if char in " \t\n":
                written.append(self.flush())
                self._gap += char
                if char == "\n":
                    written.append("\n")
                    self._gap, self._column = "", 0
                continue
            size = cells(char)
            if size == 2 or self._word_cells + size > self._columns():
                written.append(self.flush())
            self._word += char
            self._word_cells += size
            if size == 2:
                written.append(self.flush())
        return "".join(written)

    def flush(self) -> str:
        """Return the word that was held back."""
        if not self._word:
            return ""
        start = self._column
        for char in self._gap:
            start += TAB - start % TAB if char == "\t" else 1
        gap, word = self._gap, self._word
        if start + self._word_cells > self._columns():
            gap, start = "\n" if self._column else "", 0
        self._column = start + self._word_cells
        self._gap, self._word, self._word_cells = "", "", 0
        return gap + word


def cells(char: str) -> int:
    """Return the number of terminal cells that a character takes."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
