"""The rules of imports: the levels of the house, its special rules, and no cycles."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import pytest
from sources import ROOT, Import, Source, module_imported, package, snippet, unit_of

# Low to high. A unit imports from lower levels and, where the level is not "apart", from its own.
# "" is the package itself: `from quire import LLM`.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"types", "errors", "sampling_params", "block_store", "step_record"}),
    frozenset(
        {
            "config",
            "config_option",
            "environment",
            "vllm_options",
            "goals",
            "json_file",
            "linux",
            "regular_file",
            "sandbox",
        }
    ),
    frozenset({"program", "quantize", "grammar", "text", "images", "weights", "sampling"}),
    frozenset({"models", "backends"}),
    frozenset({"engine", "speculate", "runner", "transfer"}),
    frozenset(
        {
            "adapters",
            "llm",
            "async_llm",
            "loaded",
            "build",
            "description",
            "memory",
            "cache_plan",
            "prefix_store",
            "build_digest",
            "frontend",
            "request_reader",
            "outputs",
            "pooled_texts",
            "progress",
            "task",
        }
    )
    | frozenset({"roofline", "routing", "simulation", "experiments", "recording", "bench", "plots", ""}),
    frozenset({"server", "cluster", "cli", "console", "__main__"}),
)
APART = frozenset({"engine", "speculate", "runner", "transfer"})  # they know nothing of each other
LEVEL_OF = {unit: level for level, units in enumerate(LEVELS) for unit in units}

# unit -> what of Quire it may import besides itself, where that is narrower than its level
NARROW = {"models": frozenset({"program", "images", "errors", "types"})}

# unit -> what it must never import, from anywhere
FORBIDDEN = {"engine": frozenset({"numpy", "ml_dtypes", "quire.runner", "quire.backends", "quire.text"})}

# library -> the only places (path prefixes) that may import it
ONLY_IN: dict[str, str | tuple[str, ...]] = {
    "torch": (),
    "triton": ("quire/backends/cuda/kernels/", "quire/backends/cuda/interpreter.py"),
    "cuda": "quire/backends/cuda/driver.py",
    "nvmath": "quire/backends/cuda/cublas.py",
    "ray": "quire/cluster/",
    "huggingface_hub": "quire/weights/hub.py",
    "PIL": "quire/images/decode_job.py",
    "opentelemetry": "quire/server/telemetry.py",
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "aiohttp", "h11", "http.server"), "quire/server/"),
}
# API of the server -> the other APIs that it may import from; what several share is in quire/server itself.
APIS: dict[str, frozenset[str]] = {
    "anthropic": frozenset(),
    "llamacpp": frozenset(),
    "ollama": frozenset(),
    "openai": frozenset(),
    "pooling": frozenset(),
}
# Imported where installed, declared by no extra.
UNDECLARED = frozenset({"triton"})
# Names of a distribution and of the module it brings, where they differ.
MODULE_OF = {
    "pyyaml": "yaml",
    "pillow": "PIL",
    "cuda-core": "cuda",
    "cuda-bindings": "cuda",
    "nvmath-python": "nvmath",
    "nvidia-cublas": "nvidia",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}

BANNED_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "misc", "base", "manager"})
HEAVY = ("numpy", "ml_dtypes", "safetensors", "torch", "triton", "ray", "jinja2", "tokenizers", "rich")


def levels(sources: Iterable[Source]) -> list[str]:
    """Imports that go up, or across between units that are apart; units that have no level."""
    found = []
    for source in sources:
        if source.unit not in LEVEL_OF:
            found.append(f"{source.path}: {source.unit!r} is not in the table of levels")
            continue
        for other in source.imports:
            if other.typing_only or other.module.split(".")[0] != "quire":
                continue
            there = _unit_imported(other)
            if there != source.unit and not _allowed(source.unit, there):
                found.append(f"{other.place}: {source.unit or 'quire'} imports {there or 'quire'}")
    return found


def _unit_imported(other: Import) -> str:
    """`from quire import errors` means quire.errors; `from quire import LLM` means the package."""
    if other.module == "quire" and other.name in LEVEL_OF:
        return other.name
    return unit_of(other.module)


def _allowed(unit: str, there: str) -> bool:
    if unit in NARROW:
        return there in NARROW[unit]
    if unit == "":
        return True
    level = LEVEL_OF.get(there, len(LEVELS))
    return level < LEVEL_OF[unit] or (level == LEVEL_OF[unit] and unit not in APART)


def forbidden(sources: Iterable[Source]) -> list[str]:
    """Find forbidden imports of units, libraries and the environment outside their places."""
    found = []
    for source in sources:
        for other in source.imports:
            full = f"{other.module}.{other.name}" if other.name else other.module
            never = FORBIDDEN.get(source.unit, frozenset())
            if not other.typing_only and any(_within(full, name) for name in never):
                found.append(f"{other.place}: {source.unit} imports {full}")
            for library, place in ONLY_IN.items():
                if _within(full, library) and not source.path.startswith(place):
                    found.append(f"{other.place}: {library} outside {place or 'other projects'}")
            if full in ("os.environ", "os.getenv", "os.putenv") and source.path != "quire/environment.py":
                found.append(f"{other.place}: {full} outside quire/environment.py")
    return found


def between_apis(sources: Iterable[Source]) -> list[str]:
    """Imports of one of the server's APIs in another, beyond those in the table."""
    found = []
    for source in sources:
        for other in source.imports:
            here, there = (_api_of(name) for name in (source.module, f"{other.module}.{other.name}"))
            if here is not None and there is not None and there not in {here, *APIS[here]}:
                found.append(f"{other.place}: {here} imports {there}")
    return found


