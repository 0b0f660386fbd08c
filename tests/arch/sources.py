"""The package's source as data: files, syntax trees and imports. Rules are functions over it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """One Python file of the package. `path` is relative to the repository: "quire/engine/blocks.py"."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree: to walk it takes longer than to look at them."""
        return tuple(ast.walk(self.tree))

    @property
    def module(self) -> str:
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def unit(self) -> str:
        """The part of the house: "engine" for quire.engine.blocks, "" for quire itself."""
        return unit_of(self.module)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self))

    def at(self, node: ast.AST) -> str:
        """The place of a node, for messages."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@dataclass(frozen=True)
class Import:
    """One imported name: `from a.b import c` has module "a.b" and name "c"; `import a.b` has name None."""

    module: str
    name: str | None
    place: str
    typing_only: bool  # under `if TYPE_CHECKING`
    in_function: bool  # not done when the file is loaded


def unit_of(module: str) -> str:
    """The second part of a dotted name: the package or file directly under quire."""
    return module.split(".")[1] if "." in module else ""


@cache
def package() -> tuple[Source, ...]:
    """Every Python file of the package, in order."""
    paths = sorted((ROOT / "quire").rglob("*.py"))
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in paths)


def snippet(text: str, path: str = "quire/engine/example.py") -> Source:
    """A made-up file: what the tests of the rules themselves look at."""
    return Source(path, text)


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file, nested ones too."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Lines from `def` or `class` to the last one of the body, decorators left out."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def dotted(node: ast.expr) -> str:
    """`a.b.c` as written, or "" for anything but names joined by dots."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _imports(source: Source) -> Iterator[Import]:
    hidden = {
        id(inner)
        for node in source.nodes
        if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    late = {id(inner) for function in functions(source) for inner in ast.walk(function)}
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = _absolute(source, node) if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                where = (source.at(node), id(node) in hidden, id(node) in late)
                yield (
                    Import(alias.name, None, *where) if module is None else Import(module, alias.name, *where)
                )


def module_imported(other: Import, modules: Set[str]) -> str:
    """`from quire.program import ops` is the file quire.program.ops, not the package that holds it."""
    full = f"{other.module}.{other.name}"
    return full if full in modules else other.module


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    """The module of `from ... import`, relative ones resolved."""
    if not node.level:
        return node.module or ""
    folder = source.path.split("/")[:-1]
    above = folder[: len(folder) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)
