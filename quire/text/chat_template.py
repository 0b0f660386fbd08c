"""Chat templates: render a conversation as one prompt, with the origin of every character."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from quire.errors import ConfigError, RequestError, quoted
from quire.text import assistant_turns, call_arguments, late_system, user_turns
from quire.text.renderer import RefusedByTemplate, Segment, TemplateRenderer

MAX_MESSAGES = 8192
MAX_CHARACTERS = 8 << 20
MAX_NESTING = 64

# Names that chat_template_kwargs may not set: other parameters define them.
_RESERVED = {
    *("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize", "return_dict", "return_tensors", "raise_exception", "strftime_now"),
}
# Fields of messages that no template reads -> what to give instead.
_UNREAD = {"function_call": "give tool_calls", "audio": "give text"}
_PROBE = "quireprobe"
Probe = Callable[[str], list[dict[str, Any]]]  # makes a conversation with a text at one certain place


class LongConversation(RequestError):
    """The messages have more than MAX_CHARACTERS and were not rendered."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation. Give `segments` to `Tokenizer.encode_segments`."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


class PromptText(str):
    """A rendered conversation as a plain string that keeps which of its parts the template wrote.

    Every operation on it returns an ordinary string, in which control tokens are text again.
    """

    segments: tuple[Segment, ...]

    def __new__(cls, segments: tuple[Segment, ...]) -> PromptText:
        text = super().__new__(cls, "".join(segment.text for segment in segments))
        text.segments = segments
        return text