def _api_of(module: str) -> str | None:
    return next((api for api in APIS if _within(module, f"quire.server.{api}")), None)


def environment(sources: Iterable[Source]) -> list[str]:
    """Uses of the environment outside environment.py."""
    names = ("os.environ", "os.getenv", "os.putenv", "os.unsetenv", "os.environb")
    return [
        f"{source.path}:{number}: {name} outside quire/environment.py"
        for source in sources
        if source.path != "quire/environment.py"
        for number, line in enumerate(source.text.splitlines(), 1)
        for name in names
        if name in line.split("#")[0]
    ]


def undeclared(sources: Iterable[Source], declared: frozenset[str]) -> list[str]:
    """Libraries that pyproject.toml does not name."""
    known = declared | UNDECLARED | sys.stdlib_module_names | {"quire", "__future__"}
    return [
        f"{other.place}: {other.module} is not in pyproject.toml"
        for source in sources
        for other in source.imports
        if other.module.split(".")[0] not in known
    ]


def unused(sources: Iterable[Source], declared: frozenset[str]) -> list[str]:
    """Libraries that everyone must install although nothing here imports them."""
    return sorted(declared - {other.module.split(".")[0] for source in sources for other in source.imports})


def cycles(sources: Sequence[Source]) -> list[str]:
    """A ring of imports between files, those inside functions included, or nothing."""
    modules = {source.module for source in sources}
    graph = {
        source.module: {
            name
            for other in source.imports
            if not other.typing_only
            and (name := module_imported(other, modules)) in modules
            and name != source.module
        }
        for source in sources
        if source.module != "quire"  # imports LLM when it is asked for, and is imported by no part
    }
    return _ring(graph)


def rings(sources: Iterable[Source]) -> list[str]:
    """A ring of imports between parts of the house (packages and single files), or nothing."""
    graph: dict[str, set[str]] = {}
    for source in sources:
        if source.unit:  # the package itself is imported by no part, see `cycles`
            there = {
                _unit_imported(other)
                for other in source.imports
                if not other.typing_only and other.module.split(".")[0] == "quire"
            }
            graph.setdefault(source.unit, set()).update(there - {source.unit, ""})
    return _ring(graph)


