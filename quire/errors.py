"""Typed errors. Each has one clear message and, where possible, a hint that says what to do.

Messages quote untrusted text: names in files, fields of requests. `quoted` shortens it as it enters a
message, and every error escapes characters that could control a terminal or hide text in one.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable
from typing import Any

MAX_QUOTED = 100  # characters of a foreign value in a message
MAX_MESSAGE = 4000  # of a whole message

# Control characters, characters that reorder or hide text, lone surrogates
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = MAX_QUOTED


def escape(text: str) -> str:
    """Return a text as one visible line: unsafe characters as \\uXXXX."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def quoted(value: Any) -> str:
    """Return the `repr` of an untrusted value, of about MAX_QUOTED characters at most."""
    return shortened(_SHORT.repr(value), MAX_QUOTED + 10)


def shortened(text: str, limit: int = 60) -> str:
    """Return the beginning of a text of any length."""
    return text if len(text) <= limit else text[:limit] + "..."


class QuireError(Exception):
    """Base of every error that Quire raises on purpose: a message for people and an optional hint.

    Both are escaped, and truncated if they are very long.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        message = _shown(message)
        super().__init__(message)
        self.message = message
        self.hint = hint if hint is None else _shown(hint)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class Conflict(QuireError):
    """Something that cannot be begun because of what else is done."""


class ConfigError(QuireError, ValueError):
    """An invalid flag, file or checkpoint, found at startup. Nothing has been loaded."""


class RequestError(QuireError, ValueError):
    """An invalid request; it fails alone and before it starts. `param` names the offending field.

    `code` is a machine-readable code that clients know, if there is one: "context_length_exceeded".
    """

    def __init__(
        self, message: str, hint: str | None = None, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, hint)
        self.param = param
        self.code = code


class ContextOverflow(RequestError):
    """A prompt that leaves no space in the model's context for one token of output.

    `size` is its length in words ("9008 tokens"); `what` names what the caller can shorten. Agents compact
    their conversations when they recognize the wording of OpenAI's servers or of Anthropic's (`anthropic`).
    """

    def __init__(self, max_model_len: int, size: str, what: str = "prompt") -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {size}."
            f" Please reduce the length of the {what}.",
            None,
            what,
            "context_length_exceeded",
        )
        self.anthropic = f"prompt is too long: {size} > {max_model_len - 1} maximum"


class Overloaded(QuireError):
    """The server is at capacity. `retry_after_s` is when to try again, in seconds."""

    def __init__(self, message: str, hint: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, hint)
        self.retry_after_s = retry_after_s


class EngineDead(QuireError):
    """The engine has failed; every open request ends with this error.

    `retry` is False for a request that was in the engine each time it failed: it may be the cause.
    """

    def __init__(self, message: str, hint: str | None = None, retry: bool = True) -> None:
        super().__init__(message, hint)
        self.retry = retry


def _shown(text: str) -> str:
    return escape(shortened(text, MAX_MESSAGE))


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return a hint for a mistyped name: the closest known one, or None if none is close."""
    if len(name) > MAX_QUOTED:
        return None
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else None
