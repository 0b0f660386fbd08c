"""What a model takes of this machine's memory, counted before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.backends.kv_cache import KV_DTYPES
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.program.passes import plan_buffers
from quire.program.program import Load, Program, WeightBytes

KV_SHARE = 0.5  # of the memory left beside weights and activations, when no size is asked for


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. The cache has `num_blocks` blocks; sequences may have `max_model_len` tokens."""

    weight_bytes: int  # as stored
    working_bytes: int  # float32 copies that the reference computes with
    activation_bytes: int
    kv_block_bytes: int
    num_blocks: int
    max_model_len: int
    available_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.kv_block_bytes

    @property
    def total_bytes(self) -> int:
        return self.working_bytes + self.activation_bytes + self.kv_bytes


def plan_memory(
    program: Program, nbytes: WeightBytes, config: EngineConfig, longest: int, available_bytes: int
) -> MemoryPlan:
    """Decide the size of the KV cache and the longest sequence.

    `longest` is the most tokens the model was made for. Without kv_cache_memory_bytes the cache takes what
    max_num_seqs sequences of full length can use, bounded by half of what is left.
    """
    weights = program.weights().values()
    working = sum(spec.size * 4 for spec in weights) if config.device != "null" else 0
    load = Load(
        ((0, config.max_num_batched_tokens),), min(config.max_num_seqs, config.max_num_batched_tokens)
    )
    activations = plan_buffers(program).nbytes(load)
    left = available_bytes - working - activations
    block_bytes = program.kv_token_bytes(KV_DTYPES[config.kv_cache_dtype].itemsize) * config.block_size
    max_model_len = config.max_model_len or longest
    useful = -(-max_model_len // config.block_size) * config.max_num_seqs
    budget = config.kv_cache_memory_bytes or int(max(left, 0) * KV_SHARE)
    num_blocks = useful if config.device == "null" else min(useful, budget // block_bytes)
    if config.max_model_len is None:
        max_model_len = min(max_model_len, num_blocks * config.block_size)
    return MemoryPlan(
        weight_bytes=sum(nbytes(spec) for spec in weights),
        working_bytes=working,
        activation_bytes=activations,
        kv_block_bytes=block_bytes,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        available_bytes=available_bytes,
    )


def misfit(plan: MemoryPlan, config: EngineConfig) -> ConfigError | None:
    """Why the model, or one sequence of the max_model_len asked for, does not fit; None if it does."""
    if config.device == "null":
        return None
    if plan.total_bytes > plan.available_bytes:
        return ConfigError(
            f"the model takes {gigabytes(plan.total_bytes)}, {gigabytes(plan.available_bytes)} are available",
            "lower kv_cache_memory_bytes or max_num_batched_tokens, or take a smaller model",
        )
    room = plan.num_blocks * config.block_size
    if room < max(plan.max_model_len, 2):
        return ConfigError(
            f"the KV cache has room for {room:,} tokens, less than one sequence of {plan.max_model_len:,}",
            "raise kv_cache_memory_bytes or lower max_model_len",
        )
    return None


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes a new process can take: what the machine has free, within the limit of the control group."""
    free = 0
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used)) if free else int(limit) - int(used)
    return max(free, 0) if free else 8 << 30  # a system that tells nothing: assume 8 GiB


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def gigabytes(nbytes: float) -> str:
    """For people: 1.50 GB, 12.3 MB, 4.0 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
