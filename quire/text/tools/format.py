"""What a format of tool calls is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.text.answer import CallReader
from quire.text.tools.functions import Function


class ToolFormat(Protocol):
    """How a model writes calls: what begins them, their grammar, their reader."""

    name: str
    marker: str  # begins calls anywhere in an answer
    bare: bool  # an answer that begins with "{" is a call too

    def __init__(self, source: str) -> None:
        """`source` is the model's chat template, for what differs between models of one format."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The marker and the other marks that may be single tokens of the vocabulary."""

    @classmethod
    def matches(cls, source: str) -> bool:
        """True if a model with this chat template writes calls so."""

    def grammar(self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]) -> str:
        """Lark rules; rule `calls` is what follows the marker. `mark` spells a mark, as token or text."""

    def reader(self, functions: Sequence[Function]) -> CallReader:
        """What reads the calls of one answer."""

    def new_id(self) -> str:
        """The id of a call, by which a tool's answer will refer to it."""
