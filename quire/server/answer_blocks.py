"""Blocks: an answer as a list of stretches of one kind each, for interfaces that number them.

A response as a whole is made of the same blocks that its stream tells of, so the two cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.errors import RequestError
from quire.server.chat_task import ChatEvent, Finish
from quire.server.logprob_json import LogprobCursor, Position
from quire.text.answer import CallArguments, CallStart, Content, Reasoning

TEXT, REASONING, CALL = "text", "reasoning", "call"


@dataclass(slots=True)
class Block:
    """Text, reasoning, or a call with its arguments. `cut`: the answer ended for length within it."""

    index: int
    kind: str
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)
    logprobs: list[Position] = field(default_factory=list)
    cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Opened(NamedTuple):
    """A block begins."""

    block: Block


class Grown(NamedTuple):
    """A block goes on with this text, for whose tokens these are the log-probabilities, if asked for."""

    block: Block
    text: str
    logprobs: Sequence[Position] = ()


class Closed(NamedTuple):
    """A block has ended."""

    block: Block


Step = Opened | Grown | Closed


class Blocks:
    """The blocks of one answer so far; the last is open until `finish` is there. There is at least one."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish = Finish("stop", None)

    def take_all(self, events: Iterable[ChatEvent], told: LogprobCursor) -> Iterator[Step]:
        """What events that are there together do, one step after the other.

        Log-probabilities that are new become those of the text that comes with them, or that they end.
        """
        news = told.advance()[1]
        for event in events:
            for step in self.take(event):
                if step.block.kind == TEXT and not isinstance(step, Opened):
                    step.block.logprobs += news
                    step, news = step._replace(logprobs=news) if isinstance(step, Grown) else step, []
                yield step

    def take(self, event: ChatEvent) -> list[Step]:
        """What an event of the answer does to its blocks."""
        match event:
            case Finish(reason):
                self.finish = event
                steps = [] if self.all else self._open(TEXT)
                self.all[-1].cut = reason == "length"
                return [*steps, Closed(self.all[-1])]
            case CallStart(_, call_id, name):
                return self._open(CALL, call_id, name)
            case Content(text):
                kind = TEXT
            case Reasoning(text):
                kind = REASONING
            case CallArguments(_, text):
                kind = CALL
        steps = [] if self.all and self.all[-1].kind == kind else self._open(kind)
        self.all[-1].parts.append(text)
        return [*steps, Grown(self.all[-1], text)]

    def _open(self, kind: str, call_id: str = "", name: str = "") -> list[Step]:
        steps: list[Step] = [Closed(self.all[-1])] if self.all else []
        self.all.append(Block(len(self.all), kind, call_id, name))
        return [*steps, Opened(self.all[-1])]


@contextmanager
def told_as(names: Mapping[str, str | Callable[[re.Match[str]], str]]) -> Iterator[None]:
    """A request that is refused is told in its interface's own words: pattern -> what stands for it there."""
    try:
        yield
    except RequestError as error:
        for pattern, own in names.items():
            error.message = re.sub(pattern, own, error.message)
            error.param = error.param and re.sub(pattern, own, error.param)
        raise
