"""Run one experiment: `python -m quire.experiments NAME`, asked on standard input, reported in JSON lines."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from quire.errors import QuireError
from quire.experiments.parameters import Line


def main() -> None:
    """Print a line of JSON for each thing found; the last has "done" or "error"."""
    type_, run = _experiment(sys.argv[1])
    gc.disable()  # a collection would take as long as many steps, and the process ends soon
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=type_)
    try:
        for line in run(asked):
            _print(line)
    except QuireError as error:
        _print({"error": error.message})


def _experiment(name: str) -> tuple[type[Any], Callable[[Any], Iterator[Line]]]:
    """Return the parameters of an experiment, and the experiment; only what it needs is loaded."""
    if name == "fleet":
        from quire.experiments import fleet, served_engine

        return served_engine.FleetTask, fleet.run
    from quire.experiments import cache, heads, parameters, quantization

    runs: dict[str, Callable[[Any], Iterator[Line]]] = {
        "cache": cache.run,
        "heads": heads.run,
        "quantization": quantization.run,
    }
    return parameters.PARAMETERS[name], runs[name]


def _print(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
