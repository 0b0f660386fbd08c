"""Incremental parsing of a model's answer into reasoning, content and tool calls.

The text arrives in chunks of any size; the events, once adjacent ones of a kind are joined, do not depend
on the chunks. The parser holds back only a possible prefix of a marker, and white space, which is dropped
before a marker. Time is linear in the text. A malformed call becomes content, character for character,
unless its arguments have begun: then it stays as far as it was streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.text.reasoning import ReasoningFormat


class Content(NamedTuple):
    """Text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning that precedes the answer."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins. `index` numbers the calls of this answer."""

    index: int  # type: ignore[assignment]  # hides the method of tuples, which is not used
    id: str
    name: str


class CallArguments(NamedTuple):
    """The next piece of a call's arguments: JSON text as the model wrote it."""

    index: int  # type: ignore[assignment]
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class CallReader(Protocol):
    """Incremental parser of the calls of one format, from a marker to the end of the calls."""

    marker: str  # begins calls anywhere in a text
    bare: str  # an answer that begins with this character is a call, too; "" if there is none
    whole: bool  # it reads all of an answer, and not only calls

    def begin(self, opening: str) -> None:
        """Start reading calls after `opening`: the marker, or "" where a call begins without one."""

    def push(self, text: str) -> tuple[list[Event], str | None]:
        """Parse a chunk. Return its events and, once the calls have ended, the text after them."""

    def finish(self) -> list[Event]:
        """Return events for the text held back, as the answer ends within calls."""


