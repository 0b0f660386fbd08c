"""Ends of a continuation at line breaks."""

from __future__ import annotations

import re

_VISIBLE = re.compile(r"\S")


class LineEnds:
    """End a text before a line with less indentation than `indent`, or at a line break after `limit_ms`.

    `num_certain` characters of the text are part of it whatever follows. A blank line has no indentation.
    """

    def __init__(self, indent: int, limit_ms: float) -> None:
        self.reached = False
        self.num_certain = 0
        self._indent, self._limit_ms = indent, limit_ms
        self._seen = 0  # characters without a line break that is undecided
        self._next = 0  # where to look for the first visible character after it

    def look(self, text: str, elapsed_ms: float) -> None:
        """Look at what was added to the text, `elapsed_ms` after its first token."""
        if self.reached:
            return
        last = text.rfind("\n", self.num_certain) if elapsed_ms > self._limit_ms else -1
        while self._indent and (at := text.find("\n", self._seen)) >= 0:
            found = _VISIBLE.search(text, max(at, self._next))
            if found is None:
                self._seen, self._next, self.num_certain = at, len(text), at
                break
            if found.start() - text.rfind("\n", at, found.start()) - 1 < self._indent:
                self.num_certain, self.reached = at, True
                return
            self._seen = found.start()
        else:
            self._seen = self.num_certain = len(text)
        if last >= 0:
            self.num_certain, self.reached = min(self.num_certain, last + 1), True
