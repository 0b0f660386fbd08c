"""Shared parts of the formats whose calls are JSON objects, {"name": ..., "arguments": {...}}.

The reader parses objects incrementally. It looks at quotes and brackets alone, evaluates nothing, and emits
arguments as the model writes them. Keys may come in any order.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from quire.text.answer import CallArguments, CallReader, CallStart, Content, Event
from quire.text.tools.functions import Function

MAX_CALLS = 128
MAX_NESTING = 64
MAX_SHORT = 512  # characters of a key, a name, or an id, which some models write
_SPACE = " \t\r\n"
_T = TypeVar("_T")
_FIELDS = {
    **dict.fromkeys(("name", "tool_name"), "name"),
    **dict.fromkeys(("arguments", "parameters"), "arguments"),
    **dict.fromkeys(("id", "tool_call_id"), "id"),
    "type": "type",
}


# A parser of a part of a call. It is sent one character at a time, and yields a scanner to hand over to.
Reading = Generator["JsonScanner | None", str, _T]


class JsonCalls:
    """A format of this family. A subclass defines its marks, detection and grammar.

    After the marker come `opening`, then objects with `separator` between them, then `closing`.
    """

    name: str
    aliases: tuple[str, ...] = ()
    marker: str
    bare: str = ""
    whole: bool = False
    opening: str = ""
    separator: str = ""
    closing: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    arguments_first: bool = False
    max_calls: int = MAX_CALLS

    def __init__(self, source: str) -> None:
        """All models of a format are alike, unless a subclass reads differences from `source`."""

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, self.closing)

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        """Return Lark for the marker's first `call`, for each further one, and for the end."""
        raise NotImplementedError

    def grammar(self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]) -> str:
        """Return Lark rules, of which `calls` is what follows the marker (see `ToolFormat`)."""
        each = [self.call(number, function.name, mark) for number, function in enumerate(functions)]
        schemas = [f"args_{i}: %json {json.dumps(function.schema)}" for i, function in enumerate(functions)]
        first, further, end = self.calls(mark)
        more = f"({further}){{0,{self.max_calls - 1}}}" if several and self.max_calls > 1 else ""
        return "\n".join((f"calls: {first} {more} {end}", f"call: {' | '.join(each)}", *schemas))

    def reader(self, functions: Sequence[Function]) -> CallReader:
        """Make a reader of the calls of one answer."""
        return JsonCallReader(self, frozenset(function.name for function in functions))

    def new_id(self, name: str) -> str:
        """Make an id for a call of this function, by which the tool's result refers to it."""
        return f"call_{secrets.token_hex(12)}"

    def call(self, number: int, name: str, mark: Callable[[str], str]) -> str:
        """Return Lark for a call of this function, whose arguments are the rule `args_NUMBER`."""
        if self.arguments_first:
            opening, closing = f'{{"{self.arguments_key}": ', f', "{self.name_key}": "{name}"}}'
        else:
            opening, closing = f'{{"{self.name_key}": "{name}", "{self.arguments_key}": ', "}"
        return f"{json.dumps(opening)} args_{number} {json.dumps(closing)}"


