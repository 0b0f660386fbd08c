"""Conversion of the input items of /v1/responses to messages in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from quire.errors import RequestError
from quire.images.prompt import image_part
from quire.server.openai.response_tools import (
    CUSTOM,
    FUNCTION,
    SEARCH,
    SHELL,
    Name,
    ResponsesTool,
    Toolbox,
    function_name,
)

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
# Parts that cannot be read, as the notes that replace them call them.
_UNREADABLE = {
    "input_image": "image",
    "input_file": "file",
    "input_audio": "audio",
    "encrypted_content": "encrypted content",
}
_COMPACTED = "[The conversation so far was compacted in a form that this server cannot read.]"
COMPACT_YOURSELF = "ask the model for a summary, and send that as the input"
# Items that are refused -> what to send instead.
_INSTEAD = {
    "compaction_trigger": COMPACT_YOURSELF,
    "item_reference": "nothing is stored: send the item itself, as clients do if their option store is false",
}
_COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
# Calls that another server ran itself: the message that follows them holds their outcome.
_SKIPPED = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call")
# Items of calls -> the tools that they call.
_CALLS = {
    "function_call": FUNCTION,
    "custom_tool_call": CUSTOM,
    "tool_search_call": SEARCH,
    "local_shell_call": SHELL,
}
_RESULTS = (
    *("function_call_output", "custom_tool_call_output"),
    *("tool_search_output", "local_shell_call_output"),
)


class ContentPart(Struct, kw_only=True):
    """A part of a message: input_text, output_text, refusal or input_image; files are not read."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class Item(Struct, kw_only=True):
    """A message, a call of the model, the output of a call, reasoning, or additional tools."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    id: str | None = None
    call_id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | list[ContentPart] | None = None
    tools: list[ResponsesTool] | None = None
    execution: str | None = None
    author: str | None = None


def messages_of(
    instructions: str | None, items: str | Sequence[Item], toolbox: Toolbox, sees: bool
) -> list[dict[str, Any]]:
    """Return the messages. Consecutive calls share a message, and so do consecutive system instructions.

    Images are passed on if the model `sees`; a note replaces them otherwise. Tools that items bring are added
    to the toolbox, and so are warnings about what is skipped. Raises RequestError for an item whose absence
    would change the question.
    """
    history = _History(toolbox, sees)
    if instructions:
        history.say("system", instructions)
    if isinstance(items, str):
        history.say("user", items)
    else:
        for index, item in enumerate(items):
            history.add(item, f"input[{index}]")
    for message in history.messages:
        if message["role"] == "system":
            message["content"] = "\n\n".join(message["content"])
    return history.messages


class _History:
    """The messages so far, and the reasoning that belongs to the model's next message or call."""

    def __init__(self, toolbox: Toolbox, sees: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self._toolbox, self._sees = toolbox, sees
        self._reasoning: list[str] = []

    def add(self, item: Item, where: str) -> None:
        if item.type == "message":
            role = "system" if item.role == "developer" else item.role
            if role not in ("system", "user", "assistant"):
                hint = "one of user, assistant, system, developer"
                raise RequestError(f"{where}: unknown role", hint, where)
            if role == "user":
                self._append(role, self._content(item.content, where, "content"))
            else:
                self.say(role, self._text(item.content, where))
        elif item.type == "reasoning":
            self._reasoning.append(self._text(item.content or "", where))
        elif item.type in _CALLS:
            self._call(item, where)
        elif item.type in _RESULTS:
            self._result(item, where)
        elif item.type == "additional_tools":
            self._toolbox.add(item.tools or (), f"{where}.tools", again=True)
        elif item.type == "agent_message":
            self.say("user", f"Message of {item.author}:\n{self._text(item.content, where)}")
        elif item.type in _COMPACTIONS:
            self._toolbox.warn(f"items of type {item.type!r} cannot be read and are replaced by a note")
            self.say("user", _COMPACTED)
        elif item.type in _SKIPPED:
            self._toolbox.warn(f"items of type {item.type!r} are skipped")
        else:
            problem = f"{where}: an item of type {item.type[:64]!r} is not supported"
            hint = _INSTEAD.get(item.type, "give messages, function calls and their outputs")
            raise RequestError(problem, hint, where)

    def say(self, role: str, text: str) -> None:
        """Add a message, or extend the last one if both are the system's."""
        if role != "system":
            self._append(role, text)
        elif self.messages and self.messages[-1]["role"] == "system":
            self.messages[-1]["content"].append(text)  # joined at the end: there may be thousands
        else:
            self._append(role, [text])

    def _append(self, role: str, content: str | list[Any], **more: Any) -> None:
        """Add a message, with the reasoning before it if it is the model's."""
        reasoning = "\n".join(filter(None, self._reasoning))
        self._reasoning.clear()
        if reasoning and role == "assistant":
            more["reasoning_content"] = reasoning
        self.messages.append({"role": role, "content": content, **more})

    def _call(self, item: Item, where: str) -> None:
        """Add a call to the last message if that is the model's and no reasoning came in between."""
        kind = _CALLS[item.type]
        name = item.name if kind in (FUNCTION, CUSTOM) else kind
        call_id = item.call_id or (item.id if kind == SHELL else None)
        if name is None or call_id is None:
            raise RequestError(f"{where}: name or call_id is missing", None, where)
        function = {"name": function_name(name, item.namespace), "arguments": _arguments(item)}
        call = {"id": call_id, "type": "function", "function": function}
        if self.messages and self.messages[-1]["role"] == "assistant" and not any(self._reasoning):
            self.messages[-1].setdefault("tool_calls", []).append(call)
        else:
            self._append("assistant", "", tool_calls=[call])

    def _result(self, item: Item, where: str) -> None:
        call_id = item.call_id or (item.id if item.type == "local_shell_call_output" else None)
        if call_id is None:
            raise RequestError(f"{where}: call_id is missing", None, where)
        if item.type == "tool_search_output":
            names = self._toolbox.add(item.tools or (), f"{where}.tools", again=True)
            found = f"Tools that can be called from now on: {', '.join(names)}"
            self._append("tool", found if names else "No tools were found.", tool_call_id=call_id)
        else:
            self._append("tool", self._content(item.output, where, "output"), tool_call_id=call_id)

    def _content(
        self, content: str | list[ContentPart] | None, where: str, name: str
    ) -> str | list[dict[str, Any]]:
        """Return a content, in the field `name`, as one text or, if it has images, as parts."""
        if not self._sees or not isinstance(content, list) or not any(map(_is_image, content)):
            return self._text(content, where)
        return [
            _image(part, f"{where}.{name}[{number}]")
            if _is_image(part)
            else {"type": "text", "text": self._text([part], where)}
            for number, part in enumerate(content)
        ]

    def _text(self, content: str | list[ContentPart] | None, where: str) -> str:
        if content is None:
            raise RequestError(f"{where} has no content", None, where)
        if isinstance(content, str):
            return content
        texts = []
        for part in content:
            text = part.refusal if part.type == "refusal" else part.text
            if part.type in _UNREADABLE:
                read = "text and images" if self._sees else "text"
                text = f"[{_UNREADABLE[part.type]} omitted: this server reads only {read}]"
                self._toolbox.warn(f"parts of type {part.type!r} cannot be read and are replaced by a note")
            elif part.type not in _TEXTS or text is None:
                problem = f"{where}: a part of type {part.type[:64]!r} is not supported, or has no text"
                raise RequestError(problem, "give input_text", where)
            texts.append(text)
        return "\n".join(texts)


def _is_image(part: ContentPart) -> bool:
    return part.type == "input_image"


def _image(part: ContentPart, where: str) -> dict[str, Any]:
    if part.image_url is None:
        hint = "files are not stored: send the image itself, data:image/png;base64,..."
        raise RequestError(f"{where}: an image without image_url is not supported", hint, where)
    return image_part(part.image_url, where)


def _arguments(item: Item) -> str | dict[str, Any]:
    """Return the arguments of a call as the model wrote them."""
    if item.type == "custom_tool_call":
        return json.dumps({"input": item.input or ""}, ensure_ascii=False)
    if item.type == "local_shell_call":
        action = item.action or {}
        return {key: value for key, value in action.items() if key != "type" and value not in (None, {})}
    return item.arguments or "{}"
