"""Compilation of structured outputs into grammars, tried in a sandbox first.

There a grammar may loop, exhaust the memory or overflow the stack (see `compile_job`). One that has passed
costs the engine no more than it cost there.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.errors import RequestError
from quire.sampling_params import MAX_GRAMMAR_CHARACTERS, StructuredOutputsParams
from quire.sandbox.process import SandboxProcess

TIME_LIMIT_S = 5.0
CPU_LIMIT_S = 1  # the engine spends the same time again, within a step that other requests wait for
MEMORY_LIMIT_BYTES = 512 << 20
MAX_CACHED, MAX_CACHED_CHARACTERS = 1024, 8 << 20
FAILURE_S = 30.0  # how long a structure that broke a limit is refused untried: the machine may have been busy
_FAILURES = {
    "time": f"it takes more than {CPU_LIMIT_S} s to compile",
    "memory": f"it takes more than {MEMORY_LIMIT_BYTES >> 20} MiB to compile",
    "stack": "it is nested too deeply",
    "start": "the process that compiles grammars did not start",
}


class GrammarCompiler:
    """Compiler of structures for a model of `vocab_size` tokens; `special` maps ids of tokens to names.

    Any number of threads may share it. Its process starts with the first structure that is not cached.
    """

    def __init__(self, vocab_size: int, special: Mapping[int, str]) -> None:
        self._sandbox = SandboxProcess(
            "quire.grammar.compile_job",
            time_limit_s=TIME_LIMIT_S,
            memory_limit_bytes=MEMORY_LIMIT_BYTES,
            cpu_limit_s=CPU_LIMIT_S,
        )
        named = sorted((number, name) for number, name in special.items() if number < vocab_size)
        self._vocabulary = {"vocab_size": vocab_size, "special": named}
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()  # by structure
        self._failed_s: dict[str, float] = {}  # when those among them that broke a limit did so
        self._num_cached_characters = 0

    def compile(self, structure: StructuredOutputsParams) -> str:
        """Return the grammar of a structure for llguidance. Raises RequestError if it cannot be enforced."""
        given = {f.name: v for f in fields(structure) if (v := getattr(structure, f.name)) is not None}
        (name,) = given
        asked = {"json": {"type": "object"}} if name == "json_object" else given
        try:
            question = json.dumps({"structure": asked} | self._vocabulary, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(name, f"it cannot be written as JSON: {error}") from None
        answer = self._look_up(question)
        if "grammar" not in answer:
            raise _refusal(name, answer.get("error") or _FAILURES[answer["kind"]])
        grammar: str = answer["grammar"]
        return grammar

    def close(self) -> None:
        """End the process. A later structure starts another."""
        self._sandbox.close()

    def _look_up(self, question: str) -> dict[str, Any]:
        with self._lock:
            is_old = time.monotonic() - self._failed_s.get(question, math.inf) > FAILURE_S
            if question in self._answers and not is_old:
                self._answers.move_to_end(question)
                return self._answers[question]
        answer = self._try(question)
        if answer.get("kind") != "start":
            self._keep(question, answer)
        return answer

    def _try(self, question: str) -> dict[str, Any]:
        if len(question) > MAX_GRAMMAR_CHARACTERS + len(json.dumps(self._vocabulary)):
            return {"error": f"it has more than {MAX_GRAMMAR_CHARACTERS:,} characters"}
        answer = self._sandbox.ask(question.encode() + b"\n")
        if answer.get("seconds", 0) > CPU_LIMIT_S:
            return {"kind": "time"}
        return answer

    def _keep(self, question: str, answer: dict[str, Any]) -> None:
        with self._lock:
            if question not in self._answers:
                self._num_cached_characters += len(question)
            self._answers[question] = answer
            self._failed_s.pop(question, None)
            if "kind" in answer:
                self._failed_s[question] = time.monotonic()
            while len(self._answers) > MAX_CACHED or self._num_cached_characters > MAX_CACHED_CHARACTERS:
                oldest, _ = self._answers.popitem(last=False)
                self._num_cached_characters -= len(oldest)
                self._failed_s.pop(oldest, None)


def _refusal(name: str, problem: str) -> RequestError:
    return RequestError(f"structured_outputs.{name}: {problem}", None, "structured_outputs")
