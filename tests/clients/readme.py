"""The examples in the README of an installed package."""

from __future__ import annotations

import asyncio
import inspect
import re
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any, NamedTuple

_PART = re.compile(r"^#+ ([^\n]+)$|^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MODEL = re.compile(r'\bmodel="([^"]+)"')


class Example(NamedTuple):
    """A block of Python, and the heading that it stands under."""

    heading: str
    code: str


def examples(package: str) -> list[Example]:
    """All of a package, in order; none when it is not installed."""
    try:
        text = metadata(package).get_payload()
    except PackageNotFoundError:
        return []
    found, heading = [], ""
    for title, language, code in _PART.findall(str(text)):
        if title:
            heading = title.strip("`.")
        elif language in ("py", "python"):
            found.append(Example(heading, code))
    return found


def model_names(package: str) -> list[str]:
    """Names of models that the examples ask for."""
    return sorted({name for example in examples(package) for name in _MODEL.findall(example.code)})


def run(example: Example, **names: Any) -> dict[str, Any]:
    """Run one as it stands, with these names given; what names it leaves."""
    code = compile(example.code, example.heading, "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT)
    scope = {"__name__": "example", **names}
    waiting = eval(code, scope)
    if inspect.iscoroutine(waiting):
        asyncio.run(waiting)
    return scope