class AnswerParser:
    """Incremental parser of one answer.

    With `inside`, the prompt has already opened the reasoning. Without a reader, calls are content. Marks
    around the text of the answer, `wrapping`, are left out, and the white space around them.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        inside: bool = False,
        reader: CallReader | None = None,
        wrapping: Sequence[str] = (),
    ) -> None:
        self.has_calls = False
        self._arguments: list[str] = []  # of the last call
        self._reasoning = reasoning
        self._inside = inside
        self._reader = reader
        # parses text, returns the rest for the next part
        self._part = AnswerParser._calls if reader and reader.whole else AnswerParser._begin
        self._held = ""  # at the beginning: a possible prefix of the reasoning's marker
        self._end_of_thought = _MarkerSearch(reasoning.end if reasoning else "")
        self._call = _MarkerSearch(reader.marker if reader else "")
        self._thought = _OutgoingText(trim=True)
        self._content = _OutgoingText(trim=inside)
        self._unwrapped = _Unwrapped(wrapping)
        self._events: list[Event] = []

    @property
    def is_within_call(self) -> bool:
        """True if the last call lacks a part of its arguments so far."""
        try:
            return self.has_calls and not isinstance(json.loads("".join(self._arguments)), dict)
        except (ValueError, RecursionError):
            return True

    def push(self, text: str) -> list[Event]:
        """Parse a chunk of text. Return its events, and those of text held back before it."""
        rest: str | None = text
        while rest:
            rest = self._part(self, rest)
        return self._take_events()

    def finish(self) -> list[Event]:
        """End the answer. Return events for the text held back, which is no marker."""
        if self._part == AnswerParser._calls and self._reader:
            self._add(self._reader.finish())
        elif self._part == AnswerParser._think or self._inside:
            self._think(self._held, last=True)
        else:
            self._emit(self._held + self._call.flush())
        self._show(self._unwrapped.flush(), last=True)
        return self._take_events()

    def _begin(self, text: str) -> str | None:
        """Parse the beginning of an answer, or the text after its reasoning."""
        head = self._held + text
        if not self._held:
            head = text.lstrip()
            self._emit(text[: len(text) - len(head)])
        self._held = ""
        if head and self._reasoning:
            start = self._reasoning.start
            if start.startswith(head) and start != head:
                self._held = head
                return None
            if self._inside or head.startswith(start):
                self._part, self._inside = AnswerParser._think, True
                self._content = _OutgoingText(trim=True)
                return head.removeprefix(start)
        if head:
            self._part = AnswerParser._text
            if self._reader and head[0] == self._reader.bare:
                self._begin_calls("")
        return head

    def _think(self, text: str, last: bool = False) -> str | None:
        shown, rest = self._end_of_thought.push(text)
        shown += self._end_of_thought.flush() if last else ""
        if shown := self._thought.push(shown):
            self._events.append(Reasoning(shown))
        if rest is not None:
            self._reasoning, self._inside, self._part = None, False, AnswerParser._begin
        return rest

    def _text(self, text: str) -> str | None:
        if self._reader is None:
            self._emit(text, last=not self._unwrapped.marks)
            return None
        shown, rest = self._call.push(text)
        self._emit(shown)
        if rest is not None:
            self._begin_calls(self._reader.marker)
        return rest

    def _begin_calls(self, opening: str) -> None:
        if self._reader:
            self._part = AnswerParser._calls
            self._reader.begin(opening)

    def _calls(self, text: str) -> str | None:
        if self._reader is None:
            return None
        events, rest = self._reader.push(text)
        self._add(events)
        if rest is not None:
            self._part = AnswerParser._text
        return rest

    def _add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self._emit(event.text)
                continue
            if isinstance(event, CallStart):
                self.has_calls, self._arguments = True, []
                self._show(self._unwrapped.flush())
                self._content = _OutgoingText(trim=True)  # drops the white space before the call
            elif isinstance(event, CallArguments):
                self._arguments.append(event.text)
            self._events.append(event)

    def _emit(self, text: str, last: bool = False) -> None:
        first, *others = self._unwrapped.push(text)
        self._show(first, last)
        for part in others:
            self._content = _OutgoingText(trim=True)  # drops the white space before the mark
            self._show(part, last)

    def _show(self, text: str, last: bool = False) -> None:
        if shown := self._content.push(text, last):
            self._events.append(Content(shown))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class _OutgoingText:
    """Text to emit. Trailing white space waits for more text; with `trim`, leading white space is dropped."""

    def __init__(self, trim: bool) -> None:
        self._trim = trim
        self._space: list[str] = []

    def push(self, text: str, last: bool = False) -> str:
        """Add text. Return the part that can be emitted: all of it, if it is the last."""
        if self._trim:
            text = text.lstrip()
        body = text.rstrip()
        space = text[len(body) :]
        if body:
            self._trim = False
            self._space, body = [], "".join(self._space) + body
        self._space.append(space)
        if last:
            self._space, body = [], body + "".join(self._space)
        return body


class _Unwrapped:
    """Text between certain marks; holds back a suffix that may be the beginning of one."""

    def __init__(self, marks: Sequence[str]) -> None:
        self.marks = tuple(marks)
        self._found = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._held = ""

    def push(self, text: str) -> list[str]:
        """Add text. Return the parts of it that marks separate."""
        *before, whole = self._found.split(self._held + text)
        longest = max(map(len, self.marks), default=1) - 1
        sizes = range(min(longest, len(whole)), 0, -1)
        keep = (n for n in sizes if any(mark.startswith(whole[len(whole) - n :]) for mark in self.marks))
        cut = len(whole) - next(keep, 0)
        self._held = whole[cut:]
        return [*before, whole[:cut]]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class _MarkerSearch:
    """Search for a marker in a stream; holds back a suffix that may be its beginning."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Return the text before the marker and, once it is found, the text after it."""
        whole = self._held + text
        before, found, rest = whole.partition(self._marker)
        if found:
            self._held = ""
            return before, rest
        size = min(len(self._marker) - 1, len(whole))
        while not self._marker.startswith(whole[len(whole) - size :]):
            size -= 1
        self._held = whole[len(whole) - size :]
        return whole[: len(whole) - size], None

    def flush(self) -> str:
        """Return the text held back, as nothing follows it."""
        held, self._held = self._held, ""
        return held
