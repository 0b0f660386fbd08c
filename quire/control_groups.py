"""The control groups of this process, and how many processors they grant it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path


def granted_processors(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many processors the quotas of its control groups grant this process, or infinity."""
    quotas = [_read(folder / "cpu.max").split() for folder in group_folders(cgroup, proc, "")]
    for folder in group_folders(cgroup / "cpu", proc, "cpu"):
        quotas.append(
            [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
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
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and ".." not in path:
            return path.lstrip("/")
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
