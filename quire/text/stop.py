"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import RequestError


class StopStrings:
    """Search for the stop string that is completed first; of several completed together, the first listed.

    Text that may be the beginning of a stop string is held back until that is decided. The result does not
    depend on how the text was cut into chunks. Time is linear in the text: there is one Knuth-Morris-Pratt
    automaton for each stop string.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        if not all(stops):
            raise RequestError("a stop string is empty", param="stop")
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include = include_in_output
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)  # length of each stop's prefix that ends the text so far
        self._held = ""

    def push(self, text: str, ignore: bool = False) -> tuple[str, str | None]:
        """Add `text`; return the text to emit, and the stop string that ended the text, if one did.

        With `ignore`, stops completed by this chunk do not count (tokens before `min_tokens`); one that
        only begins in it may be completed later.
        """
        if self.matched is not None or not text:
            return "", self.matched
        start = len(self._held)
        whole = self._held + text
        for at, char in enumerate(text, start + 1):
            for index, stop in enumerate(self._stops):
                if self._advance(index, stop, char) and not ignore and self.matched is None:
                    self.matched = stop
            if self.matched is not None:
                self._held = ""
                return whole[: at if self._include else at - len(self.matched)], self.matched
        keep = len(whole) - max(self._states, default=0)
        self._held = whole[keep:]
        return whole[:keep], None

    def flush(self) -> str:
        """Return the text held back, at the end of an output that no stop string ended."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, index: int, stop: str, char: str) -> bool:
        """Advance one automaton by a character; return True when it completes the stop string."""
        state, fallback = self._states[index], self._fallbacks[index]
        while state and stop[state] != char:
            state = fallback[state]
        state += stop[state] == char
        done = state == len(stop)
        self._states[index] = fallback[state] if done else state
        return done


def _fallback(stop: str) -> list[int]:
    """Return the length of the longest proper prefix of stop[:n] that is also its suffix, for each n."""
    table, state = [0, 0], 0
    for char in stop[1:]:
        while state and stop[state] != char:
            state = table[state]
        state += stop[state] == char
        table.append(state)
    return table
