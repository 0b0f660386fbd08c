"""Items that come in as the input of /v1/responses, as messages in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from quire.errors import RequestError
from quire.server.openai.response_tools import CUSTOM, FUNCTION, SEARCH, SHELL, Called, Name, Tool, Toolbox

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_NOTES = {  # what stands in the place of what cannot be read
    "input_image": "[an image, which cannot be shown here]",
    "input_file": "[a file, which cannot be shown here]",
    "input_audio": "[a sound, which cannot be played here]",
    "encrypted_content": "[encrypted text, which cannot be read here]",
}
_COMPACTED = "[The conversation before this was summarized in a form that cannot be read here.]"
COMPACT_YOURSELF = "ask the model for a summary, and go on with that as the input"
_COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
# Calls that another server ran itself: what the model said after them holds what came of them.
_PASSED_OVER = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call")


class Part(Struct, kw_only=True):
    """A part of a message: input_text, output_text or refusal; an image or a file, which is not read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Struct, kw_only=True):
    """A message, a call that the model made, what came of one, its reasoning, or tools that are told of."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    call_id: Name | None = None
    name: Name | None = None
    namespace: Name | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | list[Part] | None = None
    tools: list[Tool] | None = None
    execution: str | None = None
    author: str | None = None


def conversation(instructions: str | None, items: Sequence[Item], toolbox: Toolbox) -> list[dict[str, Any]]:
    """The messages: calls that belong together in one, and what system and developer say at once.

    Tools that items tell of go into the toolbox, and so do warnings of what is passed over. Raises
    RequestError for an item whose absence would change what is asked.
    """
    history = _History(toolbox)
    if instructions:
        history.say("system", instructions)
    for index, item in enumerate(items):
        history.take(item, f"input[{index}]")
    for message in history.messages:
        if message["role"] == "system":
            message["content"] = "\n\n".join(message["content"])
    return history.messages


class _History:
    """The messages so far, and the reasoning that waits for the message it led to."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.messages: list[dict[str, Any]] = []
        self._toolbox = toolbox
        self._thoughts: list[str] = []

    def take(self, item: Item, where: str) -> None:
        if item.type == "message":
            role = "system" if item.role == "developer" else item.role
            if role not in ("system", "user", "assistant"):
                hint = "one of user, assistant, system, developer"
                raise RequestError(f"{where} has no role that is known", hint, where)
            self.say(role, self._text(item.content, where))
        elif item.type == "reasoning":
            self._thoughts.append(self._text(item.content or "", where))
        elif item.type in _CALLS:
            self._call(item, where)
        elif item.type in _RESULTS:
            self._result(item, where)
        elif item.type == "additional_tools":
            self._toolbox.add(item.tools or (), f"{where}.tools", again=True)
        elif item.type == "agent_message":
            self.say("user", f"Message of {item.author}:\n{self._text(item.content, where)}")
        elif item.type in _COMPACTIONS:
            self._toolbox.warn(f"items of type {item.type!r} cannot be read: a note stands in their place")
            self.say("user", _COMPACTED)
        elif item.type in _PASSED_OVER:
            self._toolbox.warn(f"items of type {item.type!r} are passed over")
        else:
            problem = f"{where}: an item of type {item.type[:64]!r} is not supported"
            hint = "give messages, function calls and their outputs"
            if item.type == "compaction_trigger":
                hint = COMPACT_YOURSELF
            raise RequestError(problem, hint, where)

    def say(self, role: str, text: str) -> None:
        """Add a message, or to the system's if that is the last."""
        last = self.messages[-1] if self.messages else {}
        if role == "assistant":
            self.messages.append({"role": role, "content": text, **self._thought()})
        elif role == last.get("role") == "system":
            last["content"].append(text)  # put together at the end: there may be thousands
        else:
            self._thoughts.clear()
            self.messages.append({"role": role, "content": [text] if role == "system" else text})

    def _thought(self) -> dict[str, str]:
        """The reasoning before a message, for templates that show it."""
        thoughts = "\n".join(filter(None, self._thoughts))
        self._thoughts.clear()
        return {"reasoning_content": thoughts} if thoughts else {}

    def _call(self, item: Item, where: str) -> None:
        """A call joins the message before it, unless the model has thought in between."""
        kind = _CALLS[item.type]
        name = item.name if kind in (FUNCTION, CUSTOM) else kind
        call_id = item.call_id or (item.id if kind == SHELL else None)
        if name is None or call_id is None:
            raise RequestError(f"{where} lacks its name or its call_id", None, where)
        function = {"name": Called(kind, name, item.namespace).function, "arguments": _arguments(kind, item)}
        call = {"id": call_id, "type": "function", "function": function}
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not any(self._thoughts):
            last.setdefault("tool_calls", []).append(call)
        else:
            self.messages.append(
                {"role": "assistant", "content": "", **self._thought(), "tool_calls": [call]}
            )

    def _result(self, item: Item, where: str) -> None:
        call_id = item.call_id or (item.id if item.type == "local_shell_call_output" else None)
        if call_id is None:
            raise RequestError(f"{where} lacks its call_id", None, where)
        if item.type == "tool_search_output":
            names = self._toolbox.add(item.tools or (), f"{where}.tools", again=True)
            text = f"These can be called from now on: {', '.join(names)}" if names else "No tools were found."
        else:
            text = self._text(item.output, where)
        self._thoughts.clear()
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _text(self, content: str | list[Part] | None, where: str) -> str:
        if content is None:
            raise RequestError(f"{where} has no content", None, where)
        if isinstance(content, str):
            return content
        texts = []
        for part in content:
            text = part.refusal if part.type == "refusal" else part.text
            if part.type in _NOTES:
                text = _NOTES[part.type]
                self._toolbox.warn(
                    f"parts of type {part.type!r} cannot be read: a note stands in their place"
                )
            elif part.type not in _TEXTS or text is None:
                problem = f"{where}: a part of type {part.type[:64]!r} is not supported, or has no text"
                raise RequestError(problem, "give input_text", where)
            texts.append(text)
        return "\n".join(texts)


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


def _arguments(kind: str, item: Item) -> str | dict[str, Any]:
    """The arguments of a call as the model wrote them."""
    if kind == CUSTOM:
        return json.dumps({"input": item.input or ""}, ensure_ascii=False)
    if kind == SHELL:
        given = (item.action or {}).items()
        return {key: value for key, value in given if key != "type" and value not in (None, {})}
    return item.arguments or "{}"
