"""The protocol of all engines' workers: one request a line on stdin, one answer a line on stdout, as JSON.

A worker runs in its engine's own environment, so this file needs nothing but the standard library. It is
the only one that knows its engine: the driver sends token ids and gets seconds back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


class Engine(ABC):
    """An engine under test. Times leave out what the engine's user would not wait for in that measure."""

    package: str  # whose version is reported

    def prepare(self, checkpoint: Path, target: Path, kind: str) -> Path:
        """Write the engine's own format of a checkpoint to `target`; the path to load is returned."""
        return checkpoint

    @abstractmethod
    def load(self, path: Path, kind: str, threads: int) -> None:
        """Make ready to answer."""

    @abstractmethod
    def prefill(self, prompt: list[int]) -> float:
        """Seconds from handing over a prompt to its first token."""

    @abstractmethod
    def decode(self, prompts: list[list[int]], num_new: int) -> float:
        """Seconds for `num_new` tokens of every prompt, from when all have their first token."""


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Do what one request asks for."""
    match request["do"]:
        case "prepare":
            checkpoint, target = Path(request["checkpoint"]), Path(request["target"])
            return {"path": str(engine.prepare(checkpoint, target, request["kind"]))}
        case "load":
            begin = time.perf_counter()
            engine.load(Path(request["path"]), request["kind"], request["threads"])
            return {"seconds": time.perf_counter() - begin, "version": _version(engine.package)}
        case "prefill":
            return {"seconds": engine.prefill(request["prompts"][0])}
        case "decode":
            return {"seconds": engine.decode(request["prompts"], request["num_new"])}
    raise ValueError(f"unknown request {request['do']!r}")


def serve(engine: Engine) -> None:
    """Answer until stdin ends. What libraries print goes to stderr, away from the answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(engine, json.loads(line))
        except Exception as problem:  # whatever an engine raises is a result of the benchmark
            reply = {"problem": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(reply), file=answers, flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
