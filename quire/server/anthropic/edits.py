"""`context_management`: edits that shorten a conversation before the model reads it.

Meanings are those of Anthropic's "context editing". Nothing is kept between requests: a client sends the
whole conversation each time, and the same edits shorten it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import replace

from quire.errors import RequestError
from quire.server.anthropic.turns import InputBlock, Turn, blocks_of, is_result

CLEARED = "[cleared to shorten the conversation]"
MAX_EDITS = 8  # each may take a rendering of the prompt
Count = Annotated[int, Meta(ge=0)]


class Trigger(Struct, frozen=True):
    """The size that a conversation must exceed before an edit is made."""

    type: Literal["input_tokens", "tool_uses"]
    value: Count


class Tokens(Struct):
    """A number of tokens."""

    type: Literal["input_tokens"]
    value: Count


class ToolUses(Struct, frozen=True):
    """A number of calls, the latest ones."""

    type: Literal["tool_uses"]
    value: Count


class ThinkingTurns(Struct, frozen=True):
    """A number of the assistant's turns, the latest ones; or all."""

    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Meta(ge=1)] = 1


class ClearedToolUses(Struct, tag="clear_tool_uses_20250919"):
    """The outcome of a ClearToolUses."""

    cleared_tool_uses: int
    cleared_input_tokens: int


class ClearedThinking(Struct, tag="clear_thinking_20251015"):
    """The outcome of a ClearThinking."""

    cleared_thinking_turns: int
    cleared_input_tokens: int


class ClearToolUses(Struct, kw_only=True):
    """Clear the results of all calls but the latest, and with `clear_tool_inputs` their arguments.

    Nothing is cleared where that would save fewer tokens than `clear_at_least`.
    """

    trigger: Trigger = Trigger("input_tokens", 100_000)
    keep: ToolUses = ToolUses("tool_uses", 3)
    clear_at_least: Tokens | None = None
    exclude_tools: frozenset[str] | None = None
    clear_tool_inputs: bool | frozenset[str] | None = None

    @property
    def needs_tokens(self) -> bool:
        return self.trigger.type == "input_tokens"

    def make(self, turns: Sequence[Turn], num_tokens: int) -> tuple[list[Turn], int]:
        """The turns with old results cleared, and how many; none unless the trigger is met."""
        results = {block.tool_use_id for turn in turns for block in blocks_of(turn) if is_result(block)}
        uses = [
            block for turn in turns for block in blocks_of(turn) if _is_use(block) and block.id in results
        ]
        if (num_tokens if self.needs_tokens else len(uses)) <= self.trigger.value:
            return [*turns], 0
        end = max(len(uses) - self.keep.value, 0)
        excluded, latest = self.exclude_tools or (), {block.id for block in uses[end:]}
        old = {block.id for block in uses[:end] if block.name not in excluded} - latest
        return [_mapped(turn, partial(self._cleared, old)) for turn in turns], len(old)

    def _cleared(self, old: Container[str | None], block: InputBlock) -> InputBlock:
        if is_result(block) and block.tool_use_id in old:
            return replace(block, content=CLEARED, is_error=None)
        inputs = self.clear_tool_inputs or ()
        if _is_use(block) and block.id in old and (inputs is True or block.name in inputs):
            return replace(block, input={})
        return block

    def applied(self, number: int, num_tokens: int) -> ClearedToolUses | None:
        """Return the reported outcome; None if the edit saves too few tokens to be made."""
        least = self.clear_at_least.value if self.clear_at_least is not None else 0
        return ClearedToolUses(number, num_tokens) if num_tokens >= max(least, 1) else None


