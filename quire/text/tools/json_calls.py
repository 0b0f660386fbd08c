"""What formats have in common whose calls are JSON objects, {"name": ..., "arguments": {...}}.

The reader follows an object while it comes. It looks at quotes and brackets alone, evaluates nothing, and
gives arguments away as the model writes them. Keys may come in any order.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence

from quire.text.answer import CallArguments, CallStart, Content, Event
from quire.text.tools.functions import Function

MAX_CALLS = 128
MAX_NESTING = 64
MAX_SHORT = 512  # characters of a key, a name, or the id that some models write
_SPACE = " \t\r\n"
_FIELDS = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}


class JsonCalls:
    """A format of this family. A subclass states its marks, when a model speaks it, and its grammar.

    Behind the marker come `opening`, then objects with `separator` between them, then `closing`.
    """

    name: str
    marker: str
    bare: bool = False
    opening: str = ""
    separator: str = ""
    closing: str = ""
    arguments_key: str = "arguments"
    arguments_first: bool = False
    max_calls: int = MAX_CALLS

    def __init__(self, source: str) -> None:
        """Models differ in nothing, unless a subclass says so."""

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.marker, self.closing)

    def calls(self, mark: Callable[[str], str]) -> tuple[str, str, str]:
        """In Lark: the marker's first `call`, each further one, and the end."""
        raise NotImplementedError

    def grammar(self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]) -> str:
        """Lark rules: `calls` is what follows the marker. `mark` writes a marker, a token or text."""
        each = [self._call(number, function.name) for number, function in enumerate(functions)]
        schemas = [f"args_{i}: %json {json.dumps(function.schema)}" for i, function in enumerate(functions)]
        first, further, end = self.calls(mark)
        more = f"({further}){{0,{self.max_calls - 1}}}" if several and self.max_calls > 1 else ""
        return "\n".join((f"calls: {first} {more} {end}", f"call: {' | '.join(each)}", *schemas))

    def reader(self, functions: Sequence[Function]) -> JsonCallReader:
        """What reads the calls of one answer."""
        return JsonCallReader(self, frozenset(function.name for function in functions))

    def new_id(self) -> str:
        """The id of a call, by which a tool's answer will refer to it."""
        return f"call_{secrets.token_hex(12)}"

    def _call(self, number: int, name: str) -> str:
        if self.arguments_first:
            opening, closing = f'{{"{self.arguments_key}": ', f', "name": "{name}"}}'
        else:
            opening, closing = f'{{"name": "{name}", "{self.arguments_key}": ', "}"
        return f"{json.dumps(opening)} args_{number} {json.dumps(closing)}"


