"""The driver's end of a worker: a process that computes when it is asked to and is stopped otherwise.

Stopped (SIGSTOP) rather than asked to wait: thread pools that spin between two requests would
slow the engine whose turn it is, and settings that forbid spinning would slow their own engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.environments import Peer

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 3 * 3600.0  # for one answer: a prompt of 32,768 tokens is the longest


class EngineFailed(Exception):
    """An engine could not do what it was asked."""


class Worker:
    """One engine in a process. Any failure raises EngineFailed; then the worker is of no use any more."""

    def __init__(self, peer: Peer, python: Path, work: Path) -> None:
        self.name = peer.name
        self.wall_s = self.others_s = 0.0  # of the last request; what other processes computed meanwhile
        self.log = work / "log" / f"{peer.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "PYTHONPATH": str(ROOT) if peer.name == "quire" else ""}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled, as those of an installed package are
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [str(python), str(peer.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
            )

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Wake the worker, have one request answered, stop it again."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        alarm = threading.Timer(LIMIT_S, self.process.kill)
        alarm.start()
        begin, others = time.perf_counter(), _others_s(self.process.pid)
        try:
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
            self.process.send_signal(signal.SIGSTOP)
        except BrokenPipeError:
            line = ""
        finally:
            alarm.cancel()
            self.wall_s = time.perf_counter() - begin
            self.others_s = _others_s(self.process.pid) - others
        if not line:
            raise EngineFailed(f"its process ended with {self.process.wait()}, see {self.log}")
        reply: dict[str, Any] = json.loads(line)
        if problem := reply.get("problem"):
            raise EngineFailed(f"{problem.splitlines()[0][:200]} (see {self.log})")
        return reply

    def close(self) -> None:
        """End the process, which has nothing to save."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _others_s(pid: int) -> float:
    """Seconds of processor time since the machine started that went to all but one process.

    Time the host took away counts too: it is as lost as what another process used.
    """
    try:
        user, nice, system, _, _, *interrupts = (
            Path("/proc/stat").read_text("utf-8").split("\n")[0].split()[1:9]
        )
        mine = Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()[11:13]
    except OSError:  # not on Linux, or the process is gone
        return 0.0
    ticks = sum(map(int, (user, nice, system, *interrupts))) - sum(map(int, mine))
    return ticks / os.sysconf("SC_CLK_TCK")
