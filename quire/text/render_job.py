"""The job of the render process: render a chat template, and return its text with the origins.

It runs in a sandbox, because a template is a program from a model repository and not to be relied on.
Imports nothing of Quire but `traced` and `sandbox.job`.
"""

from __future__ import annotations

import datetime
import pprint  # noqa: F401 (this and textwrap: filters import them when first used)
import re
import textwrap  # noqa: F401
from functools import lru_cache
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import TemplateError

from quire.sandbox.job import Job
from quire.text.traced import ChatEnvironment, literal, mask_of

MAX_TEMPLATES = 16

# Some templates spell a control token from the role: '<|' + role + '|>'. These names are not free text.
ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model", "observation")
)

_ENVIRONMENT = ChatEnvironment()
_RUNS = re.compile(rb"\x01+|\x00+")


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Render one template into segments of text, each with True if it is trusted."""
    template = _template(request["source"])
    if request["context"] is None:  # the request asks only if the template compiles
        return {"segments": []}
    text = template.render(_context(request))
    mask = mask_of(text)
    spans = [found.span() for found in _RUNS.finditer(mask)]
    return {"segments": [(str.__getitem__(text, slice(*span)), bool(mask[span[0]])) for span in spans]}


@lru_cache(MAX_TEMPLATES)
def _template(source: str) -> Template:
    return _ENVIRONMENT.from_string(source)


def _context(request: dict[str, Any]) -> dict[str, Any]:
    """Return the template's variables; those of the tokenizer and known roles are trusted."""
    context: dict[str, Any] = request["context"]
    for name, value in request["trusted"].items():
        context[name] = literal(value) if isinstance(value, str) else [literal(item) for item in value]
    for message in context.get("messages") or ():
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(role, str) and role in ROLES:
            message["role"] = literal(role)
    now = request["now"]

    def strftime_now(pattern: str) -> str:
        clock = datetime.datetime.now() if now is None else datetime.datetime.fromisoformat(now)
        return clock.strftime(pattern)

    context["strftime_now"] = strftime_now
    return context


def describe(error: Exception) -> str:
    """Return the message of an error for the caller whose conversation met it."""
    if isinstance(error, RecursionError):
        return "the template recurses without end"
    if isinstance(error, TemplateError):
        return str(error.message or type(error).__name__)
    return f"{type(error).__name__}: {error}"


_SAMPLE = "{{ 'a\\n' | tojson }}{{ strftime_now('%d %b') }}"

JOB = Job(run, describe, warm_up={"source": _SAMPLE, "context": {}, "trusted": {}, "now": None})
