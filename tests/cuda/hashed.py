"""Engines whose logits are a function of the last token and its position, so that only steps and sampling are
computed: on the host by the reference backend, or on an interpreted accelerator that works when it is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.backends.cuda.accelerator import DeviceArray, Launch
from quire.backends.cuda.interpreted import InterpretedAccelerator, view_of
from quire.backends.cuda.manifest import launch_key
from quire.backends.cuda.step_arrays import StepArrays
from quire.program.batch import Batch

PERIOD = 1 << 30  # positions that differ by it are the same to the function
HASHED = "the function"  # in place of the kernels of a model


class LazyAccelerator(InterpretedAccelerator):
    """Does what it was asked for when somebody waits for a copy: what comes later is not known until then."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Callable[[], Any]] = deque()
        self.launches: list[Launch] = []  # so far

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        kept = values.copy()
        self.queue.append(lambda: InterpretedAccelerator.write(self, array, kept))

    def launch(self, launch: Launch) -> None:
        if launch.kernel == HASHED:
            self.loaded.add(launch_key(launch))
            self.queue.append(lambda: compute(*launch.args))
            return
        self.launches.append(launch)
        self.loaded.add(launch_key(launch))
        self.queue.append(lambda: InterpretedAccelerator.launch(self, launch))

    def fetch(self, array: DeviceArray) -> Any:
        found: list[np.ndarray] = []
        self.queue.append(lambda: found.append(view_of(array).copy()))
        return _Copy(self.queue, found)


@dataclass
class _Copy:
    queue: deque[Callable[[], Any]]
    found: list[np.ndarray]

    def result(self) -> np.ndarray:
        while not self.found:
            self.queue.popleft()()
        return self.found[0]


@cache
def logits_of(token: int, position: int, width: int) -> np.ndarray:
    """Logits with ties, as rounded ones have; some tokens are impossible."""
    x = np.random.default_rng((token, position)).standard_normal(width) * 3
    x[::7] = -np.inf
    return (np.round(x * 4) / 4).astype(np.float32)


def rows(tokens: np.ndarray, positions: np.ndarray, which: np.ndarray, width: int) -> np.ndarray:
    """The logits [L, width] of these tokens."""
    found = [logits_of(int(tokens[i]), int(positions[i]) % PERIOD, width) for i in which]
    return np.stack(found) if found else np.zeros((0, width), np.float32)


def compute(out: Any, *inputs: Any) -> None:
    """What the launch does."""
    view_of(out)[...] = rows(*map(view_of, inputs), out.shape[1])


def hashed(llm: LLM) -> LLM:
    """Replace the model of an engine on the reference backend or the accelerator by the function."""
    backend: Any = llm.engine.runner._backend  # type: ignore[attr-defined]
    width = backend.program.output.width

    def execute(batch: Batch) -> np.ndarray:
        return rows(batch.token_ids, batch.positions, batch.logit_rows, width)

    def launch(step: StepArrays) -> Launch:
        args = (step.values[backend._output], step.token_ids, step.positions, step.logit_rows)
        return Launch(HASHED, (1, 1, 1), args)

    if hasattr(backend, "_launches"):
        backend._launches = [launch]
    else:
        backend._logits = execute
    return llm


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.backends.cuda.interpreted.InterpretedAccelerator", LazyAccelerator)