class ClearThinking(Struct, kw_only=True):
    """Clear what the model thought in all but its latest turns.

    A turn of the model goes on over the results of its calls, up to what a user says.
    """

    keep: Literal["all"] | ThinkingTurns = ThinkingTurns("thinking_turns", 1)

    @property
    def needs_tokens(self) -> bool:
        return False

    def make(self, turns: Sequence[Turn], num_tokens: int) -> tuple[list[Turn], int]:
        """The turns without old thoughts, and from how many turns of the model these were taken."""
        if self.keep == "all" or self.keep.type == "all":
            return [*turns], 0
        numbers = [*_numbered(turns)]
        thoughtful = sorted({number for turn, number in zip(turns, numbers, strict=True) if _thinks(turn)})
        old = set(thoughtful[: max(len(thoughtful) - self.keep.value, 0)])
        return [
            _without_thoughts(turn) if number in old else turn
            for turn, number in zip(turns, numbers, strict=True)
        ], len(old)

    def applied(self, number: int, num_tokens: int) -> ClearedThinking | None:
        """Return the reported outcome. Templates that leave out old thoughts save no tokens by it."""
        return ClearedThinking(number, max(num_tokens, 0))


class ContextManagement(Struct):
    """Edits, made in this order."""

    edits: Annotated[list[dict[str, Any]], Meta(max_length=MAX_EDITS)] | None = None


Edit = ClearToolUses | ClearThinking
Applied = ClearedToolUses | ClearedThinking
KNOWN: dict[str, type[Edit]] = {
    "clear_tool_uses_20250919": ClearToolUses,
    "clear_thinking_20251015": ClearThinking,
}


class Edited(NamedTuple):
    """A conversation after its edits, and those that changed it."""

    turns: Sequence[Turn]
    applied: list[Applied]


def edits_of(asked: ContextManagement | None) -> tuple[list[Edit], list[str]]:
    """The edits that are asked for, and warnings of those that nothing here knows.

    Raises RequestError for a malformed one.
    """
    edits: list[Edit] = []
    warnings = []
    for index, given in enumerate(asked.edits or () if asked is not None else ()):
        where, kind = f"context_management.edits[{index}]", given.get("type")
        if not isinstance(kind, str):
            raise RequestError(
                f"{where} lacks its type", f"known are {', '.join(KNOWN)}", "context_management"
            )
        if kind not in KNOWN:
            warnings.append(f"{where} has no effect: {kind[:64]!r} is not known here")
            continue
        try:
            edits.append(convert(given, KNOWN[kind]))
        except ValidationError as error:
            words = str(error).replace("`", "").replace("$.", "")
            raise RequestError(f"{where}: {words[:200]}", None, "context_management") from None
    return edits, warnings


def edit(turns: Sequence[Turn], edits: Sequence[Edit], count: Callable[[Sequence[Turn]], int]) -> Edited:
    """Make the edits whose trigger is met. `count` says how many tokens the prompt of some turns has.

    It renders the prompt, so it is called only for a trigger of tokens, and to say how many an edit saves.
    """
    applied: list[Applied] = []
    num_tokens: int | None = None  # of the turns as they are now, once they are counted
    for one in edits:
        if one.needs_tokens and num_tokens is None:
            num_tokens = count(turns)
        changed, number = one.make(turns, num_tokens or 0)
        if not number:
            continue
        num_tokens = count(turns) if num_tokens is None else num_tokens
        num_left = count(changed)
        if (told := one.applied(number, num_tokens - num_left)) is not None:
            applied.append(told)
            turns, num_tokens = changed, num_left
    return Edited(turns, applied)


def _is_use(block: InputBlock) -> bool:
    return block.type == "tool_use"


def _is_thought(block: InputBlock) -> bool:
    return block.type in ("thinking", "redacted_thinking")


def _thinks(turn: Turn) -> bool:
    return turn.role == "assistant" and any(map(_is_thought, blocks_of(turn)))


def _without_thoughts(turn: Turn) -> Turn:
    return Turn(role=turn.role, content=[block for block in blocks_of(turn) if not _is_thought(block)])


def _mapped(turn: Turn, change: Callable[[InputBlock], InputBlock]) -> Turn:
    if isinstance(turn.content, str):
        return turn
    return Turn(role=turn.role, content=[change(block) for block in turn.content])


def _numbered(turns: Sequence[Turn]) -> Iterator[int]:
    """For each message the number of the model's turn that it belongs to: one begins after a user's words."""
    number = 0
    for turn in turns:
        number += turn.role == "user" and not any(map(is_result, blocks_of(turn)))
        yield number
