"""Budgets: the size of each room of the house, the length of its pieces, and what must have a docstring.

A budget is raised only on purpose, in a commit that says what the new lines are for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import pytest
from sources import ROOT, Source, functions, num_lines, package, snippet

from quire.config import EngineConfig


@dataclass(frozen=True)
class Room:
    """A part of the package with a budget of code lines: no blank lines, comments or docstrings counted.

    `paths` are files and folders under quire/. A file belongs to the room with the longest path to it.
    """

    name: str
    lines: int
    buys: str
    paths: tuple[str, ...]


ROOMS = (
    Room(
        "core",
        11_250,
        "scheduling, the programs of all model families, and sampling: the part to read in a weekend",
        (
            "types.py",
            "step_record.py",
            "sampling_params.py",
            "engine",
            "program",
            "models",
            "runner",
            "sampling",
        ),
    ),
    Room(
        "variations",
        1_955,
        "families that vary others: each could be deleted with its line in recent.py or variations.py",
        (
            "models/recent.py",
            "models/variations.py",
            "models/defaults_recent.py",
            "models/defaults_variations.py",
            *(f"models/{name}.py" for name in ("afmoe", "bamba", "cohere2_moe", "dots1", "exaone_moe")),
            *(f"models/{name}.py" for name in ("gpt_neox", "hy_v3", "lfm3", "mellum", "mimo_v2")),
            *(f"models/{name}.py" for name in ("bitnet", "granite_variations", "kimi_linear", "nemotron")),
            *(f"models/{name}.py" for name in ("bailing", "llama_renamed", "olmo", "olmo_hybrid", "phi")),
            *(
                f"models/{name}.py"
                for name in (
                    "compressed",
                    "deci",
                    "deepseek_v4",
                    "defaults_classic",
                    "falcon",
                    "gpt_variations",
                    "nanochat",
                    "sparse_latent",
                )
            ),
        ),
    ),
    Room(
        "exchange",
        400,
        "contents of cache blocks that come from elsewhere, or are kept there, as the engine deals with them",
        (
            "engine/block_exchange.py",
            "engine/block_loads.py",
            "engine/fetches.py",
            "engine/kept_blocks.py",
            "block_store.py",
        ),
    ),
    Room(
        "reference",
        1_395,
        "the backend in NumPy, draft models there, and what every backend shares, also packed weights",
        ("backends", "linux.py"),
    ),
    Room(
        "native",
        1_265,
        "the Python side of the C++ backend: lowering, memory, calls, a draft model beside the program",
        ("backends/native",),
    ),
    Room(
        "cuda",
        5_645,
        "the backend on NVIDIA GPUs: launches of programs, which they are, codes of other formats, adapters, "
        "states, encoders, images, draft models, graphs, memory, the driver, cuBLAS, the interpreted "
        "stand-in; could be deleted with its lines in backends/device.py",
        ("backends/cuda",),
    ),
    Room(
        "cuda groups",
        430,
        "several GPUs as one: programs divided among them by outputs and heads, and what they exchange",
        tuple(f"backends/cuda/{name}.py" for name in ("divided", "exchanges", "group", "gpu_group")),
    ),
    Room(
        "cuda kernels",
        4_370,
        "Triton kernels, compiled ahead of time, also for codes of other formats, images and biases of "
        "distances, and the list of what is compiled, with what a target has of its own",
        ("backends/cuda/kernels",),
    ),
    Room(
        "server",
        4_620,
        "HTTP and its limits, requests and the queue, the engine's process, metrics, what all APIs share",
        ("server",),
    ),
    Room(
        "hosted",
        935,
        "several models in one server: could be deleted, with its lines in cli/serve.py",
        ("server/hosted",),
    ),
    Room(
        "apis",
        3_635,
        "the APIs of OpenAI, Anthropic, Ollama and llama.cpp: each could be deleted with its line in app.py",
        ("server/openai", "server/anthropic", "server/ollama", "server/llamacpp"),
    ),
    Room(
        "page",
        1_490,
        "the server's page, its files, data, experiments and recordings: could be deleted, with its lines in "
        "app.py",
        ("server/page", "experiments", "cli/page.py"),
    ),
    Room(
        "text",
        4_325,
        "tokenizers, chat templates in a sandbox, tool and reasoning formats, grammars",
        ("text", "grammar", "sandbox"),
    ),
    Room(
        "speculate", 120, "drafting from texts: could be deleted, with its line in build.py", ("speculate",)
    ),
    Room(
        "formats",
        2_070,
        "reading checkpoints, and storing weights in fewer bits, ours and those of other formats",
        ("weights", "quantize"),
    ),
    Room(
        "checkpoint formats",
        1_340,
        "readers of quantized safetensors: each could be deleted with its line in registry.py",
        ("weights/formats", "weights/quantized.py"),
    ),
    Room(
        "vocabularies",
        745,
        "tokenizers of what other files than a tokenizer.json say: splits, byte-level BPE, pieces, ranks, "
        "conversations",
        ("weights/vocabularies",),
    ),
    Room(
        "gguf",
        3_205,
        "GGUF files: container, blocks, configuration, tokenizers, pooling: could be deleted, with its lines "
        "in weights/hub.py",
        ("weights/gguf",),
    ),
    Room(
        "quantizer",
        1_110,
        "`quire quantize`: rounding by what a text shows, choosing bits, writing compressed-tensors; could "
        "be deleted, with its line in cli/parser.py",
        (
            *("quantize/grid.py", "quantize/compensate.py", "quantize/walk.py", "quantize/allocate.py"),
            *("weights/pack_quantized.py", "weights/safetensors_writer.py"),
            *("cli/quantize.py", "cli/quantize_model.py", "cli/quantize_choice.py", "cli/quantize_run.py"),
            "cli/quantize_output.py",
        ),
    ),
    Room(
        "adapters",
        555,
        "low-rank adapters of requests: reading PEFT's files, loading and unloading them, also by endpoints",
        (
            *("adapters.py", "weights/adapters.py", "engine/adapter_table.py", "backends/native/adapters.py"),
            *("server/adapter_changes.py", "server/engine_adapters.py", "server/openai/adapters.py"),
        ),
    ),
    Room("cli", 4_085, "the commands of `quire`, their options and their help", ("cli",)),
    Room(
        "explained",
        3_950,
        "costs against ceilings, verdicts, plans, simulation of engines and fleets, recording and replay",
        ("roofline", "simulation", "recording"),
    ),
    Room(
        "bench", 2_020, "the load generator, its report, goals and plots", ("bench", "goals.py", "plots.py")
    ),
    Room(
        "cluster",
        2_980,
        "several engines: routing, replicas, scaling, prefill apart from decode, Ray; could be deleted with "
        "its lines in server/lifecycle.py",
        ("routing", "cluster"),
    ),
    Room(
        "transfer",
        1_000,
        "contents of cache blocks outside the KV cache: in memory, in files, between processes and hosts",
        ("transfer",),
    ),
    Room(
        "vectors",
        1_185,
        "embeddings and scores: encoders, pooling, settings of sentence-transformers, their endpoints",
        (
            *("models/encoders.py", "models/gte.py", "models/nomic_bert.py"),
            "models/pooling.py",
            "models/purpose.py",
            *("weights/sentence.py", "weights/joined.py"),
            "pooled_texts.py",
            "task.py",
            "server/pooling",
        ),
    ),
    Room(
        "images",
        2_485,
        "images of prompts: decoding, patches, towers, positions, and how backends keep what they give",
        (
            "images",
            "models/siglip.py",
            "models/tower.py",
            "models/vision.py",
            "models/vision_qwen2.py",
            "models/vision_cohere.py",
            "models/vision_gemma.py",
            "models/vision_gemma4.py",
            "models/vision_glm4v.py",
            "models/vision_idefics3.py",
            "models/vision_internvl.py",
            "models/vision_lfm2.py",
            "models/vision_llava.py",
            "models/vision_llama4.py",
            "models/vision_paddleocr.py",
            "models/vision_pixtral.py",
            "program/ops/images.py",
            "backends/slot_images.py",
        ),
    ),
    Room("rest", 2_585, "LLM and AsyncLLM, configuration, memory planning, also of draft models", ("",)),
)
NATIVE_LINES = (
    16_025  # of C++, every line counted: recurrences, latents, entries, images, ARM, NUMA nodes too
)
FILE_LINES = 400  # every line counted, as in an editor
FUNCTION_LINES = 60
KERNEL_LINES = 100  # of a Triton kernel, whose parameters alone take a third
KERNELS = "quire/backends/cuda/kernels/"
DEEPEST_BLOCK = 4  # of loops, conditions and the like within a function, one inside the other
LINE_LENGTH = 110
CONFIG_FIELDS = 32
UNEXPLAINED_LINES = 8  # a longer public function says what it does
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def over_budget(sources: Iterable[Source], rooms: Sequence[Room] = ROOMS) -> list[str]:
    """The rooms that hold more lines of code than they may, with both numbers."""
    lines = dict.fromkeys(rooms, 0)
    for source in sources:
        lines[room_of(source.path, rooms)] += code_lines(source)
    return [
        f"{room.name}: {count:,} lines of code, budget {room.lines:,} ({room.buys})"
        for room, count in lines.items()
        if count > room.lines
    ]


def room_of(path: str, rooms: Sequence[Room] = ROOMS) -> Room:
    """The room with the longest path that holds this file."""
    place = path.removeprefix("quire/")
    holding = [
        (len(prefix), room)
        for room in rooms
        for prefix in room.paths
        if not prefix or place == prefix or place.startswith(f"{prefix}/")
    ]
    return max(holding, key=lambda found: found[0])[1]


def code_lines(source: Source) -> int:
    """The number of lines that hold code: a docstring, a comment or nothing does not count."""
    documented: set[int] = set()
    for node in source.nodes:
        if isinstance(node, ast.Module | _Definition) and _explained(node):
            first = node.body[0]
            documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(map(str.strip, source.text.splitlines()), 1)
    return sum(1 for number, line in lines if line and line[0] != "#" and number not in documented)


def long_files(sources: Iterable[Source], limit: int = FILE_LINES) -> list[str]:
    counts = ((len(source.text.splitlines()), source.path) for source in sources)
    return [f"{path}: {count} lines" for count, path in counts if count > limit]


def long_functions(sources: Iterable[Source]) -> list[str]:
    """Functions that are longer than a screen, or that nest deeper than one can follow.

    There is no limit below a screen's 60 lines, and none on averages: a function that goes on from the first
    line to the last is easier to read whole than as pieces called from one place. What makes a function hard
    is nesting, so that has a limit of its own; a function too deep has a part that deserves a name.
    """
    found = []
    for source in sources:
        for node in functions(source):
            limit = KERNEL_LINES if source.path.startswith(KERNELS) else FUNCTION_LINES
            if num_lines(node) > limit:
                found.append(f"{source.at(node)} {node.name}: {num_lines(node)} lines")
            if (depth := _depth(node.body)) > DEEPEST_BLOCK:
                found.append(f"{source.at(node)} {node.name}: blocks nested {depth} deep")
    return found


def _depth(body: Iterable[ast.stmt]) -> int:
    """Return the depth of nested blocks; `elif` goes no deeper, and functions inside count alone."""
    return max((_depth_of(node) for node in body), default=0)


def _depth_of(node: ast.stmt | ast.ExceptHandler | ast.match_case) -> int:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return 0
    inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    if isinstance(node, ast.Try | ast.TryStar):
        inner += [child for handler in node.handlers for child in handler.body]
    if isinstance(node, ast.Match):
        inner += [child for case in node.cases for child in case.body]
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        return max(1 + _depth(node.body), _depth_of(node.orelse[0]))
    return 1 + _depth(inner) if inner else 0


def long_lines(sources: Iterable[Source]) -> list[str]:
    return [
        f"{source.path}:{number}: {len(line)} characters"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(line) > LINE_LENGTH
    ]


def unexplained(sources: Sequence[Source]) -> list[str]:
    """Find missing docstrings: of files, public classes, and public functions that are not short.

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


