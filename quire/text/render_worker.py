"""The render process: reads requests, renders chat templates, writes the text with its origins.

One JSON document a line on stdin and stdout. It runs with little memory, little processor time and no
free file descriptor, because a template comes from a model repository and is not to be relied on.
It ends when its stdin does. Imports nothing of Quire but `traced`.
"""

from __future__ import annotations

import datetime
import json
import pprint  # noqa: F401 (this and textwrap: filters import them when first used)
import re
import resource
import signal
import sys
import textwrap  # noqa: F401
import time
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import TemplateError

from quire.text.traced import ChatEnvironment, literal, mask_of

MAX_TEMPLATES = 16

# Some templates spell a control token from the role: '<|' + role + '|>'. These names are not free text.
ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model", "observation")
)

# Rendered before the limits are set: makes Python load its codecs while files can still be opened.
_WARM_UP = json.dumps(
    {"source": "{{ 'a\\n' | tojson }}{{ strftime_now('%d %b') }}", "context": {}, "trusted": {}, "now": None}
).encode()

_RUNS = re.compile(rb"\x01+|\x00+")


def main() -> None:
    """Serve requests until stdin ends. Arguments: memory limit in bytes, processor seconds a request."""
    memory_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment, templates = ChatEnvironment(), dict[str, Template]()
    _answer(environment, {}, _WARM_UP)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # no file, no socket: 0, 1 and 2 are taken
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    _write({"ready": True})
    for line in sys.stdin.buffer:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + cpu_s + 1, hard))
        reply = _answer(environment, templates, line)
        _write(reply)
        if reply.get("kind") == "memory":
            return  # a fresh process has all its memory again


def _answer(environment: ChatEnvironment, templates: dict[str, Template], line: bytes) -> dict[str, Any]:
    """Render one request; every failure is an answer."""
    try:
        request = json.loads(line)
        source = request["source"]
        if source not in templates:
            if len(templates) >= MAX_TEMPLATES:
                templates.clear()
            templates[source] = environment.from_string(source)
        if request["context"] is None:  # whether it is a template was all that was asked
            return {"segments": []}
        text = templates[source].render(_context(request))
        mask = mask_of(text)
        runs = [(run.start(), run.end()) for run in _RUNS.finditer(mask)]
        return {"segments": [(str.__getitem__(text, slice(*run)), bool(mask[run[0]])) for run in runs]}
    except MemoryError:
        return {"kind": "memory"}
    except RecursionError:
        return {"kind": "template", "error": "the template recurses without end"}
    except TemplateError as error:
        return {"kind": "template", "error": str(error.message or type(error).__name__)[:500]}
    except Exception as error:
        return {"kind": "template", "error": f"{type(error).__name__}: {error}"[:500]}


def _context(request: dict[str, Any]) -> dict[str, Any]:
    """The template's variables; those of the tokenizer and the known roles are trusted."""
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


def _write(reply: dict[str, Any]) -> None:
    try:
        line = json.dumps(reply).encode()
    except MemoryError:
        line = b'{"kind": "memory"}'
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