def _ring(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """A graph of imports -> one ring as "a -> b -> a", or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def names(paths: Iterable[str]) -> list[str]:
    """Folders and files whose name says nothing: helpers.py, text_utils.py."""
    return [
        path
        for path in paths
        if any(part.rsplit("_", 1)[-1] in BANNED_NAMES for part in path.removesuffix(".py").split("/"))
    ]


def _within(name: str, package_name: str) -> bool:
    return name == package_name or name.startswith(package_name + ".")


def _declared(*groups: str) -> frozenset[str]:
    """Module names of the distributions in the named groups of pyproject.toml; "" are the required ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = {"": project["dependencies"], **project["optional-dependencies"]}
    names = [re.match(r"[\w-]+", line) for group in groups or listed for line in listed[group]]
    return frozenset(MODULE_OF.get(n[0].lower(), n[0].replace("-", "_")) for n in names if n)


def test_imports_go_down() -> None:
    assert levels(package()) == []


def test_special_rules_hold() -> None:
    assert forbidden(package()) == []
    assert environment(package()) == []
    assert between_apis(package()) == []


def test_libraries_are_declared_and_used() -> None:
    assert undeclared(package(), _declared()) == []
    assert unused(package(), _declared("")) == []


def test_no_import_cycles() -> None:
    assert cycles(package()) == []
    assert rings(package()) == []


def test_names_say_what_is_inside() -> None:
    folders = ("quire", "tests", "scripts", "benchmarks")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert names(path.relative_to(ROOT).as_posix() for path in paths) == []


def test_import_quire_is_cheap() -> None:
    """It loads no library at all: what it takes is the standard library's own start."""
    code = f"import sys, quire; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("quire/environment.py", "from quire.engine.blocks import BlockPool"),
        ("quire/errors.py", "def f():\n    from quire.config import EngineConfig"),
        ("quire/engine/engine.py", "from quire.runner.runner import Runner"),
        ("quire/runner/runner.py", "from ..speculate import draft"),
        ("quire/models/llama.py", "from quire.config import EngineConfig"),
        ("quire/models/llama.py", "from quire.quantize import kinds"),
        ("quire/program/ops/linear.py", "from quire import LLM"),
        ("quire/text/chat_template.py", "from quire import llm"),
        ("quire/engine/engine.py", "import quire.server.app"),
        ("quire/gadgets/a.py", ""),
    ],
)
def test_a_wrong_level_is_found(path: str, text: str) -> None:
    assert len(levels([snippet(text, path)])) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("quire/types.py", "from quire.sampling_params import SamplingParams"),
        ("quire/weights/load.py", "from quire.quantize.round_to_nearest import quantize"),
        ("quire/models/llama.py", "import quire.errors\nfrom quire.models.layers import head"),
        ("quire/engine/engine.py", "if TYPE_CHECKING:\n    from quire.runner.runner import Runner"),
        ("quire/cli/main.py", "from quire import LLM, __version__"),
    ],
)
def test_a_right_level_passes(path: str, text: str) -> None:
    assert levels([snippet(text, path)]) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("quire/engine/blocks.py", "import numpy as np"),
        ("quire/engine/blocks.py", "from numpy.typing import NDArray"),
        ("quire/engine/engine.py", "from quire.text import chat_template"),
        ("quire/backends/reference.py", "import torch.nn"),
        ("quire/backends/cuda/driver.py", "import torch"),
        ("quire/backends/cuda/lower.py", "import triton"),
        ("quire/backends/cuda/device.py", "def f():\n    from cuda.core import Device"),
        ("quire/llm.py", "from ray import serve"),
        ("quire/cli/serve.py", "from starlette.applications import Starlette"),
        ("quire/cli/serve.py", "from http.server import HTTPServer"),
        ("quire/weights/load.py", "def f():\n    from huggingface_hub import hf_hub_download"),
        ("quire/llm.py", "from os import environ"),
    ],
)
def test_a_forbidden_import_is_found(path: str, text: str) -> None:
    assert len(forbidden([snippet(text, path)])) == 1


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("quire/server/anthropic/messages.py", "from quire.server.openai import protocol", 1),
        ("quire/server/anthropic/messages.py", "from quire.server import body, openai", 1),
        ("quire/server/openai/responses.py", "import quire.server.anthropic.turns", 1),
        ("quire/server/llamacpp/completion.py", "from quire.server.openai.completions import listed", 1),
        ("quire/server/anthropic/messages.py", "from quire.server.anthropic.edits import Edit", 0),
        ("quire/server/app.py", "from quire.server.openai import chat", 0),
    ],
)
def test_an_api_that_imports_another_is_found(path: str, text: str, count: int) -> None:
    assert len(between_apis([snippet(text, path)])) == count


def test_the_environment_is_found() -> None:
    text = 'import os\nif os.environ.get("HOME"):\n    os.getenv("A")  # not os.environ\n'
    assert len(environment([snippet(text)])) == 2
    assert environment([snippet(text, "quire/environment.py")]) == []


def test_an_undeclared_library_is_found() -> None:
    text = "import json\nimport numpy.linalg\nimport pandas\nfrom scipy import special"
    assert len(undeclared([snippet(text)], frozenset({"numpy"}))) == 2


def test_an_unused_library_is_found() -> None:
    assert unused([snippet("import numpy.linalg")], frozenset({"numpy", "rich"})) == ["rich"]


def test_a_cycle_is_found() -> None:
    a = snippet("from quire.b import f", "quire/a.py")
    b = snippet("def f():\n    import quire.c", "quire/b.py")
    c = snippet("from quire import a", "quire/c.py")
    typed = snippet("if TYPE_CHECKING:\n    from quire import a", "quire/c.py")
    assert cycles([a, b, c]) == ["quire.a -> quire.b -> quire.c -> quire.a"]
    assert cycles([a, b, typed]) == []


def test_a_ring_of_packages_is_found() -> None:
    load = snippet("from quire.quantize.round import quantize", "quire/weights/load.py")
    round_ = snippet("from quire.weights.kinds import Int8", "quire/quantize/round.py")
    kinds = snippet("from quire import errors", "quire/weights/kinds.py")
    assert cycles([load, round_, kinds]) == []  # no file imports itself, yet the packages do
    assert rings([load, round_, kinds]) == ["weights -> quantize -> weights"]
    assert rings([load, kinds]) == []


def test_an_empty_name_is_found() -> None:
    bad = ["quire/utils.py", "quire/base/x.py", "quire/text/text_utils.py", "tests/helpers.py"]
    assert names([*bad, "quire/common_prefix.py", "quire/program/program.py"]) == bad
