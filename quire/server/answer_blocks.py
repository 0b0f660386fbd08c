"""An answer as numbered blocks of one kind each, for the APIs that number them (Responses and Messages).

A whole response is built from the same blocks as the events of its stream, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from quire.server.chat_task import ChatEvent, Finish
from quire.server.event_stream import encode
from quire.server.logprob_json import Position
from quire.text.answer import CallArguments, CallStart, Content, Reasoning

TEXT, REASONING, CALL = "text", "reasoning", "call"
_KINDS = {Content: TEXT, Reasoning: REASONING, CallArguments: CALL}


@dataclass(slots=True)
class Block:
    """Text, reasoning, or a call with its arguments. `cut`: the answer ended within it.

    That is at the token limit or, within a call, at a stop string or token.
    """

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


class BlockChange(NamedTuple):
    """A block starts, grows by `text` (with the log-probabilities of its tokens, if requested), or stops."""

    kind: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""
    logprobs: Sequence[Position] = ()


class AnswerBlocks:
    """The blocks of one answer so far, at least one at the end. The last is open until `finish` arrives."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish = Finish("stop", None)

    def add(self, events: Iterable[ChatEvent], logprobs: Sequence[Position] = ()) -> list[BlockChange]:
        """Add events that arrived together and return the changes to the blocks.

        Log-probabilities go to the first text that grows or, if none does, that stops.
        """
        changes = [change for event in events for change in self._add(event)]
        if logprobs:
            for number, change in enumerate(changes):
                if change.block.kind == TEXT and change.kind != "start":
                    change.block.logprobs += logprobs
                    changes[number] = change._replace(logprobs=logprobs)
                    break
        return changes

    def _add(self, event: ChatEvent) -> list[BlockChange]:
        if isinstance(event, Finish):
            self.finish = event
            changes = [] if self.all else self._start(TEXT)
            calls = self.all[-1].kind == CALL
            self.all[-1].cut = event.reason == "length" or (calls and event.reason != "tool_calls")
            return [*changes, BlockChange("stop", self.all[-1])]
        if isinstance(event, CallStart):
            return self._start(CALL, event.id, event.name)
        kind = _KINDS[type(event)]
        changes = [] if self.all and self.all[-1].kind == kind else self._start(kind)
        self.all[-1].parts.append(event.text)
        return [*changes, BlockChange("delta", self.all[-1], event.text)]

    def _start(self, kind: str, call_id: str = "", name: str = "") -> list[BlockChange]:
        changes = [BlockChange("stop", self.all[-1])] if self.all else []
        self.all.append(Block(len(self.all), kind, call_id, name))
        return [*changes, BlockChange("start", self.all[-1])]


def encode_event(event: Struct) -> bytes:
    """Encode a server-sent event whose name is the tag of its Struct."""
    return b"event: %s\ndata: %s\n\n" % (str(event.__struct_config__.tag).encode(), encode(event))
