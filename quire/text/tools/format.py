"""The interface of a format of tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.text.answer import CallReader
from quire.text.tools.functions import Function


class ToolFormat(Protocol):
    """A format of tool calls: the marker that begins them, their grammar, their reader."""

    name: str
    aliases: tuple[str, ...]  # the names that vLLM has for it, where they differ
    marker: str  # begins calls anywhere in an answer
    bare: str  # an answer that begins with this character is a call, too; "" if there is none
    whole: bool  # its reader reads all of an answer, and not only calls

    def __init__(self, source: str) -> None:
        """`source` is the model's chat template, for differences between models of one format."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The marker and all other marks that may be single tokens of a vocabulary."""

    @classmethod
    def matches(cls, source: str) -> bool:
        """Return True if a model with this chat template writes calls in this format."""

    def grammar(self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]) -> str:
        """Return Lark rules; `calls` is what follows the marker. `mark` writes a mark as token or text."""

    def reader(self, functions: Sequence[Function]) -> CallReader:
        """Make a reader of the calls of one answer."""

    def new_id(self, name: str) -> str:
        """Make an id for a call of this function, by which the tool's result refers to it."""