def test_every_room_keeps_its_budget() -> None:
    assert over_budget(package()) == []


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


def test_functions_can_be_followed() -> None:
    assert long_functions(package()) == []


def test_lines_fit() -> None:
    assert long_lines(package()) == []


def test_the_config_is_small() -> None:
    assert len(fields(EngineConfig)) <= CONFIG_FIELDS


def test_what_is_public_is_explained() -> None:
    assert unexplained(package()) == []


def test_a_room_over_its_budget_is_found() -> None:
    rooms = (
        Room("inner", 2, "a", ("a/b", "c.py")),
        Room("outer", 3, "b", ("a",)),
        Room("rest", 1, "c", ("",)),
    )
    text = {"quire/a/b/x.py": 2, "quire/a/x.py": 4, "quire/c.py": 1, "quire/ab.py": 1}
    sources = [snippet("x = 1\n" * count, path) for path, count in text.items()]
    assert over_budget(sources, rooms) == [
        "inner: 3 lines of code, budget 2 (a)",
        "outer: 4 lines of code, budget 3 (b)",
    ]


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
    longest, longer = (_function(n) for n in (FUNCTION_LINES, FUNCTION_LINES + 1))
    assert long_functions([snippet(longest * 20)]) == []
    assert len(long_functions([snippet(longest * 99 + longer)])) == 1
    assert len(long_functions([snippet("class A:\n" + _function(FUNCTION_LINES + 1, "    "))])) == 1


def _nested(*heads: str) -> str:
    """A function of blocks, each inside the one before."""
    lines = [f"{'    ' * depth}{head}" for depth, head in enumerate(("def f():", *heads, "pass"))]
    return "\n".join(lines) + "\n"


def test_deep_functions_are_found() -> None:
    deep = ("for x in y:", "while x:", "with x:", "if x:")
    assert long_functions([snippet(_nested(*deep))]) == []
    assert long_functions([snippet(_nested("if x: pass\n    elif x:", *deep[1:]))]) == []
    assert long_functions([snippet(_nested(*deep, "def g():", *deep))]) == []
    for fifth in (
        "if x:",
        "try: pass\n                    except ValueError:",
        "match x:\n                      case 1:",
    ):
        assert long_functions([snippet(_nested(*deep, fifth))]) == [
            "quire/engine/example.py:1 f: blocks nested 5 deep"
        ]


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
