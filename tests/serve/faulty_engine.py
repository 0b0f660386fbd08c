"""The engine's process with faults: what the first token of a prompt says happens when it is computed.

Run as a script in place of quire.server.engine_process. The word before the number of the socket is how
long each step takes, in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from quire.build import Built, build
from quire.engine.engine import PendingStep, StepRunner
from quire.server.engine_process import main
from quire.types import Failure, RowResult, Step, StepResult

KILL, RAISE, HANG, GARBAGE, SLEEP, FAIL = range(300, 306)  # prompts that begin with these
SLEEP_S = 1.5


class FaultyRunner:
    """A runner that does what prompts say, and takes its time."""

    def __init__(self, runner: StepRunner, step_s: float) -> None:
        self.runner = runner
        self.step_s = step_s

    def launch(self, step: Step) -> PendingStep:
        for row in step.rows:
            if row.token_ids:
                misbehave(row.token_ids[0])
        time.sleep(self.step_s)
        failing = any(row.token_ids[:1] == (FAIL,) for row in step.rows)
        return Failing(self.runner.launch(step)) if failing else self.runner.launch(step)


@dataclass
class Failing:
    """A step whose rows all fail."""

    pending: PendingStep

    def result(self) -> StepResult:
        result = self.pending.result()
        return replace(result, rows=(RowResult(error=Failure("logits are not numbers")),) * len(result.rows))


def misbehave(token_id: int) -> None:
    if token_id == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if token_id == RAISE:
        raise ArithmeticError("a broken kernel")
    if token_id == HANG:
        time.sleep(3600)
    if token_id == GARBAGE:
        os.write(int(sys.argv[-1]), b"HTTP/1.1 200 OK\r\n\r\n")
    if token_id == SLEEP:
        time.sleep(SLEEP_S)


def faulty_build(*args: Any, **keywords: Any) -> Built:
    built = build(*args, **keywords)
    built.engine.runner = FaultyRunner(built.engine.runner, float(sys.argv[1]) / 1000)
    return replace(built)


if __name__ == "__main__":
    sys.exit(main(faulty_build))
