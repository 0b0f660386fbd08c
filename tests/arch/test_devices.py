"""Nothing outside quire/backends asks which backend it is: what differs, its Device says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest
from sources import Source, dotted, package, snippet

HOME = "quire/backends/"
# What is said of every backend; all other files of quire/backends are one backend's own.
SHARED = frozenset({"backend", "checksum", "device", "draft_model", "kv_cache", "packed_cache", "text_index"})
_OWN = re.compile("is_native|(Native|Reference|Null)(Backend|Device)")
NAMES = frozenset({"native", "reference"})  # "null" is a word of JSON, too


def questions(sources: Iterable[Source]) -> list[str]:
    """Lines outside quire/backends that ask which backend it is."""
    return [fault for source in sources if not source.path.startswith(HOME) for fault in _faults(source)]


def _faults(source: Source) -> Iterator[str]:
    for other in source.imports:
        full = f"{other.module}.{other.name}" if other.name else other.module
        parts = full.split(".")
        if parts[:2] == ["quire", "backends"] and (len(parts) < 3 or parts[2] not in SHARED):
            yield f"{other.place}: imports {full}"
    for node in source.nodes:
        if isinstance(node, ast.Compare) and _asks(node):
            yield f"{source.at(node)}: compares a backend's name"
        elif isinstance(node, ast.Match) and _mentions_device(node.subject):
            yield f"{source.at(node)}: matches a backend's name"
        elif isinstance(node, ast.Name | ast.Attribute) and _OWN.fullmatch(dotted(node).split(".")[-1]):
            yield f"{source.at(node)}: names {dotted(node)}"


def _asks(node: ast.Compare) -> bool:
    """True for `x == "native"`, and for any comparison of a device or backend but `is None`."""
    sides = (node.left, *node.comparators)
    words = {leaf.value for side in sides for leaf in ast.walk(side) if isinstance(leaf, ast.Constant)}
    if words & NAMES:
        return True
    return words != {None} and any(map(_mentions_device, sides))


def _mentions_device(node: ast.expr) -> bool:
    """True for `config.device`, `device.name`, `facts["backend"]`, `options.get("device")`."""
    for leaf in ast.walk(node):
        if isinstance(leaf, ast.Attribute) and leaf.attr in ("device", "backend"):
            return True
        if isinstance(leaf, ast.Name) and leaf.id in ("device", "backend"):
            return True
        if isinstance(leaf, ast.Constant) and leaf.value in ("device", "backend"):
            return True
    return False


def test_nobody_asks_which_backend_it_is() -> None:
    assert questions(package()) == []


@pytest.mark.parametrize(
    "text",
    [
        "from quire.backends.native.backend import NativeBackend",
        "def f():\n    from quire.backends.native import _core",
        "from quire.backends import reference",
        "import quire.backends.null",
        'if config.device == "null":\n    pass',
        'if config.device in ("auto", "native"):\n    pass',
        'if options.get("device") != other:\n    pass',
        'if facts["backend"] == name:\n    pass',
        'found = "native" != name',
        'match device.name:\n    case "null":\n        pass',
        "if isinstance(backend, NativeBackend):\n    pass",
        "if type(x) is backends.ReferenceDevice:\n    pass",
        "if is_native(config):\n    pass",
    ],
)
def test_a_question_is_found(text: str) -> None:
    assert questions([snippet(text, "quire/memory.py")]) != []
    assert questions([snippet(text, "quire/backends/native/device.py")]) == []


@pytest.mark.parametrize(
    "text",
    [
        "from quire.backends.device import Device, device_for",
        "from quire.backends.backend import Backend",
        'if kind == "null":\n    pass',
        "if backend is None:\n    pass",
        "device = device_for(config)\nif device.computes:\n    device.build()",
    ],
)
def test_what_is_no_question_passes(text: str) -> None:
    assert questions([snippet(text, "quire/memory.py")]) == []
