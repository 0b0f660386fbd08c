"""Virtual and wall time never mix: nothing in the simulation can read a clock of the machine."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest
from sources import Source, dotted, package, snippet

UNIT = "simulation"
# Modules that read clocks, wait on them, or hold code that does.
TIMED = frozenset(
    {"time", "asyncio", "datetime", "threading", "sched", "timeit", "select", "selectors", "socket"}
) | frozenset({"quire.bench.driver", "quire.bench.http_client", "quire.bench.openai_api", "quire.server"})
ENGINES = frozenset({"Engine", "EngineThread", "SharedEngine"})


def clocks(sources: Iterable[Source]) -> list[str]:
    """Find imports of modules with clocks, and engines that are not given one, in the simulation."""
    found = []
    for source in sources:
        if source.unit != UNIT:
            continue
        for other in source.imports:
            names = (other.module, f"{other.module}.{other.name}")
            if any(name == timed or name.startswith(f"{timed}.") for name in names for timed in TIMED):
                found.append(f"{other.place}: {other.module}")
        for node in source.nodes:
            if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ENGINES:
                given = {keyword.arg for keyword in node.keywords}
                if "clock" not in given:
                    found.append(f"{source.at(node)}: an engine on the clock of the machine")
    return found


def test_the_simulation_reads_no_clock() -> None:
    assert any(source.unit == UNIT for source in package())
    assert clocks(package()) == []


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "def f():\n    from time import monotonic",
        "import asyncio.events",
        "from datetime import datetime",
        "from quire.bench import driver",
        "from quire.server.metrics import Metrics",
        "engine = Engine(scheduler, runner)",
        "engine = engine.Engine(scheduler, runner, vocab_size=3)",
    ],
)
def test_a_clock_is_found(text: str) -> None:
    assert len(clocks([snippet(text, "quire/simulation/example.py")])) == 1


def test_other_parts_and_virtual_clocks_pass() -> None:
    text = "from quire.bench.metrics import Timeline\nengine = Engine(scheduler, runner, clock=clock.read)"
    assert clocks([snippet(text, "quire/simulation/example.py")]) == []
    assert clocks([snippet("import time", "quire/roofline/example.py")]) == []
