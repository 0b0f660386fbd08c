"""Turns of a conversation as /v1/messages takes them, and as the messages that chat templates read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from quire.errors import RequestError

BILLING_HEADER = "x-anthropic-billing-header:"
MAX_LEFT_OUT = 16  # kinds of blocks, or tools, that warnings name
Name = Annotated[str, Meta(max_length=256)]


class InputBlock(Struct, kw_only=True):
    """text, tool_use, tool_result, thinking, tool_reference; document and search_result that hold text."""

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
    """A message of user, assistant or system. The answer goes on with an assistant's that comes last."""

    role: str
    content: str | list[InputBlock]


def blocks_of(turn: Turn) -> list[InputBlock]:
    """The blocks of a turn; text alone is one."""
    content = turn.content
    return [InputBlock(type="text", text=content)] if isinstance(content, str) else content


def is_result(block: InputBlock) -> bool:
    return block.type == "tool_result"


class Conversation:
    """A conversation in the form that templates read.

    What a tool returned may hold images and the like, which no model here can read: a note in its place lets
    an agent go on, and `warnings` tell. In what a user says they are refused.
    """

    def __init__(self, system: str | Sequence[InputBlock] | None, turns: Sequence[Turn]) -> None:
        self._left_out: Counter[str] = Counter()
        self._cites = any(_cites(blocks_of(turn)) for turn in turns)
        self.messages = [*self._system(system or ""), *self._all(turns)]

    @property
    def warnings(self) -> list[str]:
        """Return warnings about what is left out of the messages."""
        reason = "left out of messages: this server reads text alone"
        kinds = self._left_out.most_common(MAX_LEFT_OUT)
        found = [f"blocks of type {kind!r} ({number}) are {reason}" for kind, number in kinds]
        return [*found, "citations has no effect"] if self._cites else found

    def _system(self, system: str | Sequence[InputBlock]) -> Iterator[dict[str, Any]]:
        blocks = [InputBlock(type="text", text=system)] if isinstance(system, str) else system
        if text := _text(_without_billing(blocks), "system"):
            yield {"role": "system", "content": text}

    def _all(self, turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
        for index, turn in enumerate(turns):
            where, blocks = f"messages[{index}]", blocks_of(turn)
            if turn.role == "user":
                yield from self._user(blocks, where)
            elif turn.role == "assistant":
                yield self._assistant(blocks, where)
            elif turn.role == "system":
                yield {"role": "system", "content": _text(blocks, where)}
            else:
                hint = "one of user, assistant, system"
                raise RequestError(f"{where} has no role that is known", hint, "messages")

    def _user(self, blocks: Sequence[InputBlock], where: str) -> Iterator[dict[str, Any]]:
        """Yield a message for each tool result, then the user's text."""
        results = [block for block in blocks if is_result(block)]
        said = [block for block in blocks if not is_result(block)]
        for block in results:
            if block.tool_use_id is None:
                raise RequestError(f"{where}: a tool_result lacks its tool_use_id", None, "messages")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": self._result(block, where)}
        if results:
            said = self._readable(
                said
            )  # Claude Code puts the document that a tool has read beside its result
        if said or not results:
            yield {"role": "user", "content": _text(said, where)}

    def _result(self, block: InputBlock, where: str) -> str:
        content = block.content or ""
        if isinstance(content, dict):
            raise RequestError(f"{where}: the content of a tool_result is no list", None, "messages")
        text = content if isinstance(content, str) else _text(self._readable(content), where)
        return f"Error: {text}" if block.is_error else text  # templates have no other way to say it

    def _assistant(self, blocks: Sequence[InputBlock], where: str) -> dict[str, Any]:
        said, thoughts, calls = [], [], []
        for block in blocks:
            if block.type == "tool_use":
                if block.id is None or block.name is None:
                    raise RequestError(f"{where}: a tool_use lacks its id or its name", None, "messages")
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif block.type == "thinking":
                thoughts.append(block.thinking or "")
            elif block.type != "redacted_thinking":
                said.append(block)
        message: dict[str, Any] = {"role": "assistant", "content": _text(self._readable(said), where)}
        if reasoning := "\n".join(filter(None, thoughts)):
            message["reasoning_content"] = reasoning  # as templates that know of it call it
        return message | {"tool_calls": calls} if calls else message

    def _readable(self, blocks: Iterable[InputBlock]) -> list[InputBlock]:
        """The same with a note for each block that holds no text."""
        found = []
        for block in blocks:
            if block.type != "text" and _text_of(block) is None:
                kind = block.type[:64]
                self._left_out[kind] += 1
                block = InputBlock(type="text", text=f"[{kind} left out: only text can be read here]")
            found.append(block)
        return found


def _without_billing(blocks: Sequence[InputBlock]) -> list[InputBlock]:
    """The blocks of a system prompt without the line that Claude Code writes for Anthropic's accounts.

    It says nothing to a model and may change with each request, so no prompt would be found in the cache.
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
            problem = f"{where}: a block of type {block.type[:64]!r} is not supported here, or has no text"
            raise RequestError(problem, "this server reads text alone", where.partition("[")[0])
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
    """True if one of them, or of what they hold, asks for citations."""
    inner = (block.content for block in blocks if isinstance(block.content, list))
    asked = (block.citations and block.citations.get("enabled") for block in blocks)
    return any(asked) or any(map(_cites, inner))


def _inner(blocks: Sequence[InputBlock]) -> str | None:
    texts = [_text_of(block) for block in blocks]
    return None if None in texts else "\n".join(text for text in texts if text)


def _titled(*parts: str | None) -> str | None:
    """A title or an address, if there is one, and what it is of."""
    return None if parts[-1] is None else "\n".join(part for part in parts if part)
