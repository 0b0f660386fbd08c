"""Lists of processors and control groups, as Linux tells of them in files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path


def granted_processors(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many processors the quotas of its control groups grant this process, or infinity."""
    quotas = [text_of(folder / "cpu.max").split() for folder in group_folders(cgroup, proc, "")]
    for folder in group_folders(cgroup / "cpu", proc, "cpu"):
        quotas.append(
            [*text_of(folder / "cpu.cfs_quota_us").split(), *text_of(folder / "cpu.cfs_period_us").split()]
        )
    known = [list(map(int, quota)) for quota in quotas if len(quota) == 2 and all(map(str.isdigit, quota))]
    return min((time / period for time, period in known if time and period), default=math.inf)


def group_folders(root: Path, proc: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the control group of this process and its parents, those of `root` last."""
    folder = root / _group(proc, controller)
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _group(proc: Path, controller: str) -> str:
    """Return the control group of this process for a controller (v1) or "" (v2), relative to their root."""
    for line in text_of(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and ".." not in path:
            return path.lstrip("/")
    return ""


def text_of(path: Path) -> str:
    """Return what a file says; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def numbers_of(text: str) -> tuple[int, ...]:
    """Read a list of numbers, written as 0-3,8. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)
