"""Common part of the devices that compute in host memory, and the memory available there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from quire.backends.kv_cache import KV_ITEM_BYTES, KV_SCALE_BYTES
from quire.linux import group_folders, text_of
from quire.program.caches import CacheSpec, block_bytes
from quire.program.passes import plan_buffers
from quire.program.program import Load, Op, Program, WeightSpec
from quire.quantize.kinds import Storage
from quire.quantize.round_to_nearest import kind_of
from quire.weights.plan import WeightPlan

Kind = Literal["int8", "bf16", "f32"]  # of arithmetic
_UNLIMITED = 1 << 60  # cgroup v1 expresses "no limit" by a larger number


class HostDevice:
    """Base of a Device (quire.backends.device) that computes in host memory."""

    computes = True
    tile_rows = 1
    keeps_floats_as = ""
    shares_weights = False
    is_host = True

    name: str

    @property
    def arithmetic(self) -> str:
        return self.name

    def storage(self, spec: WeightSpec, stored: Storage, quantization: str | None) -> Storage:
        return kind_of(spec, stored, quantization)

    def arithmetic_of(self, op: Op, storage: Mapping[str, Storage], kv_dtype: str) -> Kind:
        return "f32"

    def block_bytes(self, spec: CacheSpec, kv_dtype: str, block_size: int) -> int:
        return block_bytes(spec, block_size, KV_ITEM_BYTES[kv_dtype], KV_SCALE_BYTES.get(kv_dtype, 0))

    def step_bytes(
        self, program: Program, weights: WeightPlan, num_tokens: int, num_logits: int | None = None
    ) -> int:
        """Return the bytes of all values."""
        return plan_buffers(program).nbytes(Load(((0, num_tokens),), num_logits or num_tokens))

    def slots_bytes(self, program: Program, num_slots: int, block_bytes: int) -> int:
        """Return 0: what sampling keeps is small, and nothing for most requests."""
        return 0

    def drafting_bytes(self, target: Program, draft: Program, num_slots: int, spare_bytes: int) -> int:
        """Return the bytes of spare blocks."""
        return num_slots * spare_bytes

    def require_runnable(self, *_: object) -> None:
        """Do nothing: what a layout has kernels for can be built."""

    def loading_bytes(self, weights: WeightPlan) -> int:
        return 0

    def available_bytes(self) -> int:
        return available_memory()


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes a new process can use: free memory, within the limits of its control groups."""
    known = [
        int(line.split()[1]) * 1024
        for line in text_of(proc / "meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    known += _left_in_groups(proc, cgroup)
    return max(min(known), 0) if known else 8 << 30  # unknown: assume 8 GiB


def _left_in_groups(proc: Path, cgroup: Path) -> Iterator[int]:
    """Yield the memory left in each control group of this process and its parents (cgroup v1 and v2)."""
    for root, (limit, used, cached), controller in (
        (cgroup, ("memory.max", "memory.current", "inactive_file "), ""),
        (
            cgroup / "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
            "memory",
        ),
    ):
        for folder in group_folders(root, proc, controller):
            most, now = text_of(folder / limit).strip(), text_of(folder / used).strip()
            if most.isdigit() and now.isdigit() and int(most) < _UNLIMITED:
                # Page cache, such as of weights, counts as used but is reclaimed on demand.
                files = [
                    line for line in text_of(folder / "memory.stat").splitlines() if line.startswith(cached)
                ]
                yield int(most) - int(now) + sum(int(line.split()[1]) for line in files)