class JsonCallReader:
    """Incremental parser of the calls of one answer (see `quire.text.answer.CallReader`)."""

    whole = False

    def __init__(self, syntax: JsonCalls, names: frozenset[str]) -> None:
        self.marker, self.bare = syntax.marker, syntax.bare
        self._syntax = syntax
        self._names = names
        self._num_calls = 0
        self._events: list[Event] = []
        self.begin("")

    def begin(self, opening: str) -> None:
        self._unparsed: list[str] | None = [opening]  # returned as content unless a call starts
        self._whole = self._ended = False  # whole: after a call, and not within another
        self._value: JsonScanner | None = None
        self._reading = self._read_calls()
        next(self._reading)

    def push(self, text: str) -> tuple[list[Event], str | None]:
        at = 0
        while at < len(text) and not self._ended:
            start, unparsed = at, self._unparsed
            at = self._advance(text, at)
            if unparsed is not None:
                unparsed.append(text[start:at])
        if self._ended:
            self._give_back()
        events, self._events = self._events, []
        return events, text[at:] if self._ended else None

    def finish(self) -> list[Event]:
        if not self._whole:  # otherwise at most a closing mark is missing
            self._give_back()
        return self._events

    def _advance(self, text: str, at: int) -> int:
        """Parse one character, or as much as belongs to the value at hand. Return the next position."""
        try:
            if self._value is None:
                self._value = self._reading.send(text[at])
                return at + 1
            at = self._value.push(text, at)
            self._ended = self._value.broken
            if self._value.done:
                self._value = next(self._reading)
        except ValueError:
            self._ended = True
        return at

    def _give_back(self) -> None:
        if unparsed := "".join(self._unparsed or ()):
            self._events.append(Content(unparsed))

    # Parsers of the parts of calls. An unexpected character raises ValueError.

    def _read_calls(self) -> Reading[None]:
        if self._syntax.opening:
            yield from expect(self._syntax.opening)
        while True:
            yield from self._read_call()
            char = yield from expect(self._syntax.separator + self._syntax.closing[:1])
            if char != self._syntax.separator:
                break
        yield from exactly(self._syntax.closing[1:])
        self._unparsed, self._ended = None, True
        yield None

    def _read_call(self) -> Reading[None]:
        yield from expect("{")
        self._whole = False
        name, early, seen = "", list[str](), set[str]()
        while True:
            key = _FIELDS.get((yield from _string()), "")
            if not key or key in seen:
                raise ValueError
            seen.add(key)
            yield from expect(":")
            if key == "arguments":
                yield from expect("{")
                if name:
                    self._start(name)
                yield JsonScanner("{", self._emit_arguments if name else early.append)
            else:
                text = yield from _string()
                if key == "name":
                    name = self._known(text)
                    if early:
                        self._start(name)
                        self._emit_arguments("".join(early))
            if (yield from expect(",}")) == "}":
                break
        self._known(name)
        if "arguments" not in seen:
            self._start(name)
            self._emit_arguments("{}")
        self._unparsed, self._whole = [], True

    def _read_arguments(self, name: str, call_id: str = "") -> Reading[None]:
        """Parse the object of arguments that follows the name of its function."""
        yield from expect("{")
        self._start(name, call_id)
        yield JsonScanner("{", self._emit_arguments)
        self._unparsed, self._whole = [], True

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise ValueError
        return name

    def _start(self, name: str, call_id: str = "") -> None:
        self._events.append(CallStart(self._num_calls, call_id or self._syntax.new_id(name), name))
        self._num_calls += 1
        self._unparsed = None

    def _emit_arguments(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments):
            self._events[-1] = last._replace(text=last.text + text)
        else:
            self._events.append(CallArguments(self._num_calls - 1, text))


def expect(expected: str) -> Reading[str]:
    """Skip white space, then take and return a character, which must be one of these."""
    while (char := (yield None)) in _SPACE:
        pass
    if char not in expected:
        raise ValueError
    return char


def until(end: str) -> Reading[str]:
    """Take text up to and including this character; return it without the character."""
    text = ""
    while (char := (yield None)) != end:
        text += char
        if len(text) > MAX_SHORT:
            raise ValueError
    return text


def one_of(*marks: str) -> Reading[str]:
    """Skip white space, then take and return one of these marks, of which none begins another."""
    text = ""
    while text not in marks:
        char = yield None
        if text or char not in _SPACE:
            text += char
            if not any(mark.startswith(text) for mark in marks):
                raise ValueError
    return text


def exactly(expected: str) -> Reading[None]:
    """Take exactly these characters."""
    for each in expected:
        if (yield None) != each:
            raise ValueError


def _string() -> Reading[str]:
    pieces: list[str] = []
    yield from expect('"')
    yield JsonScanner('"', pieces.append, MAX_SHORT)
    return str(json.loads("".join(pieces)))


class JsonScanner:
    """Incremental search for the end of a JSON string or object by quotes and brackets.

    `take` is called with each piece of the value, which has at most `limit` characters after the first.
    """

    def __init__(self, first: str, take: Callable[[str], object], limit: float = math.inf) -> None:
        self.done = self.broken = False
        self._take = take
        self._left = limit
        self._quoted = first == '"'
        self._escaped = False
        self._open = [] if self._quoted else ["}"]  # closing brackets to expect, innermost last
        take(first)

    def push(self, text: str, at: int) -> int:
        """Scan on from `at`. Return the position where the value or the text ends, or the value breaks."""
        start, stop = at, int(min(len(text), at + self._left))
        while at < stop and not (self.done or self.broken):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_QUOTED if self._quoted else _PLAIN).search(text, at, stop)
            at, char = (found.end(), found[0]) if found else (stop, "")
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = not self._quoted
            elif char in ("{", "["):
                self._open.append("}" if char == "{" else "]")
                self.broken = len(self._open) > MAX_NESTING
            elif char:
                self.broken = self._open.pop() != char
            at -= self.broken
            self.done = not (self._quoted or self._open or self.broken)
        if at > start:
            self._take(text[start:at])
        self._left -= at - start
        self.broken = self.broken or (self._left <= 0 and not self.done)
        return at


_QUOTED, _PLAIN = re.compile(r'["\\]'), re.compile(r'[\[\]{}"]')