class JsonCallReader:
    """Reads the calls of one answer (see `quire.text.answer.CallReader`)."""

    def __init__(self, syntax: JsonCalls, names: frozenset[str]) -> None:
        self.marker, self.bare = syntax.marker, syntax.bare
        self._syntax = syntax
        self._names = names
        self._num_calls = 0
        self._events: list[Event] = []
        self.begin("")

    def begin(self, opening: str) -> None:
        self._unsaid: list[str] | None = [opening]  # becomes content unless a call starts
        self._ended = self._whole = False  # whole: behind a call, and in no other
        self._closing = self._syntax.closing
        self._value: _Value | None = None
        self._expect = self._opening if self._syntax.opening else self._object

    def push(self, text: str) -> tuple[list[Event], str | None]:
        at = 0
        while at < len(text) and not self._ended:
            start, unsaid = at, self._unsaid
            if self._value:
                at = self._read_value(self._value, text, at)
            elif text[at] in _SPACE or self._expect(text[at]):
                at += 1
            else:
                self._ended = True
            if unsaid is not None:
                unsaid.append(text[start:at])
        if self._ended:
            self._give_back()
        events, self._events = self._events, []
        return events, text[at:] if self._ended else None

    def finish(self) -> list[Event]:
        if not self._whole:  # only the end of the last call's mark can be missing otherwise
            self._give_back()
        return self._events

    def _give_back(self) -> None:
        if unsaid := "".join(self._unsaid or ()):
            self._events.append(Content(unsaid))

    # What may stand between values. Each takes a character; False: it is not to be here.

    def _opening(self, char: str) -> bool:
        self._expect = self._object
        return char == self._syntax.opening

    def _object(self, char: str) -> bool:
        self._whole, self._started = False, False
        self._function = ""
        self._early: list[str] = []  # arguments that came before the name
        self._seen: set[str] = set()
        self._expect = self._key
        return char == "{"

    def _key(self, char: str) -> bool:
        self._field = ""
        return char == '"' and self._begin_value(char)

    def _colon(self, char: str) -> bool:
        self._expect = self._content
        return char == ":"

    def _content(self, char: str) -> bool:
        if self._field != "arguments":
            return char == '"' and self._begin_value(char)
        if char == "{" and self._function:
            self._start_call()
        return char == "{" and self._begin_value(char)

    def _comma(self, char: str) -> bool:
        self._expect = self._key
        return char == "," or (char == "}" and self._end_object())

    def _after(self, char: str) -> bool:
        """Behind a call: another one, or the closing mark, or (where there is none) the end."""
        if char == self._syntax.separator:
            self._expect = self._object
            return True
        self._expect = self._after_all
        return self._after_all(char)

    def _after_all(self, char: str) -> bool:
        right = self._closing.startswith(char)
        self._closing = self._closing[1:]
        if right and not self._closing:
            self._unsaid, self._ended = None, True
        return right

    # Values: keys, names and arguments

    def _begin_value(self, char: str) -> bool:
        self._value, self._short = _Value(char), ""
        self._take(char)
        return True

    def _read_value(self, value: _Value, text: str, at: int) -> int:
        stop = len(text) if self._field == "arguments" else min(len(text), at + MAX_SHORT - len(self._short))
        end = value.push(text, at, stop)
        self._take(text[at:end])
        if value.done:
            self._value = None
            self._ended = not self._end_value()
        else:
            self._ended = value.broken or len(self._short) >= MAX_SHORT
        return end

    def _take(self, piece: str) -> None:
        if self._field != "arguments":
            self._short += piece
        elif self._started:
            self._say_arguments(piece)
        else:
            self._early.append(piece)

    def _say_arguments(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments):
            self._events[-1] = last._replace(text=last.text + text)
        else:
            self._events.append(CallArguments(self._num_calls - 1, text))

    def _end_value(self) -> bool:
        """A key or a value is complete. False if it is not a call's."""
        if self._field == "arguments":
            self._expect = self._comma
            return True
        try:
            text = str(json.loads(self._short))
        except ValueError:
            return False
        if not self._field:
            self._field, self._expect = _FIELDS.get(text, ""), self._colon
            new = self._field not in self._seen
            self._seen.add(self._field)
            return bool(self._field) and new
        self._expect = self._comma
        if self._field == "name":
            self._function = text
            if text in self._names and self._early:
                self._start_call()
            return text in self._names
        return True

    def _start_call(self) -> None:
        self._events.append(CallStart(self._num_calls, self._syntax.new_id(), self._function))
        self._num_calls += 1
        self._unsaid, self._started = None, True
        if self._early:
            self._say_arguments("".join(self._early))

    def _end_object(self) -> bool:
        if not self._function:
            return False
        if not self._started:  # it has no arguments
            self._early = ["{}"]
            self._start_call()
        self._unsaid, self._whole, self._expect = [], True, self._after
        return True


class _Value:
    """Finds the end of a JSON string or object that comes in pieces, by its quotes and brackets."""

    def __init__(self, first: str) -> None:
        self.done = self.broken = False
        self._quoted = first == '"'
        self._escaped = False
        self._open = [] if self._quoted else ["}"]  # the brackets that will close

    def push(self, text: str, at: int, stop: int) -> int:
        """Where the value ends or breaks; `stop` if it goes on."""
        while at < stop and not self.done:
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_QUOTED if self._quoted else _PLAIN).search(text, at, stop)
            if found is None:
                return stop
            at, char = found.end(), found[0]
            if self._quoted:
                self._escaped, self._quoted = char == "\\", char == "\\"
            elif not self._bracket(char):
                self.broken = True
                return at - 1
            self.done = not self._quoted and not self._open
        return at

    def _bracket(self, char: str) -> bool:
        if char == '"':
            self._quoted = True
        elif char in _CLOSING:
            self._open.append(_CLOSING[char])
            return len(self._open) <= MAX_NESTING
        else:
            return self._open.pop() == char
        return True


_QUOTED, _PLAIN = re.compile(r'["\\]'), re.compile(r'[\[\]{}"]')
_CLOSING = {"{": "}", "[": "]"}
