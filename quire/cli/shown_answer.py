"""An answer as it is shown while it is generated: its text, and the reasoning before it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable

from quire.cli.terminal import AnswerWriter
from quire.text.answer import AnswerParser, Content, Event, Reasoning


class ShownAnswer:
    """Writes text to standard output, and reasoning, dim, to standard error; or only keeps both if `silent`.

    Without a parser, all of the answer is text.
    """

    def __init__(self, parser: AnswerParser | None, *, silent: bool) -> None:
        self.text = self.reasoning = ""
        self._parser = parser
        self._writer = None if silent else AnswerWriter(sys.stdout)
        self._thoughts = None if silent else AnswerWriter(sys.stderr, dim=True)
        self._thinks = False  # what was written last is reasoning

    def push(self, delta: str) -> None:
        """Show what was generated since the last call."""
        self._show([Content(delta)] if self._parser is None else self._parser.push(delta))

    def end(self) -> None:
        """Show what was held back."""
        if self._parser is not None:
            self._show(self._parser.finish())
        self._end_thoughts("\n")
        if self._writer is not None:
            self._writer.end()

    def _show(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Reasoning):
                self.reasoning += event.text
                self._thinks = True
                if self._thoughts is not None:
                    with contextlib.suppress(OSError):  # nobody reads it
                        self._thoughts.write(event.text)
            elif isinstance(event, Content) and event.text:
                self._end_thoughts("\n\n")
                self.text += event.text
                if self._writer is not None:
                    self._writer.write(event.text)

    def _end_thoughts(self, gap: str) -> None:
        if self._thinks and self._thoughts is not None:
            with contextlib.suppress(OSError):
                self._thoughts.end()
                print(gap, end="", file=sys.stderr, flush=True)
        self._thinks = False
