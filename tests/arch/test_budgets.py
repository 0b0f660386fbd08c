"""Budgets: how much there is to read, how long its pieces are, and what must carry an explanation.

A budget is raised only on purpose, in a commit that says what the new lines are for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

import pytest
from sources import ROOT, Source, functions, num_lines, package, snippet

from quire.config import EngineConfig

CODE_LINES = 19_200  # lines of the package that hold code: no blank lines, comments or docstrings
NATIVE_LINES = 7_500  # of C++, every line counted
FILE_LINES = 400  # every line counted, as in an editor
FUNCTION_LINES, LONGEST_FUNCTION = 45, 60  # 95 in 100 within the first, all within the second
LINE_LENGTH = 110
CONFIG_FIELDS = 32
UNEXPLAINED_LINES = 8  # a longer public function says what it does
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: Source) -> int:
    """How many lines hold code: a docstring, a comment or nothing does not count."""
    documented: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | _Definition) and _explained(node):
            first = node.body[0]
            documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(map(str.strip, source.text.splitlines()), 1)
    return sum(1 for number, line in lines if line and line[0] != "#" and number not in documented)


def long_files(sources: Iterable[Source], limit: int = FILE_LINES) -> list[str]:
    counts = ((len(source.text.splitlines()), source.path) for source in sources)
    return [f"{path}: {count} lines" for count, path in counts if count > limit]


def long_functions(sources: Iterable[Source]) -> list[str]:
    """Functions beyond the longest allowed; and the long ones, if they are more than one in twenty."""
    found = [
        (num_lines(node), f"{source.at(node)} {node.name}")
        for source in sources
        for node in functions(source)
    ]
    long = [f"{place}: {count} lines" for count, place in found if count > FUNCTION_LINES]
    too_long = [f"{place}: {count} lines" for count, place in found if count > LONGEST_FUNCTION]
    return too_long or (long if len(long) * 20 > len(found) else [])


def long_lines(sources: Iterable[Source]) -> list[str]:
    return [
        f"{source.path}:{number}: {len(line)} characters"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(line) > LINE_LENGTH
    ]


def unexplained(sources: Sequence[Source]) -> list[str]:
    """What lacks a docstring: files, public classes, and public functions that are not short.

    A method needs none where its part of the package explains the name once: that is its contract. The
    functions of `models` are explained by their file; each is one family.
    """
    public = [(s.unit, *definition) for s in sources for definition in _public(s)]
    contracts = {(unit, name) for unit, owner, name, node in public if owner and _explained(node)}
    found = [f"{s.path}: the file" for s in sources if s.tree.body and not _explained(s.tree)]
    for source in sources:
        for owner, name, node in _public(source):
            short = not isinstance(node, ast.ClassDef) and num_lines(node) <= UNEXPLAINED_LINES
            by_contract = bool(owner) and (source.unit, name) in contracts
            by_file = source.unit == "models" and not isinstance(node, ast.ClassDef)
            if not (short or by_contract or by_file or _explained(node)):
                found.append(f"{source.at(node)}: {owner}{name}")
    return found


def _public(source: Source) -> Iterator[tuple[str, str, _Definition]]:
    """(owner, name, node) of public classes and functions of a file, and of public classes' methods."""
    for node in source.tree.body:
        if isinstance(node, _Definition) and not node.name.startswith("_"):
            yield "", node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, _Definition) and not inner.name.startswith("_"):
                    yield f"{node.name}.", inner.name, inner


def _explained(node: ast.Module | _Definition) -> bool:
    return bool(ast.get_docstring(node))


def test_the_package_can_be_read_in_a_weekend() -> None:
    assert sum(code_lines(source) for source in package()) <= CODE_LINES


def native() -> list[Source]:
    """The native core's files."""
    files = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h"))
    return [Source(str(path.relative_to(ROOT)), path.read_text()) for path in files]


def test_the_native_core_is_small() -> None:
    assert sum(len(source.text.splitlines()) for source in native()) <= NATIVE_LINES
    assert long_files(native()) == []
    assert long_lines(native()) == []


def test_files_are_of_one_concept() -> None:
    assert long_files(package()) == []


def test_functions_can_be_seen_at_once() -> None:
    assert long_functions(package()) == []


def test_lines_fit() -> None:
    assert long_lines(package()) == []


def test_the_config_is_small() -> None:
    assert len(fields(EngineConfig)) <= CONFIG_FIELDS


def test_what_is_public_is_explained() -> None:
    assert unexplained(package()) == []


def test_code_lines_are_those_with_code() -> None:
    text = '"""Two\n\nlines."""\n\nx = """a\n\nb"""  # three\n# none\n\n'
    assert code_lines(snippet(text)) == 2
    assert code_lines(snippet(text + 'def f():\n    """None."""\n    return (\n        1\n    )\n')) == 2 + 4


def test_long_files_are_found() -> None:
    assert long_files([snippet("x = 1\n" * FILE_LINES)]) == []
    assert long_files([snippet("x = 1\n" * FILE_LINES + "\n")]) == ["quire/engine/example.py: 401 lines"]


def _function(lines: int, indent: str = "") -> str:
    return f"{indent}def f():\n" + f"{indent}    x = 1\n" * (lines - 1)


def test_long_functions_are_found() -> None:
    short, long, longest = (_function(n) for n in (FUNCTION_LINES, FUNCTION_LINES + 1, LONGEST_FUNCTION + 1))
    assert long_functions([snippet(short * 20)]) == []
    assert long_functions([snippet(short * 19 + long)]) == []
    assert len(long_functions([snippet(short * 18 + long * 2)])) == 2
    assert len(long_functions([snippet(short * 99 + longest)])) == 1
    assert len(long_functions([snippet("class A:\n" + _function(LONGEST_FUNCTION + 1, "    "))])) == 1


def test_long_lines_are_found() -> None:
    assert long_lines([snippet("#" * LINE_LENGTH)]) == []
    assert len(long_lines([snippet("\n" + "#" * (LINE_LENGTH + 1))])) == 1


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        '"""A file."""\nclass A:\n    x = 1',
        '"""A file."""\n' + _function(UNEXPLAINED_LINES + 1),
        '"""A file."""\nclass A:\n    """A."""\n' + _function(UNEXPLAINED_LINES + 1, "    "),
    ],
)
def test_what_lacks_a_docstring_is_found(text: str) -> None:
    assert len(unexplained([snippet(text)])) == 1


def test_contracts_and_families_need_no_second_docstring() -> None:
    body = _function(UNEXPLAINED_LINES + 1, "    ")
    contract = '"""A."""\nclass A:\n    """A."""\n    def f():\n        """Do it."""\n'
    assert unexplained([snippet(contract), snippet(f'"""B."""\nclass B:\n    """B."""\n{body}')]) == []
    assert unexplained([snippet('"""A family."""\n' + _function(30), "quire/models/llama.py")]) == []
