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
    longest: int  # tokens of a prompt with its answer that will be asked for; set before load
    kv_cache: str  # number format of keys and values that Quire is to use; set before load

    def version(self) -> str:
        try:
            return version(self.package)
        except PackageNotFoundError:
            return "unknown"

    def prepare(self, checkpoint: Path, target: Path, kind: str) -> Path:
        """Write the engine's own format of a checkpoint to `target`; the path to load is returned."""
        return checkpoint

    @abstractmethod
    def load(self, path: Path, kind: str, threads: int) -> None:
        """Make ready to answer."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], num_new: int) -> tuple[float, float]:
        """Seconds until every prompt has its first token, and from then on for `num_new` more of each."""


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Do what one request asks for."""
    match request["do"]:
        case "prepare":
            checkpoint, target = Path(request["checkpoint"]), Path(request["target"])
            return {"path": str(engine.prepare(checkpoint, target, request["kind"]))}
        case "load":
            engine.longest, engine.kv_cache = request["longest"], request["kv_cache"]
            begin = time.perf_counter()
            engine.load(Path(request["path"]), request["kind"], request["threads"])
            return {"seconds": time.perf_counter() - begin, "version": engine.version()}
        case "generate":
            first, rest = engine.generate(request["prompts"], request["num_new"])
            return {"first_s": first, "rest_s": rest}
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
