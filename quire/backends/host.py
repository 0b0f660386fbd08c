"""Answers that all devices with the host's memory give alike, and how much of it there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quire.backends.kv_cache import KV_ITEM_BYTES, KV_SCALE_BYTES
from quire.program.caches import CacheSpec
from quire.program.passes import plan_buffers
from quire.program.program import Load, Program, WeightSpec
from quire.quantize.kinds import Storage
from quire.quantize.round_to_nearest import kind_of
from quire.weights.plan import WeightPlan

_UNLIMITED = 1 << 60  # control groups of version 1 say "none" with a number beyond any memory


class HostDevice:
    """Answers of a Device (quire.backends.device) that computes in the host's memory."""

    computes = True
    keeps_floats_as = ""

    name: str

    @property
    def arithmetic(self) -> str:
        return self.name

    def storage(self, spec: WeightSpec, stored: Storage, quantization: str | None) -> Storage:
        return kind_of(spec, stored, quantization)

    def block_bytes(self, spec: CacheSpec, kv_dtype: str, block_size: int) -> int:
        return spec.token_bytes(KV_ITEM_BYTES[kv_dtype], KV_SCALE_BYTES.get(kv_dtype, 0)) * block_size

    def step_bytes(self, program: Program, weights: WeightPlan, num_tokens: int) -> int:
        """All values. The logits of every token count: those of a prompt may all be asked for."""
        return plan_buffers(program).nbytes(Load(((0, num_tokens),), num_tokens))

    def loading_bytes(self, weights: WeightPlan) -> int:
        return 0

    def available_bytes(self) -> int:
        return available_memory()


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes a new process can take: what the machine has free, within the limits of its control groups."""
    known = [
        int(line.split()[1]) * 1024 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")
    ]
    known += _left_in_groups(proc, cgroup)
    return max(min(known), 0) if known else 8 << 30  # a system that tells nothing: assume 8 GiB


def _left_in_groups(proc: Path, cgroup: Path) -> Iterator[int]:
    """What each control group of this process, and each around it, has left (versions 1 and 2)."""
    for root, (limit, used, cached), controller in (
        (cgroup, ("memory.max", "memory.current", "inactive_file "), ""),
        (
            cgroup / "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
            "memory",
        ),
    ):
        folder = root / _group(proc, controller)
        while True:
            most, now = _read(folder / limit).strip(), _read(folder / used).strip()
            if most.isdigit() and now.isdigit() and int(most) < _UNLIMITED:
                # Counted as used, but given up for whoever asks: files that were read, such as weights.
                files = [line for line in _lines(folder / "memory.stat") if line.startswith(cached)]
                yield int(most) - int(now) + sum(int(line.split()[1]) for line in files)
            if folder == root:
                break
            folder = folder.parent


def _group(proc: Path, controller: str) -> str:
    """The control group of this process for "memory", or of version 2 (""), relative to their root."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and ".." not in path:
            return path.lstrip("/")
    return ""


def _lines(path: Path) -> list[str]:
    return _read(path).splitlines()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
