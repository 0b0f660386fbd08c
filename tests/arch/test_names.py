"""Names and docstrings: a public class has a name of its own, and a docstring begins with what it says."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest
from sources import ROOT, Source, package, snippet

_QUESTION = re.compile(r"(What|Who|How|Whether)\b")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def equal_names(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Public classes' names that more than one file defines, with the places."""
    places = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(source.at(node))
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def questions(source: Source) -> list[str]:
    """Docstrings that open with a question word: "What is kept of x" says less than "The part of x kept"."""
    found = []
    for node in source.nodes:
        if isinstance(node, _Documented) and _QUESTION.match(text := ast.get_docstring(node) or ""):
            found.append(f"{source.at(node)}: {text.splitlines()[0]}")
    return found


def test_class_names_are_defined_once() -> None:
    found = equal_names(package())
    assert not found, "\n".join(f"{name}: {', '.join(places)}" for name, places in found.items())


def test_docstrings_open_with_what_they_say() -> None:
    folders = ("benchmarks", "scripts", "tests/arch", "tests/endurance", "tests/exactness")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    others = (Source(str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in paths)
    found = [line for source in (*package(), *others) for line in questions(source)]
    assert not found, "\n".join(found)


def test_equal_class_names_are_found() -> None:
    one = snippet("class A: pass\nclass _B: pass\nclass C: pass", "quire/a.py")
    two = snippet("\nclass A: pass\nclass _B: pass\nclass D:\n    class C: pass", "quire/b.py")
    assert equal_names([one, two]) == {"A": ["quire/a.py:1", "quire/b.py:2"]}


@pytest.mark.parametrize("opening", ["What it is.", "Who calls.", "How it\n\n    is done.", "Whether it is"])
def test_a_question_is_found(opening: str) -> None:
    places = ('"""{}"""', 'class A:\n    """{}"""', 'def f():\n    """{}"""', 'async def f():\n    """{}"""')
    found = [questions(snippet(place.format(opening))) for place in places]
    assert Counter(map(len, found)) == {1: len(places)}


def test_other_docstrings_pass() -> None:
    for text in ("Return what it is.", "Whoever calls.", "However", "The whole"):
        assert questions(snippet(f'def f():\n    """{text}"""\n    x = "What"')) == []
