"""Conversion of the turns of /v1/messages to messages in the form that chat templates read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct

from quire.errors import RequestError
from quire.images.prompt import image_part

BILLING_HEADER = "x-anthropic-billing-header:"
MAX_LEFT_OUT = 16  # types of blocks, or tools, that warnings name
Name = Annotated[str, Meta(max_length=256)]


class InputBlock(Struct, kw_only=True):
    """A text, image, tool_use, tool_result, thinking or tool_reference; a document or search_result."""

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
    system: str | Sequence[InputBlock] | None, turns: Sequence[Turn], sees: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages, and warnings about what is left out of them.

    Images are passed on if the model `sees`. A tool may return what it cannot read: a note replaces that, so
    that an agent can go on. In a user's own message it is refused.
    """
    reader = _Reader(sees)
    messages = []
    blocks = [InputBlock(type="text", text=system)] if isinstance(system, str) else system or ()
    if text := reader.text(_without_billing(blocks), "system"):
        messages.append({"role": "system", "content": text})
    for index, turn in enumerate(turns):
        where, blocks = f"messages[{index}]", blocks_of(turn)
        if turn.role == "user":
            messages += reader.user(blocks, where)
        elif turn.role == "assistant":
            messages.append(reader.assistant(blocks, where))
        elif turn.role == "system":
            messages.append({"role": "system", "content": reader.text(blocks, where)})
        else:
            raise RequestError(f"{where}: unknown role", "one of user, assistant, system", "messages")
    reason = f"left out of messages: this server reads only {reader.reads}"
    kinds = reader.omitted.most_common(MAX_LEFT_OUT)
    warnings = [f"blocks of type {kind!r} ({number}) are {reason}" for kind, number in kinds]
    if any(_cites(blocks_of(turn)) for turn in turns):
        warnings.append("citations has no effect")
    return messages, warnings


@dataclass(slots=True)
class _Reader:
    """Reads blocks for a model that `sees` images or does not. `omitted` counts those left out by type."""

    sees: bool
    omitted: Counter[str] = field(default_factory=Counter)

    @property
    def reads(self) -> str:
        """Return what it reads, in words."""
        return "text and images" if self.sees else "text"

    def user(self, blocks: Sequence[InputBlock], where: str) -> Iterator[dict[str, Any]]:
        """Yield a message for each tool result, then what the user says."""
        placed = [(f"{where}.content[{number}]", block) for number, block in enumerate(blocks)]
        said = [(at, block) for at, block in placed if not is_result(block)]
        for at, block in placed:
            if is_result(block):
                content = self._result(block, at)
                yield {"role": "tool", "tool_call_id": _call_id(block, where), "content": content}
        if len(said) < len(placed):  # next to which Claude Code puts the document that a tool has read
            said = [(at, self._readable(block)) for at, block in said]
        if said or not placed:
            yield {"role": "user", "content": self._content(said, where)}

    def assistant(self, blocks: Sequence[InputBlock], where: str) -> dict[str, Any]:
        """Return the message of a turn of the model."""
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
                said.append(self._noted(block))
        message: dict[str, Any] = {"role": "assistant", "content": self.text(said, where)}
        if reasoning := "\n".join(filter(None, thoughts)):
            message["reasoning_content"] = reasoning  # the name that templates use
        return message | {"tool_calls": calls} if calls else message

    def text(self, blocks: Iterable[InputBlock], where: str) -> str:
        """Return the text of blocks. Raises RequestError for one that has none."""
        texts = []
        for block in blocks:
            if (text := _text_of(block)) is None:
                problem = f"{where}: a block of type {block.type[:64]!r} is not supported, or has no text"
                raise RequestError(problem, f"this server reads only {self.reads}", where.partition("[")[0])
            texts.append(text)
        return "\n".join(texts)

    def _result(self, block: InputBlock, where: str) -> str | list[dict[str, Any]]:
        """Return the content of a tool's result."""
        content = block.content or ""
        if isinstance(content, dict):
            raise RequestError(
                f"{where}: the content of a tool_result must be text or a list", None, "messages"
            )
        if isinstance(content, str):
            found: str | list[dict[str, Any]] = content
        else:
            inner = ((f"{where}.content[{i}]", self._readable(one)) for i, one in enumerate(content))
            found = self._content([*inner], where)
        if not block.is_error:
            return found
        # templates have no other way to say it
        return f"Error: {found}" if isinstance(found, str) else [{"type": "text", "text": "Error:"}, *found]

    def _content(self, placed: Sequence[tuple[str, InputBlock]], where: str) -> str | list[dict[str, Any]]:
        """Return blocks as one text or, if there are images, as parts."""
        if not any(self._is_image(block) for _, block in placed):
            return self.text((block for _, block in placed), where)
        return [
            _image(block, at)
            if self._is_image(block)
            else {"type": "text", "text": self.text([block], where)}
            for at, block in placed
        ]

    def _is_image(self, block: InputBlock) -> bool:
        return self.sees and block.type == "image"

    def _readable(self, block: InputBlock) -> InputBlock:
        """Return a block, or a note in place of one that cannot be read."""
        return block if self._is_image(block) else self._noted(block)

    def _noted(self, block: InputBlock) -> InputBlock:
        """Return a block, or a note in place of one that holds no text."""
        if block.type == "text" or _text_of(block) is not None:
            return block
        kind = block.type[:64]
        self.omitted[kind] += 1
        return InputBlock(type="text", text=f"[{kind} omitted: this server reads only {self.reads}]")


def _call_id(block: InputBlock, where: str) -> str:
    if block.tool_use_id is None:
        raise RequestError(f"{where}: tool_use_id of a tool_result is missing", None, "messages")
    return block.tool_use_id


def _image(block: InputBlock, where: str) -> dict[str, Any]:
    """Return an image as a part of a message. What its source says is read later."""
    match block.source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return image_part(f"data:{kind};base64,{data}", where)
        case {"type": "url", "url": str(url)}:
            return image_part(url, where)
    hint = 'give {"type": "base64", "media_type": "image/png", "data": "..."}; files are not stored'
    raise RequestError(f"{where}: the source of an image is not supported", hint, "messages")


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
