"""The engine's process with faults: what the first token of a prompt says happens when it is computed.

Run as a script in place of quire.server.engine_process. The word before the number of the socket is how
long each step takes, in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from quire.build import Built, build
from quire.engine.engine import PendingStep, StepRunner
from quire.server.engine_process import main
from quire.types import Step

KILL, RAISE, HANG, GARBAGE, SLEEP = range(300, 305)  # prompts that begin with these
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
        return self.runner.launch(step)


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


def faulty_build(*args: Any) -> Built:
    built = build(*args)
    built.engine.runner = FaultyRunner(built.engine.runner, float(sys.argv[1]) / 1000)
    return replace(built)


if __name__ == "__main__":
    sys.exit(main(faulty_build))
