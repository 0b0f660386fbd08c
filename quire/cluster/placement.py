"""The cores of this machine for several replicas: which replica gets which, by NUMA node."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from quire.errors import ConfigError
from quire.linux import granted_processors, numbers_of, text_of

SYSTEM = Path("/sys/devices/system")
CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its processors (hardware threads) that this process may use, and its NUMA node."""

    processors: tuple[int, ...]
    node: int


@dataclass(frozen=True, slots=True)
class Place:
    """The cores of one replica. Memory that it touches first comes from their nodes."""

    cores: tuple[Core, ...]

    @property
    def processors(self) -> tuple[int, ...]:
        return tuple(sorted(number for core in self.cores for number in core.processors))

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def words(self) -> str:
        """Its processors, as Linux writes lists of them."""
        return f"cpu {_ranges(self.processors)}"


def allowed_cores(system: Path = SYSTEM) -> list[Core]:
    """Return the cores that this process may use, by node, then by their first processor."""
    cores: dict[tuple[int, ...], list[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        siblings = numbers_of(text_of(system / f"cpu/cpu{number}/topology/core_cpus_list")) or (number,)
        cores.setdefault(siblings, []).append(number)
    nodes: dict[int, int] = {}
    for folder in system.glob("node/node[0-9]*"):
        nodes |= dict.fromkeys(numbers_of(text_of(folder / "cpulist")), int(folder.name.removeprefix("node")))
    found = [Core(tuple(numbers), nodes.get(numbers[0], 0)) for numbers in cores.values()]
    return sorted(found, key=lambda core: (core.node, core.processors))


def granted_cores(cgroup: Path = CGROUP, proc: Path = PROC) -> int | None:
    """Return how many cores' time the control groups of this process may use; None if there is no quota."""
    granted = granted_processors(proc, cgroup)
    return None if math.isinf(granted) else int(granted)


def divide(cores: Sequence[Core], num_replicas: int) -> list[Place]:
    """Divide cores into places of equal size: of whole nodes where there are more of these than replicas,
    otherwise within one node each.

    What remains is left to the server and to other programs. Raises ConfigError for more replicas than cores.
    """
    if num_replicas > len(cores):
        count = f"{len(cores)} core{'s' * (len(cores) > 1)} that may be used"
        raise ConfigError(
            f"replicas = {num_replicas:,}, but this machine has {count}",
            "give at most as many replicas as cores: each needs at least one of its own",
        )
    by_node: dict[int, list[Core]] = {}
    for core in cores:
        by_node.setdefault(core.node, []).append(core)
    nodes = list(by_node.values())
    if (together := len(nodes) // num_replicas) > 1:
        starts = range(0, num_replicas * together, together)
        nodes = [list(chain.from_iterable(nodes[at : at + together])) for at in starts]
    sizes = range(max(map(len, nodes)), 0, -1)
    size = next(size for size in sizes if sum(len(node) // size for node in nodes) >= num_replicas)
    places = [node[at : at + size] for node in nodes for at in range(0, len(node) - size + 1, size)]
    return [Place(tuple(place)) for place in places[:num_replicas]]


def spread(places: Sequence[Place], num_threads: int | None, granted: int | None) -> int:
    """Return the compute threads of each replica: as asked for, or one a core, within its share of `granted`.

    Raises ConfigError for more threads than cores.
    """
    size = len(places[0].cores)
    if num_threads is None:
        return size if granted is None else max(1, min(size, granted // len(places)))
    if num_threads > size:
        raise ConfigError(
            f"num_threads = {num_threads:,}, but each of {len(places)} replicas has {size} "
            f"core{'s' * (size > 1)} of its own",
            "num_threads are those of one replica; leave it out for one per core",
        )
    return num_threads


def _ranges(numbers: Sequence[int]) -> str:
    """Write a list as Linux does."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
