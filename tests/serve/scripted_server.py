"""A server whose engine answers by a script (see scripted_engine.py), with a context that agents fill."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from server import Server, running

import quire

DEMO = Path(quire.__file__).parent / "assets" / "demo"
ENGINE = Path(__file__).with_name("scripted_engine.py")


def call(name: str, **arguments: object) -> str:
    """A call of a tool as the demo model writes it."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def long_demo(folder: Path, max_positions: int) -> Path:
    """The demo model with a longer context than it was trained for, in a folder of its own."""
    model = folder / "demo-long"
    shutil.copytree(DEMO, model)
    config = json.loads((model / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = max_positions
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    return model


@contextmanager
def scripted(
    scripts: Mapping[str, Sequence[str]], folder: Path, *flags: str, max_positions: int, before: str = ""
) -> Iterator[Server]:
    """A server that answers prompts by these scripts. `folder` is for its files."""
    script = folder / "script.json"
    script.write_text(json.dumps(scripts), "utf-8")
    command = (sys.executable, "-X", "faulthandler", str(ENGINE), str(script))
    replace = "import functools, quire.server.lifecycle as l; "
    replace += f"l.RemoteEngine = functools.partial(l.RemoteEngine, command={command!r})"
    model = str(long_demo(folder, max_positions))
    with running(*flags, model=model, before=f"{replace}\n{before}") as server:
        yield server
