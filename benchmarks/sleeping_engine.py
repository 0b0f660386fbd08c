"""The engine's process on a device that sleeps: all else is real, and steps take a known time.

Run as a script in place of quire.server.engine_process. The word before the number of the socket is the law
in milliseconds: a step, a token, a row that samples, such as 4,0.02,0.2.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

from sleeping_runner import SleepingRunner

from quire.build import Built, build
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import Feature
from quire.server import lifecycle
from quire.server.engine_process import main

LAW_MS = "4,0.02,0.2"
TOKEN_ID = 300  # a word of the demo model: clients see no text of control tokens


def law_of(text: str) -> StepLaw:
    """Return the law of three numbers of milliseconds: a step, a token, a row that samples."""
    seconds = tuple(float(number) / 1e3 for number in text.split(","))
    nothing = (0.0, 0.0, 0.0)
    features = (Feature("one"), Feature("tokens"), Feature("logits"))
    return StepLaw(features, (Stage(seconds, nothing),), nothing, (Stage(seconds, nothing),))


def use(law_ms: str = LAW_MS) -> None:
    """Let servers that this process starts run this engine."""
    command = (sys.executable, str(Path(__file__).resolve()), law_ms)
    lifecycle.RemoteEngine = functools.partial(lifecycle.RemoteEngine, command=command)  # type: ignore


def sleeping_build(*args: Any, **keywords: Any) -> Built:
    """Build the engine, and replace its runner."""
    built = build(*args, **keywords)
    built.engine.runner = SleepingRunner(law_of(sys.argv[1]), time.monotonic, time.sleep, TOKEN_ID)
    return built


if __name__ == "__main__":
    sys.exit(main(sleeping_build))
