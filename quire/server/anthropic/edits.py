"""`context_management`: edits that shorten a conversation before the model reads it.

They follow Anthropic's "context editing". Nothing is kept between requests: a client sends the whole
conversation each time, and the same edits shorten it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import replace

from quire.errors import RequestError
from quire.server.anthropic.turns import InputBlock, Turn, blocks_of, is_result

CLEARED = "[cleared to shorten the conversation]"
MAX_EDITS = 8  # each may render the prompt
Count = Annotated[int, Meta(ge=0)]


class Trigger(Struct, frozen=True):
    """The size that a conversation must exceed for an edit to be applied."""

    type: Literal["input_tokens", "tool_uses"]
    value: Count


class Tokens(Struct):
    """A number of tokens."""

    type: Literal["input_tokens"]
    value: Count


class ToolUses(Struct, frozen=True):
    """The number of latest calls to keep."""

    type: Literal["tool_uses"]
    value: Count


class ThinkingTurns(Struct, frozen=True):
    """The number of the assistant's latest turns to keep, or all."""

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

    def apply(self, turns: Sequence[Turn], num_tokens: int) -> tuple[list[Turn], int]:
        """Return the turns with old results cleared, and the number of these: 0 unless the trigger is met."""
        blocks = [block for turn in turns for block in blocks_of(turn)]
        results = {block.tool_use_id for block in blocks if is_result(block)}
        uses = [block for block in blocks if block.type == "tool_use" and block.id in results]
        if (num_tokens if self.needs_tokens else len(uses)) <= self.trigger.value:
            return [*turns], 0
        end = max(len(uses) - self.keep.value, 0)
        excluded, latest = self.exclude_tools or (), {block.id for block in uses[end:]}
        old = {block.id for block in uses[:end] if block.name not in excluded} - latest
        inputs = self.clear_tool_inputs or ()

        def cleared(block: InputBlock) -> InputBlock:
            if is_result(block) and block.tool_use_id in old:
                return replace(block, content=CLEARED, is_error=None)
            if block.type == "tool_use" and block.id in old and (inputs is True or block.name in inputs):
                return replace(block, input={})
            return block

        return [_with_blocks(turn, map(cleared, blocks_of(turn))) for turn in turns], len(old)

    def outcome(self, number: int, num_tokens: int) -> ClearedToolUses | None:
        """Return the outcome to report; None if too few tokens are saved for the edit to be applied."""
        least = self.clear_at_least.value if self.clear_at_least is not None else 0
        return ClearedToolUses(number, num_tokens) if num_tokens >= max(least, 1) else None


class ClearThinking(Struct, kw_only=True):
    """Clear the reasoning in all of the model's turns but the latest.

    A turn of the model extends over the results of its calls, to the next message with a user's text.
    """

    needs_tokens: ClassVar = False

    keep: Literal["all"] | ThinkingTurns = ThinkingTurns("thinking_turns", 1)

    def apply(self, turns: Sequence[Turn], num_tokens: int) -> tuple[list[Turn], int]:
        """Return the turns without old reasoning, and the number of the model's turns that had some."""
        if self.keep == "all" or self.keep.type == "all":
            return [*turns], 0
        users = (turn.role == "user" and not any(map(is_result, blocks_of(turn))) for turn in turns)
        numbered = [*zip(accumulate(users), turns, strict=True)]
        thinking = sorted({number for number, turn in numbered if _has_thinking(turn)})
        old = set(thinking[: max(len(thinking) - self.keep.value, 0)])

        def cleared(turn: Turn) -> Turn:
            return _with_blocks(turn, (block for block in blocks_of(turn) if not _is_thinking(block)))

        return [cleared(turn) if number in old else turn for number, turn in numbered], len(old)

    def outcome(self, number: int, num_tokens: int) -> ClearedThinking | None:
        """Return the outcome to report. No tokens are saved where the template omits old reasoning anyway."""
        return ClearedThinking(number, max(num_tokens, 0))


class ContextManagement(Struct):
    """Edits, applied in this order."""

    edits: Annotated[list[dict[str, Any]], Meta(max_length=MAX_EDITS)] | None = None


Edit = ClearToolUses | ClearThinking
AppliedEdit = ClearedToolUses | ClearedThinking
KNOWN: dict[str, type[Edit]] = {
    "clear_tool_uses_20250919": ClearToolUses,
    "clear_thinking_20251015": ClearThinking,
}


def edits_of(asked: ContextManagement | None) -> tuple[list[Edit], list[str]]:
    """Return the edits, and warnings about unknown ones. Raises RequestError for a malformed one."""
    edits: list[Edit] = []
    warnings = []
    for index, given in enumerate(asked.edits or () if asked is not None else ()):
        where, kind = f"context_management.edits[{index}]", given.get("type")
        if not isinstance(kind, str):
            hint = f"one of {', '.join(KNOWN)}"
            raise RequestError(f"{where}: type is missing", hint, "context_management")
        if kind not in KNOWN:
            warnings.append(f"{where} has no effect: type {kind[:64]!r} is unknown")
            continue
        try:
            edits.append(convert(given, KNOWN[kind]))
        except ValidationError as error:
            words = str(error).replace("`", "").replace("$.", "")
            raise RequestError(f"{where}: {words[:200]}", None, "context_management") from None
    return edits, warnings


def apply_edits(
    turns: Sequence[Turn], edits: Sequence[Edit], count: Callable[[Sequence[Turn]], int]
) -> tuple[Sequence[Turn], list[AppliedEdit]]:
    """Apply the edits whose trigger is met. Returns the turns, and the edits that changed them.

    `count` returns the number of tokens of the prompt of some turns. It renders the prompt, so it is called
    only for a trigger that counts tokens, and to find out how many an edit saves.
    """
    applied: list[AppliedEdit] = []
    num_tokens: int | None = None  # of the turns in their present form, once they are counted
    for edit in edits:
        if edit.needs_tokens and num_tokens is None:
            num_tokens = count(turns)
        changed, number = edit.apply(turns, num_tokens or 0)
        if not number:
            continue
        num_tokens = count(turns) if num_tokens is None else num_tokens
        num_left = count(changed)
        if (outcome := edit.outcome(number, num_tokens - num_left)) is not None:
            applied.append(outcome)
            turns, num_tokens = changed, num_left
    return turns, applied


def _is_thinking(block: InputBlock) -> bool:
    return block.type in ("thinking", "redacted_thinking")


def _has_thinking(turn: Turn) -> bool:
    return turn.role == "assistant" and any(map(_is_thinking, blocks_of(turn)))


def _with_blocks(turn: Turn, blocks: Iterable[InputBlock]) -> Turn:
    return turn if isinstance(turn.content, str) else Turn(role=turn.role, content=[*blocks])
