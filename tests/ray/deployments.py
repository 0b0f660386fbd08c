"""A deployment on a Ray cluster that this process starts on this machine, and its processes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
from ray import serve

from quire.cluster.ray import RayConfig, application, deploy

NUM_TRIES, TOO_BUSY = 3, "timed out during startup"


def processes(pid: int | None = None) -> dict[int, str]:
    """The names of all processes below this one, by their numbers."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if int(rest.split()[1]) == (pid or os.getpid()) and rest.split()[0] != "Z":
            found[int(folder.name)] = name
            found |= processes(int(folder.name))
    return found


class Deployment:
    """The deployment: two engines and a front, until it is told otherwise."""

    def __init__(self, config: RayConfig) -> None:
        self.config = config
        self.url = ""
        self.end = self._deploy()

    def _deploy(self) -> Callable[[], None]:
        """Deploy; again where the machine was too busy for Ray, which waits 30 s for its own processes."""
        before = processes()
        for _ in range(NUM_TRIES - 1):
            try:
                return deploy(self.config, lambda url: setattr(self, "url", url))
            except Exception as error:
                if TOO_BUSY not in str(error):
                    raise
            for pid in processes().keys() - before.keys():
                os.kill(pid, signal.SIGKILL)
        return deploy(self.config, lambda url: setattr(self, "url", url))

    def redeploy(self, config: RayConfig) -> None:
        """Change it to this, while it serves."""
        self.config = config
        serve.run(application(config), name=config.name, route_prefix="/")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def engines(self) -> list[int]:
        """The numbers of the engines' processes, whose parents are Ray's."""
        found = processes()
        return sorted(
            pid for pid, name in found.items() if name == "quire-engine" and "ray:" in found[parent(pid)]
        )

    def fronts(self) -> list[int]:
        """The numbers of the fronts' processes."""
        found = {pid for pid, name in processes().items() if name.startswith("ray::") and _is_front(pid)}
        return sorted(pid for pid in found if parent(pid) not in found)  # not what they have forked


def _is_front(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ServeReplica:quire:front")
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def parent(pid: int) -> int:
    """The number of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
