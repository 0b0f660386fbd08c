"""Measured ceilings of this machine: read bandwidth of each memory level, operations per second by type.

The loops are those of the device (quire.backends.device). Each figure is the best of several short runs: a
ceiling is the rate without interference.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.environment import cache_folder
from quire.linux import numbers_of

if TYPE_CHECKING:
    from quire.backends.device import Loops

KINDS = ("int8", "bf16", "f32")
MEMORY_BYTES = 256 << 20  # a buffer far larger than any cache
_SECONDS = 3.0  # of all measurements, approximately


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peak rates of `threads` threads together with one instruction set, on one CPU; or of another device.

    `operations` per second of all threads, by kind (a multiply-add is two; 0: no instruction for it).
    `read_bytes` per second by number of threads, then by level: "L1", "L2", "L3", "memory".
    """

    cpu: str
    isa: str
    threads: int
    operations: dict[str, float]
    read_bytes: dict[int, dict[str, float]]
    measured_at: float  # seconds since 1970

    @property
    def bandwidth(self) -> float:
        """Bytes per second read from memory by all threads."""
        return self.read_bytes[self.threads]["memory"]

    def by_name(self) -> dict[str, float]:
        """Return the rates of all threads by name, and when they were measured."""
        operations = {f"{kind}_operations_per_s": rate for kind, rate in self.operations.items() if rate}
        levels = self.read_bytes[self.threads].items()
        read = {f"{level}_bytes_per_s": rate for level, rate in levels}
        return operations | read | {"measured_at": self.measured_at}

    def __str__(self) -> str:
        day = time.strftime("%Y-%m-%d", time.localtime(self.measured_at))
        kind, rate = max(self.operations.items(), key=lambda one: one[1])
        rates = f"memory {self.bandwidth / 1e9:.0f} GB, {kind} {rate / 1e9:,.0f} G operations a second"
        return f"{rates}, measured {day}"

    def as_dict(self) -> dict[str, Any]:
        """Return the figures in the form stored as JSON."""
        return asdict(self)


def measure(loops: Loops, progress: Callable[[int, int], None] | None = None) -> Ceilings:
    """Measure now, in about 3 seconds. `progress` is called with (measurements done, total)."""
    counts = sorted({1, loops.threads})
    levels = loops.levels or level_bytes()
    tasks = len(KINDS) + len(counts) * len(levels)
    done = 0

    def next_done() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, tasks)

    operations: dict[str, float] = {}
    read: dict[int, dict[str, float]] = {}
    for kind in KINDS:
        operations[kind] = loops.operations(kind, _SECONDS / tasks)
        next_done()
    for count in counts:
        read[count] = {}
        for level, size in levels.items():
            read[count][level] = loops.read_bytes(count, size, _SECONDS / tasks)
            next_done()
    _raise_disturbed(read)
    name = loops.machine or cpu_name()
    return Ceilings(name, loops.isa, loops.threads, operations, read, time.time())


def _raise_disturbed(read: dict[int, dict[str, float]]) -> None:
    """Raise each rate to that of the next level and of fewer threads: a lower one was disturbed."""
    fewer: dict[str, float] = {}
    for levels in read.values():
        farther = 0.0
        for level in reversed(levels):
            farther = levels[level] = max(levels[level], farther, fewer.get(level, 0.0))
        fewer = levels


def ceilings(loops: Loops) -> Ceilings:
    """Return the ceilings of a device from the cache, measuring them first if missing."""
    return cached(loops) or keep(measure(loops))


def cached(loops: Loops) -> Ceilings | None:
    """Return the cached figures of this CPU, or of another device, or None."""
    name, isa, threads = loops.machine or cpu_name(), loops.isa, loops.threads
    try:
        found = json.loads(_file(name, threads, isa).read_text())
        if (found["cpu"], found["isa"], found["threads"]) != (name, isa, threads):
            return None
        operations = {kind: float(found["operations"][kind]) for kind in KINDS}
        read = {int(count): _floats(levels) for count, levels in found["read_bytes"].items()}
        kept = Ceilings(found["cpu"], isa, threads, operations, read, float(found["measured_at"]))
        return kept if kept.bandwidth > 0 else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _floats(levels: dict[str, Any]) -> dict[str, float]:
    return {level: float(rate) for level, rate in levels.items()}


def keep(found: Ceilings) -> Ceilings:
    """Write the figures to the cache, if possible; return them."""
    file = _file(found.cpu, found.threads, found.isa)
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(found.as_dict()))
        part.replace(file)
    except OSError:
        pass  # without a cache they are measured again
    return found


def _file(name: str, threads: int, isa: str) -> Path:
    """Return the file for this kind of CPU or device, number of threads and instruction set."""
    key = sha256(f"{name}|{threads}|{isa}".encode()).hexdigest()[:16]
    return cache_folder() / "ceilings" / f"{key}.json"


def cpu_name(proc: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, family, model and stepping as reported by the system."""
    wanted = ("model name", "cpu family", "model", "stepping")
    facts: dict[str, str] = {}
    try:
        for line in proc.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                facts.setdefault(name.strip(), value.strip())
    except OSError:
        return "unknown CPU"
    numbers = "-".join(facts[name] for name in wanted[1:] if name in facts)
    return f"{facts.get('model name', 'unknown CPU')} ({numbers})" if numbers else "unknown CPU"


def level_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[str, int]:
    """Return a buffer size per memory level: half of each cache's share per core; for memory, far more."""
    levels: dict[str, int] = {}
    for index in sorted(folder.glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            size = int((index / "size").read_text().strip().removesuffix("K")) << 10
            shared = len(numbers_of((index / "shared_cpu_list").read_text()))
            level = (index / "level").read_text().strip()
            levels[f"L{level}"] = max(size // 2 // shared // 1024 * 1024, 4096)
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return {**levels, "memory": MEMORY_BYTES}
