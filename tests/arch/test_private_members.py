"""Private members of libraries that the package overrides or reads: a list with the reasons, and bounds."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cache

import pytest
from sources import ROOT, Source, package, snippet

# Member -> its library, and the reason. A version without it must not be installed, so the library has
# an upper bound in pyproject.toml (the standard library's is the Python that the tests run on).
PRIVATE: dict[str, tuple[str, str]] = {
    "_actions": (
        "argparse",
        "the flags of a parser, among which the one nearest to a mistyped flag is looked for",
    ),
}

# Libraries that the server is built into rather than onto: subclassed, or dependent on a version.
BOUNDED = ("h11", "jinja2", "starlette", "uvicorn")
# Files that need a library which is not here: `make ray` looks at what the first derives from it; the other
# derives nothing from one.
OTHER_ENVIRONMENT = frozenset({"quire/cluster/ray.py", "quire/backends/cuda/gpu_group.py"})
_DOCUMENTED = frozenset({"_asdict", "_fields", "_field_defaults", "_make", "_replace"})  # of named tuples


def private_members(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Members of libraries that begin with an underscore and are named in a file, with the places.

    In a class derived from a library's, these are what a parent has, too; anywhere else, what no file of the
    package defines. A name given as text counts: `getattr(x, "_name")`.
    """
    sources = tuple(sources)
    own = {name for source in sources for name in _defined(source.nodes)}
    found: dict[str, set[str]] = {}
    for source in sources:
        inherited = {id(node): names for node, names in _derived(source)}
        for scope in (source.tree, *(node for node in source.nodes if id(node) in inherited)):
            taken = inherited.get(id(scope), frozenset())
            for node, name in _named(source.nodes if scope is source.tree else tuple(ast.walk(scope))):
                if name in taken or (name not in own and isinstance(scope, ast.Module)):
                    found.setdefault(name, set()).add(source.at(node))
    return {name: sorted(places) for name, places in sorted(found.items())}


def _private(name: str) -> bool:
    return bool(re.fullmatch(r"_[a-zA-Z]\w*(?<!_)", name)) and name not in _DOCUMENTED


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that this code gives to something."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def _named(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    """Private members that this code defines, reads or names in a text; pieces of f-strings are no names."""
    pieces = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            name = node.value
        if _private(name):
            yield node, name


def _derived(source: Source) -> Iterator[tuple[ast.ClassDef, frozenset[str]]]:
    """Classes of a file with parents from libraries, and the private members of those."""
    if source.path in OTHER_ENVIRONMENT:
        return
    module = None
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef) and node.bases:
            module = module or importlib.import_module(source.module)
            made = getattr(module, node.name)
            parents = [parent for parent in made.__mro__[:-1] if not parent.__module__.startswith("quire")]
            yield node, frozenset().union(*map(_members, parents))


@cache
def _members(parent: type) -> Set[str]:
    """Private members of a class, and of what its methods set on an instance."""
    try:
        text = inspect.getsource(parent)
    except (OSError, TypeError):  # not written in Python
        text = ""
    return {name for name in (*vars(parent), *re.findall(r"\bself\.(_\w+)", text)) if _private(name)}


def bounds() -> dict[str, bool]:
    """Return True for each required library that has an upper bound in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {re.split(r"[^\w-]", line)[0]: "<" in line for line in project["dependencies"]}


def test_private_members_of_libraries_are_listed() -> None:
    found = private_members(package())
    new = {name: places for name, places in found.items() if name not in PRIVATE}
    assert not new, f"a library may rename these: use what is public, or list them with the reason: {new}"
    gone = sorted(PRIVATE.keys() - found.keys())
    assert not gone, f"no longer named in quire/: take them out of the table: {gone}"


def test_libraries_of_private_members_are_bounded() -> None:
    libraries = {library for library, _ in PRIVATE.values()} - sys.stdlib_module_names
    unbounded = [name for name in sorted(libraries | set(BOUNDED)) if not bounds().get(name)]
    assert not unbounded, f"no upper bound in pyproject.toml: {unbounded}"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("parser._actions", ["_actions"]),
        ("self._actions", ["_actions"]),
        ("vars(x).pop('_cb', None)", ["_cb"]),
        ("def f():\n    self._mine = 1\n    return other._mine", []),
        ("x._replace(a=1)\nx.__dict__\nx._missing_\nf'{x}_token'", []),
    ],
)
def test_private_reads_are_found(text: str, names: list[str]) -> None:
    assert list(private_members([snippet(text)])) == names


def test_private_overrides_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parent:
        _limit = 1

        def __init__(self) -> None:
            self._left = 2

    class Child(Parent):
        pass

    text = "class Child(Parent):\n    _limit = 2\n    _more = 3\n    def f(self):\n        self._left = 1"
    module = type(sys)("example")
    module.Child = Child
    monkeypatch.setitem(sys.modules, "quire.engine.example", module)
    assert list(private_members([snippet(text)])) == ["_left", "_limit"]