class ChatTemplate:
    """The chat template of a model, rendered in a sandbox (see `renderer`).

    `templates` maps names to Jinja sources; "tool_use", if present, is for conversations with tools.
    `special_tokens` (`bos_token`, ...) are variables that the template may print as control tokens.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        self.templates = dict(templates)
        self.special_tokens = dict(special_tokens or {})
        self.renderer = renderer or TemplateRenderer()
        self._takes_parts: dict[str, bool] = {}
        self._silences: dict[str, Any] = {}
        self._probed: dict[tuple[str, Probe], str | None] = {}

    def start(self) -> None:
        """Start the render process ahead of the first request."""
        if self.templates:
            self.renderer.start()

    def check(self) -> None:
        """Raise ConfigError for a template that does not compile."""
        for name, source in self.templates.items():
            if (problem := self.renderer.problem_of(source)) is not None:
                what = f"the chat template {quoted(name)} does not compile: {problem}"
                raise ConfigError(what, "correct it, or fetch it again")

    def close(self) -> None:
        self.renderer.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        continue_final_message: bool = False,
    ) -> Rendered:
        """Render a conversation. Raises RequestError if it is malformed or too long, or the template refuses.

        With `continue_final_message` the prompt ends where the last message, an assistant's, does: the model
        continues it, and no prompt for another answer is added.
        """
        extra = self._checked_kwargs({} if chat_template_kwargs is None else chat_template_kwargs)
        checked = check_messages(messages)
        end = _mark_end(checked[-1]) if continue_final_message else None
        source = self._source(tools)
        if late_system.DEVELOPER not in source:
            checked = late_system.of_system(checked)
        if not (parts := self._parts(source)):
            checked = [_flattened(message) for message in checked]
        if call_arguments.is_calling(checked) and self._wants_text(source):
            checked = call_arguments.as_text(checked, messages)
        checked = self._fitted_turns(source, checked)
        if late_system.is_late(checked) and _PROBE not in (self._tried(source, late_system.probe) or ""):
            checked = late_system.folded(checked)
        if user_turns.repeats(checked) and self._tried(source, user_turns.probe) is None:
            checked = user_turns.merged(checked)
        if parts:
            checked = [_in_parts(message) for message in checked]
        context = {"messages": checked, "tools": _checked_tools(tools), "documents": None, **extra}
        context |= {"add_generation_prompt": add_generation_prompt and end is None}
        rendered = self.render_context(source, context, now)
        return rendered if end is None else _cut(rendered, end)

    def render_context(
        self, source: str, context: Mapping[str, Any], now: datetime | None = None
    ) -> Rendered:
        """Render a Jinja source with exactly these variables and the special tokens, without checks."""
        trusted: dict[str, str | list[str]] = {**self.special_tokens}
        return Rendered(tuple(self.renderer.render(source, context, trusted, now)))

    def _source(self, tools: Any) -> str:
        if not self.templates:
            hint = "use the completions interface, or a model with chat_template.jinja"
            raise RequestError("this model has no chat template", hint, "messages")
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" not in self.templates:
            names = ", ".join(sorted(self.templates))
            raise RequestError(f"this model has no default chat template, only {names}", None, "messages")
        return self.templates["default"]

    def _parts(self, source: str) -> bool:
        """Return True if the template reads content given as a list of parts but not as text.

        It is tried out: nearly all take text, and a template that takes both prints the same for both.
        """
        if source not in self._takes_parts:
            contents: tuple[Any, ...] = (_PROBE, [{"type": "text", "text": _PROBE}])
            probes = ([{"role": "user", "content": content}] for content in contents)
            as_text, as_parts = (_PROBE in (self._written(source, messages) or "") for messages in probes)
            self._takes_parts[source] = as_parts and not as_text
        return self._takes_parts[source]

    def _tried(self, source: str, probe: Probe) -> str | None:
        """Render the conversation of a probe; return None if the template refuses it."""
        if (source, probe) not in self._probed:
            self._probed[source, probe] = self._written(source, probe(_PROBE))
        return self._probed[source, probe]

    def _wants_text(self, source: str) -> bool:
        """Return True if the template fails at a call's arguments as an object, and writes them as text."""
        if self._tried(source, call_arguments.probe_object) is not None:
            return False
        return _PROBE in (self._tried(source, call_arguments.probe_text) or "")

    def _fitted_turns(self, source: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the assistant's in a form that the template takes."""
        if assistant_turns.reads_thinking(source):
            both = (self._tried(source, assistant_turns.probe_both) or "").count(_PROBE)
            messages = assistant_turns.with_thinking(messages, both < 2)
        if assistant_turns.is_silent(messages):
            form = self._silence(source)
            messages = assistant_turns.silenced(messages, form)
        return messages

    def _silence(self, source: str) -> Any:
        """Return the first form of a content without text beside which the template writes calls.

        If it never does, it is the first form with which it does not fail.
        """
        if source not in self._silences:
            taken: list[tuple[bool, Any]] = []
            for form, conversations in assistant_turns.probes_of_silence(_PROBE):
                written = [text for one in conversations if (text := self._written(source, one)) is not None]
                taken += [(any(_PROBE in text for text in written), form)] if written else []
            self._silences[source] = max(taken, key=lambda form: form[0], default=(False, ""))[1]
        return self._silences[source]

    def _written(self, source: str, messages: list[dict[str, Any]]) -> str | None:
        """Render a conversation; return None if the template refuses it.

        Raises RequestError where it broke a limit: on a machine that is busy, that says nothing of it.
        """
        context = {"messages": messages, "add_generation_prompt": True}
        try:
            return self.render_context(source, {"tools": None, "documents": None} | context).text
        except RefusedByTemplate:
            return None

    def _checked_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(kwargs, Mapping):
            raise RequestError("chat_template_kwargs is not an object", param="chat_template_kwargs")
        for name in kwargs:
            if not isinstance(name, str) or name in _RESERVED or name in self.special_tokens:
                raise RequestError(
                    f"chat_template_kwargs may not set {name!r}",
                    "give it as a field of the request, if it is one",
                    "chat_template_kwargs",
                )
        _measure(dict(kwargs), "chat_template_kwargs")
        return dict(kwargs)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Return a copy of the messages in the form that templates expect. Raises RequestError if malformed.

    Arguments of tool calls, JSON text in the OpenAI API, become objects. A part of a content is a text or the
    place of an image, {"type": "image"}.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError("messages is not a list of messages", "give at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"{len(messages):,} messages are more than {MAX_MESSAGES:,}", None, "messages")
    _measure(list(messages), "messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        hint = 'such as {"role": "user", "content": "Hi"}'
        raise RequestError(f"{where} is not an object", hint, "messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not 1 <= len(role) <= 64:
        raise RequestError(f"{where} has no role", "one of system, user, assistant, tool", "messages")
    if not isinstance(content, str | list | None):
        raise RequestError(f"{where}.content is neither text nor a list of parts", None, "messages")
    if content is None and role in ("system", "developer", "user", "tool"):
        raise RequestError(f"{where}: a {role} message has no content", None, "messages")
    if isinstance(content, list):
        content = [_said(part) for part in content]
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "image" and (kind != "text" or not isinstance(part.get("text"), str)):
            problem = f"{where}: a content part of type {repr(kind)[:64]} is not supported"
            raise RequestError(problem, "give parts of type text, or images to a model that sees", "messages")
    if left_out := [name for name in _UNREAD if message.get(name)]:
        problem = f"{where}.{left_out[0]} is not supported"
        raise RequestError(problem, _UNREAD[left_out[0]], "messages")
    checked = {**message, "content": content}
    if content is None:  # which templates print as the word None
        refusal = message.get("refusal")
        checked["content"] = refusal if isinstance(refusal, str) else ""
    if message.get("tool_calls") is not None:
        checked["tool_calls"] = _checked_calls(message["tool_calls"], f"{where}.tool_calls")
    return checked


def _said(part: Any) -> Any:
    """Return a refusal, a part of an assistant's content in OpenAI's API, as a text; others as they are."""
    is_refusal = isinstance(part, Mapping) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where} is not a list of tool calls", None, "messages")
    checked = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}: a call names no function", None, "messages")
        function = dict(function)
        if not isinstance(function.get("arguments"), Mapping):
            function["arguments"] = _arguments(function.get("arguments"), where)
        checked.append({**call, "function": function} if "function" in call else function)
    return checked


def _arguments(text: Any, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads("{}" if text is None or text == "" else text)
        if isinstance(arguments, dict):
            _measure(arguments, "messages")
            return arguments
    except (TypeError, ValueError, RecursionError):
        pass
    raise RequestError(f"{where}: the arguments of a call are not a JSON object", None, "messages")


def _checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None or (isinstance(tools, Sequence) and not tools):
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools is not a list of objects", None, "tools")
    _measure(list(tools), "tools")
    return [dict(tool) for tool in tools]


def _mark_end(message: dict[str, Any]) -> str:
    """Append a mark to the text of an assistant's message, where the prompt is to be cut."""
    end = f"[end {secrets.token_hex(16)}]"
    content = message.get("content")
    ends = content[-1]["type"] if isinstance(content, list) and content else "text"
    if message["role"] != "assistant" or not content or ends != "text" or message.get("tool_calls"):
        problem = "continue_final_message needs an assistant's text as the last message"
        raise RequestError(problem, None, "continue_final_message")
    if isinstance(content, str):
        message["content"] = content + end
    else:
        message["content"] = [*content[:-1], content[-1] | {"text": content[-1]["text"] + end}]
    return end


def _cut(rendered: Rendered, end: str) -> Rendered:
    """Cut the prompt before a mark. The mark is untrusted text, and so within one segment."""
    for number, segment in reversed(list(enumerate(rendered.segments))):
        if (at := segment.text.rfind(end)) >= 0:
            return Rendered((*rendered.segments[:number], segment._replace(text=segment.text[:at])))
    problem = "the chat template does not print the text of the last message unchanged"
    raise RequestError(problem, "leave continue_final_message out", "continue_final_message")


def _flattened(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose texts are one; if it has images, those between them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = list[dict[str, Any]]()
    for kind, run in groupby(content, lambda part: part["type"]):
        same = [*run]
        texts = [part["text"] for part in same if kind == "text"]
        parts += [{"type": kind, "text": "\n".join(texts)}] if texts else same
    is_text = all(part["type"] == "text" for part in parts)
    return message | {"content": "".join(part["text"] for part in parts) if is_text else parts}


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is a part."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _measure(value: Any, param: str) -> None:
    """Refuse values nested too deep, too long, or of types that JSON lacks. Never recurses."""
    size, level = 0, [value]
    for _ in range(MAX_NESTING + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, Mapping):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
            elif item is not None and not isinstance(item, bool | int | float):
                raise RequestError(
                    f"{param} holds a {type(item).__name__}, which JSON cannot represent", None, param
                )
            size += 1
        if size > MAX_CHARACTERS:
            kind = LongConversation if param == "messages" else RequestError
            raise kind(f"{param} is longer than {MAX_CHARACTERS:,} characters", None, param)
        if not inner:
            return
        level = inner
    raise RequestError(f"{param} is nested deeper than {MAX_NESTING}", None, param)
