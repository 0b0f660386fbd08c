"""The format of gpt-oss: an answer is messages, each with a header of its channel and recipient.

Reasoning is on the channel `analysis`, the text of the answer on `final`, and what is said before a call on
`commentary`. A call is a message to a function; its text is the JSON object of arguments, and the answer
ends with it. What has no header, or one that makes no sense, is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from quire.text.answer import CallArguments, CallStart, Content, Event, Reasoning
from quire.text.tools.functions import Function
from quire.text.tools.grammar import lazy, with_content
from quire.text.tools.json_calls import JsonCalls

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ASSISTANT = f"{START}assistant"
_MAX_HEADER = 512  # characters
_CHANNEL, _RECIPIENT = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")
_HEADS = (START, CHANNEL, "to=")  # what a header begins with
_ENDS = (END, CALL, RETURN, START)  # marks that end a message
_ENDING = re.compile("|".join(map(re.escape, _ENDS)))


class Harmony(JsonCalls):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`."""

    name = "harmony"
    aliases: tuple[str, ...] = ("openai",)
    marker = f"{CHANNEL}commentary to=functions."
    whole = True

    @property
    def tokens(self) -> tuple[str, ...]:
        return (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

    @classmethod
    def matches(cls, source: str) -> bool:
        """Look for the marks of headers."""
        return CHANNEL in source and MESSAGE in source

    def grammar(self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]) -> str:
        """Return Lark rules, of which `calls` is a call with its header: there is one in an answer."""
        channel, kind = mark(CHANNEL), f'/ ?/ ({mark(CONSTRAIN)}? "json")? {mark(MESSAGE)}'
        each, rules = [], []
        for number, function in enumerate(functions):
            recipient = f"to=functions.{function.name}"
            each.append(f"{channel} {json.dumps(f'commentary {recipient}')} {kind} args_{number}")
            each.append(f'{json.dumps(f" {recipient}")} {channel} "commentary" {kind} args_{number}')
            rules.append(f"args_{number}: %json {json.dumps(function.schema)}")
        return "\n".join((f"calls: {' | '.join(each)}", *rules))

    def answer_grammar(
        self, calls: str, required: bool, content: str | None, prompt: str, mark: Callable[[str], str]
    ) -> str:
        """Return the grammar of a whole answer, in llguidance's JSON.

        `calls` are the rules of `grammar`, "" if none is allowed; `content` is as in AnswerGrammar.
        """
        words = "TEXT" if content is None else "@content"
        begin, said = f'{mark(START)} "assistant"', f"said{lazy(mark(END))}: TEXT {mark(END)}"
        final = f'{mark(CHANNEL)} "final" {mark(MESSAGE)} {words}'
        before = f'{mark(CHANNEL)} ("analysis" | "commentary") {mark(MESSAGE)} said {begin}'
        if content is not None:
            before = before.replace(' | "commentary"', "")  # would be text that does not follow the grammar
        answer = f"before* ({'calls' if required else final}{' | calls' if calls and not required else ''})"
        opening = opened(prompt)
        if MESSAGE in opening:
            answer = words if f"{CHANNEL}final" in opening else f"said {begin} {answer}"
        barred = " ".join(f"& ~(/(?s:.*)/ {json.dumps(end)} /(?s:.*)/)" for end in _ENDS)
        rules = (f"start: {answer}", f"before: {before}", said, f"TEXT: /(?s:.*)/ {barred}", calls)
        return with_content("\n".join(rules), content)

    def reader(self, functions: Sequence[Function]) -> HarmonyReader:
        """Make a reader of one answer."""
        return HarmonyReader(self, frozenset(function.name for function in functions))


def opened(prompt: str) -> str:
    """Return the part of an answer that its prompt has already: "", or the beginning of a message."""
    _, begun, opening = prompt.rpartition(_ASSISTANT)
    return opening.removesuffix("\n") if begun else ""


class HarmonyReader:
    """Incremental parser of a whole answer (see `quire.text.answer.CallReader`)."""

    bare, whole = "", True

    def __init__(self, syntax: Harmony, names: frozenset[str]) -> None:
        self.marker = syntax.marker
        self._new_id = syntax.new_id
        self._names = names
        self._num_calls = 0
        self._events: list[Event] = []
        self.begin("")

    def begin(self, opening: str) -> None:
        self._held = ""  # a header so far, or what may be the beginning of a mark
        self._body: Callable[[str], None] | None = None  # takes the text of the message that has begun
        self._said = set[type]()  # kinds of text there were
        self._is_new = False  # nothing of this message is emitted
        self.push(opening)
        self._said = set()

    def push(self, text: str) -> tuple[list[Event], str | None]:
        self._held += text
        while self._held and (self._read_body() if self._body else self._read_header()):
            pass
        events, self._events = self._events, []
        return events, None

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._body:
            self._body(held)
            self._end_body()
        elif not held.startswith(_HEADS):
            self._emit(Content, held)
        return self._events

    def _read_header(self) -> bool:
        """Parse a header, if there is a whole one. Return False if more text is needed."""
        head = self._held.lstrip()
        if not head:
            return False
        at = self._held.find(MESSAGE, 0, _MAX_HEADER + len(MESSAGE))
        if not any(head.startswith(mark) or mark.startswith(head) for mark in _HEADS) or (
            at < 0 and len(self._held) >= _MAX_HEADER + len(MESSAGE)
        ):
            self._begin_body("", "")
            return True
        if at >= 0:
            header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
            channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
            if recipient and recipient[1].removeprefix("functions.") not in self._names:
                self._held = f"{header.lstrip().removeprefix(_ASSISTANT)}{MESSAGE}{self._held}"
                recipient = None
            self._begin_body(channel[1] if channel else "", recipient[1] if recipient else "")
        return at >= 0

    def _begin_body(self, channel: str, recipient: str) -> None:
        self._is_new = True
        if recipient:
            name = recipient.removeprefix("functions.")
            self._events.append(CallStart(self._num_calls, self._new_id(name), name))
            self._num_calls += 1
            self._body = self._emit_arguments
        else:
            kind = Reasoning if channel == "analysis" else Content
            self._body = lambda text: self._emit(kind, text)

    def _read_body(self) -> bool:
        """Parse the text of a message. Return False if more of it is needed."""
        found = _ENDING.search(self._held)
        sizes = range(min(max(map(len, _ENDS)) - 1, len(self._held)), 0, -1)
        held = (n for n in sizes if any(end.startswith(self._held[-n:]) for end in _ENDS))
        cut = found.start() if found else len(self._held) - next(held, 0)
        if self._body:
            self._body(self._held[:cut])
        self._held = self._held[found.end() if found and found[0] != START else cut :]
        if found:
            self._end_body()
        return found is not None

    def _end_body(self) -> None:
        if self._body == self._emit_arguments and self._is_new:
            self._emit_arguments("{}")
        self._body = None

    def _emit(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if text:
            text = f"\n\n{text}" if self._is_new and kind in self._said else text
            self._said.add(kind)
            self._is_new = False
            self._events.append(kind(text))

    def _emit_arguments(self, text: str) -> None:
        if text.strip() or not self._is_new:
            self._is_new = False
            self._events.append(CallArguments(self._num_calls - 1, text))
