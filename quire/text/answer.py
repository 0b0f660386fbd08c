"""What a model wrote, taken apart while it comes: reasoning, content, tool calls.

The text arrives in pieces of any size; the events, neighbours of one kind joined, do not depend on how it
was cut. Only what may be the beginning of a marker is held back, and white space, which belongs to a marker
that follows it. Time is linear in the text. A call that turns out to be none becomes content, character for
character; one that breaks off behind the beginning of its arguments stays as it was streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.text.reasoning import ReasoningFormat


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text of what the model thought before it answered."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins. `index` numbers the calls of this answer."""

    index: int  # type: ignore[assignment]  # the method of tuples by this name is not missed
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments, as the model wrote them: JSON text."""

    index: int  # type: ignore[assignment]
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class CallReader(Protocol):
    """Reads calls of one format: the text from a marker on, until it says that the calls have ended."""

    marker: str  # what begins calls anywhere in a text
    bare: bool  # an answer that begins with "{" is a call too

    def begin(self, opening: str) -> None:
        """Calls begin. `opening` is the marker that was met; "" where a call begins without one."""

    def push(self, text: str) -> tuple[list[Event], str | None]:
        """What this text says and, once the calls have ended, what stands behind them."""

    def finish(self) -> list[Event]:
        """What was held back, when the text ends within calls."""


class AnswerParser:
    """Turns the text of one answer into events.

    With `inside`, the prompt has already opened the reasoning. Without a reader, calls are content.
    """

    def __init__(
        self, reasoning: ReasoningFormat | None = None, inside: bool = False, reader: CallReader | None = None
    ) -> None:
        self.has_calls = False
        self._reasoning = reasoning
        self._inside = inside
        self._reader = reader
        self._part = AnswerParser._begin  # takes text in, returns what belongs to the next part
        self._held = ""  # at the beginning: what may become a marker
        self._end_of_thought = _Marker(reasoning.end if reasoning else "")
        self._call = _Marker(reader.marker if reader else "")
        self._thought = _Flow(trim=True)
        self._content = _Flow(trim=inside)
        self._events: list[Event] = []

    def push(self, text: str) -> list[Event]:
        """The events of this piece of text, and of what was held back before it."""
        rest: str | None = text
        while rest:
            rest = self._part(self, rest)
        return self._take_events()

    def finish(self) -> list[Event]:
        """The text has ended: what was held back is no marker."""
        if self._part == AnswerParser._calls and self._reader:
            self._add(self._reader.finish())
        elif self._part == AnswerParser._think or self._inside:
            self._think(self._held, last=True)
        else:
            self._say(self._held + self._call.flush())
        self._say("", last=True)
        return self._take_events()

    def _begin(self, text: str) -> str | None:
        """The beginning of an answer, or what follows its reasoning."""
        head = self._held + text
        if not self._held:
            head = text.lstrip()
            self._say(text[: len(text) - len(head)])
        self._held = ""
        if head and self._reasoning:
            start = self._reasoning.start
            if start.startswith(head) and start != head:
                self._held = head
                return None
            if self._inside or head.startswith(start):
                self._part, self._inside = AnswerParser._think, True
                self._content = _Flow(trim=True)
                return head.removeprefix(start)
        if head:
            self._part = AnswerParser._text
            if self._reader and self._reader.bare and head[0] == "{":
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
            self._say(text, last=True)
            return None
        shown, rest = self._call.push(text)
        self._say(shown)
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
                self._say(event.text)
                continue
            if isinstance(event, CallStart):
                self.has_calls = True
                self._content = _Flow(trim=True)  # the white space before it was the call's
            self._events.append(event)

    def _say(self, text: str, last: bool = False) -> None:
        if shown := self._content.push(text, last):
            self._events.append(Content(shown))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class _Flow:
    """Text on its way out. White space waits for what follows it; with `trim`, none comes first."""

    def __init__(self, trim: bool) -> None:
        self._trim = trim
        self._space: list[str] = []

    def push(self, text: str, last: bool = False) -> str:
        """What can be shown: all of it, if it is the last."""
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


class _Marker:
    """Looks for a marker in a stream, holding back what may be the beginning of one."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is not the marker's and, once the marker was met, what stands behind it."""
        whole = self._held + text
        before, met, rest = whole.partition(self._marker)
        if met:
            self._held = ""
            return before, rest
        size = min(len(self._marker) - 1, len(whole))
        while not self._marker.startswith(whole[len(whole) - size :]):
            size -= 1
        self._held = whole[len(whole) - size :]
        return whole[: len(whole) - size], None

    def flush(self) -> str:
        """What was held back, when nothing follows it."""
        held, self._held = self._held, ""
        return held
