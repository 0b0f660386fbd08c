"""Data that is read must not be run: no unpickling, no evaluation, no shell, and no check that -O removes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest
from sources import Source, dotted, package, snippet

MODULES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"})
BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
CALLS = frozenset({"torch.load", "os.system", "os.popen", "code.interact", "runpy.run_path", "builtins.eval"})


def dangers(sources: Iterable[Source]) -> list[str]:
    """Every way found to run what was read, with its place."""
    return [f"{source.at(node)}: {what}" for source in sources for node, what in _dangers(source)]


def _dangers(source: Source) -> Iterator[tuple[ast.AST, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node, f"imports {name}") for name in _imported(node) if _forbidden(name))
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node, f"uses {node.id}"
        elif isinstance(node, ast.Call):
            yield from ((node, what) for what in _calls(node))


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if not node.level else []


def _forbidden(name: str) -> bool:
    """Shared memory is the one part of multiprocessing that sends no pickles."""
    if name.startswith("multiprocessing.shared_memory"):
        return False
    return name.split(".")[0] in MODULES or name in CALLS or name.endswith(".ProcessPoolExecutor")


def _calls(node: ast.Call) -> Iterator[str]:
    name = dotted(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in CALLS:
        yield f"calls {name}"
    if "allow_pickle" in keywords and not _is(keywords["allow_pickle"], False):
        yield "allows pickle"
    if re.fullmatch(r"yaml\.\w*load\w*", name) and not name.startswith("yaml.safe_"):
        loaders = [dotted(value) for value in (*node.args[1:], *keywords.values())]
        if not any("Safe" in loader for loader in loaders):
            yield f"calls {name} without a safe loader"
    if "shell" in keywords and not _is(keywords["shell"], False):
        yield "asks for a shell"
    if "trust_remote_code" in keywords and not _is(keywords["trust_remote_code"], False):
        yield "trusts remote code"
    if name.endswith("import_module") and not (node.args and isinstance(node.args[0], ast.Constant)):
        yield "imports a module by a name that is not written here"


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def asserts(sources: Iterable[Source]) -> list[str]:
    """Assert statements, but for two uses that lose nothing under `python -O`.

    `check` and `_check_...` methods of the engine state invariants for tests to call; `assert x is not
    None` gives the type checker what is known.
    """
    return [
        f"{source.at(node)}: assert"
        for source in sources
        for node in _asserts(source.tree, invariants=False, engine=source.unit == "engine")
        if not _narrows(node)
    ]


def _asserts(parent: ast.AST, *, invariants: bool, engine: bool) -> Iterator[ast.Assert]:
    for node in ast.iter_child_nodes(parent):
        inside = invariants
        if isinstance(node, ast.FunctionDef) and isinstance(parent, ast.ClassDef):
            inside = engine and (node.name == "check" or node.name.startswith("_check_"))
        if isinstance(node, ast.Assert) and not inside:
            yield node
        yield from _asserts(node, invariants=inside, engine=engine)


def _narrows(node: ast.Assert) -> bool:
    test = node.test
    return (
        isinstance(test, ast.Compare)
        and dotted(test.left) != ""
        and isinstance(test.ops[0], ast.IsNot)
        and _is(test.comparators[0], None)
    )


def test_nothing_read_is_run() -> None:
    assert dangers(package()) == []


def test_checks_are_not_asserts() -> None:
    assert asserts(package()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "import dill as d",
        "from multiprocessing import Queue",
        "from multiprocessing.connection import Client",
        "from concurrent.futures import ProcessPoolExecutor",
        "from torch import load",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "yaml.load(text)",
        "yaml.load_all(text, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(text).safe",
        "x = eval('1')",
        "run = exec",
        "compile(text, 'f', 'exec')",
        "__import__(name)",
        "os.system(line)",
        "subprocess.run(line, shell=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "importlib.import_module(config['auto_map'])",
    ],
)
def test_a_danger_is_found(text: str) -> None:
    assert len(dangers([snippet(text)])) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import json, struct",
        "from multiprocessing.shared_memory import SharedMemory",
        "np.load(path, allow_pickle=False)",
        "yaml.safe_load(text)",
        "yaml.load(text, Loader=yaml.CSafeLoader)",
        "pattern = re.compile(text)",
        "model.eval()",
        "importlib.import_module('quire.llm')",
    ],
)
def test_what_is_harmless_passes(text: str) -> None:
    assert dangers([snippet(text)]) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("quire/server/auth.py", "def f(key):\n    assert key == secret"),
        ("quire/server/auth.py", "class A:\n    def check(self):\n        assert self.key == secret"),
        ("quire/engine/blocks.py", "class A:\n    def free(self):\n        assert self.x > 0"),
        ("quire/engine/blocks.py", "def check(x):\n    assert x"),
        ("quire/engine/blocks.py", "class A:\n    def f(self):\n        assert self.x is None"),
    ],
)
def test_a_check_by_assert_is_found(path: str, text: str) -> None:
    assert len(asserts([snippet(text, path)])) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "quire/engine/blocks.py",
            "class A:\n    def check(self):\n        for x in self.y:\n            assert x",
        ),
        ("quire/engine/blocks.py", "class A:\n    def _check_rows(self):\n        assert self.x == 1"),
        ("quire/sandbox/process.py", "assert process.stdin is not None"),
    ],
)
def test_invariants_and_narrowing_pass(path: str, text: str) -> None:
    assert asserts([snippet(text, path)]) == []
