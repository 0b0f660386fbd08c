"""Conversion of the turns of /v1/messages to messages in the form that chat templates read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from quire.errors import RequestError

BILLING_HEADER = "x-anthropic-billing-header:"
MAX_LEFT_OUT = 16  # types of blocks, or tools, that warnings name
Name = Annotated[str, Meta(max_length=256)]


class InputBlock(Struct, kw_only=True):
    """A text, tool_use, tool_result, thinking or tool_reference; a document or search_result with text."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: str | list[InputBlock] | dict[str, Any] | None = None
    is_error: bool | None = None
    tool_name: Name | None = None
    source: str | dict[str, Any] | None = None
    title: str | None = None
    citations: dict[str, Any] | None = None


class Turn(Struct, kw_only=True):
    """A message of user, assistant or system. The answer continues an assistant's message at the end."""

    role: str
    content: str | list[InputBlock]


def blocks_of(turn: Turn) -> list[InputBlock]:
    """Return the blocks of a turn; a plain text is one block."""
    content = turn.content
    return [InputBlock(type="text", text=content)] if isinstance(content, str) else content


def is_result(block: InputBlock) -> bool:
    return block.type == "tool_result"


def messages_of(
    system: str | Sequence[InputBlock] | None, turns: Sequence[Turn]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages, and warnings about what is left out of them.

    A tool may return images and the like, which no model here can read: a note replaces them, so that an
    agent can go on. In a user's own message they are refused.
    """
    omitted: Counter[str] = Counter()
    messages = []
    blocks = [InputBlock(type="text", text=system)] if isinstance(system, str) else system or ()
    if text := _text(_without_billing(blocks), "system"):
        messages.append({"role": "system", "content": text})
    for index, turn in enumerate(turns):
        where, blocks = f"messages[{index}]", blocks_of(turn)
        if turn.role == "user":
            messages += _user(blocks, where, omitted)
        elif turn.role == "assistant":
            messages.append(_assistant(blocks, where, omitted))
        elif turn.role == "system":
            messages.append({"role": "system", "content": _text(blocks, where)})
        else:
            raise RequestError(f"{where}: unknown role", "one of user, assistant, system", "messages")
    reason = "left out of messages: this server reads only text"
    kinds = omitted.most_common(MAX_LEFT_OUT)
    warnings = [f"blocks of type {kind!r} ({number}) are {reason}" for kind, number in kinds]
    if any(_cites(blocks_of(turn)) for turn in turns):
        warnings.append("citations has no effect")
    return messages, warnings


def _user(blocks: Sequence[InputBlock], where: str, omitted: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield a message for each tool result, then the user's text."""
    results = [block for block in blocks if is_result(block)]
    said = [block for block in blocks if not is_result(block)]
    for block in results:
        if block.tool_use_id is None:
            raise RequestError(f"{where}: tool_use_id of a tool_result is missing", None, "messages")
        content = block.content or ""
        if isinstance(content, dict):
            raise RequestError(
                f"{where}: the content of a tool_result must be text or a list", None, "messages"
            )
        text = content if isinstance(content, str) else _text(_readable(content, omitted), where)
        text = f"Error: {text}" if block.is_error else text  # templates have no other way to say it
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    if results:  # next to which Claude Code puts the document that a tool has read
        said = _readable(said, omitted)
    if said or not results:
        yield {"role": "user", "content": _text(said, where)}


def _assistant(blocks: Sequence[InputBlock], where: str, omitted: Counter[str]) -> dict[str, Any]:
    said, thoughts, calls = [], [], []
    for block in blocks:
        if block.type == "tool_use":
            if block.id is None or block.name is None:
                raise RequestError(f"{where}: id or name of a tool_use is missing", None, "messages")
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            said.append(block)
    message: dict[str, Any] = {"role": "assistant", "content": _text(_readable(said, omitted), where)}
    if reasoning := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = reasoning  # the name that templates use
    return message | {"tool_calls": calls} if calls else message


def _readable(blocks: Iterable[InputBlock], omitted: Counter[str]) -> list[InputBlock]:
    """Return the blocks with a note in place of each that holds no text; `omitted` counts these by type."""
    found = []
    for block in blocks:
        if block.type != "text" and _text_of(block) is None:
            kind = block.type[:64]
            omitted[kind] += 1
            block = InputBlock(type="text", text=f"[{kind} omitted: this server reads only text]")
        found.append(block)
    return found


def _without_billing(blocks: Sequence[InputBlock]) -> list[InputBlock]:
    """Return the blocks of a system prompt without the line that Claude Code writes for Anthropic's billing.

    It means nothing to a model and may change with each request: no prompt would be found in the cache.
    """
    found = []
    for block in blocks:
        if (text := block.text) is not None and text.startswith(BILLING_HEADER):
            _, _, text = text.partition("\n")
            block = InputBlock(type=block.type, text=text)
        if text != "":
            found.append(block)
    return found


def _text(blocks: Sequence[InputBlock], where: str) -> str:
    texts = []
    for block in blocks:
        if (text := _text_of(block)) is None:
            problem = f"{where}: a block of type {block.type[:64]!r} is not supported, or has no text"
            raise RequestError(problem, "this server reads only text", where.partition("[")[0])
        texts.append(text)
    return "\n".join(texts)


def _text_of(block: InputBlock) -> str | None:
    """Return the text of a block, or None if it has none."""
    match block:
        case InputBlock(type="text"):
            return block.text
        case InputBlock(type="tool_reference", tool_name=str(name)):
            return f"The tool {name} can be called now."
        case InputBlock(type="search_result", source=str(source), content=list(content)):
            return _titled(block.title, source, _inner(content))
        case InputBlock(type="document", source={"type": "text", "data": str(data)}):
            return _titled(block.title, data)
        case InputBlock(type="document", source={"type": "content", "content": str(content)}):
            return _titled(block.title, content)
        case InputBlock(type="compaction", content=str(content)):
            return content
    return None


def _cites(blocks: Sequence[InputBlock]) -> bool:
    """Return True if a block, or one inside it, asks for citations."""
    inner = (block.content for block in blocks if isinstance(block.content, list))
    asked = (block.citations and block.citations.get("enabled") for block in blocks)
    return any(asked) or any(map(_cites, inner))


def _inner(blocks: Sequence[InputBlock]) -> str | None:
    texts = [_text_of(block) for block in blocks]
    return None if None in texts else "\n".join(text for text in texts if text)


def _titled(*parts: str | None) -> str | None:
    """Join a title or an address, if there is one, with its text."""
    return None if parts[-1] is None else "\n".join(part for part in parts if part)
