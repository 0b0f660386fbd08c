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
    most = config.max_num_batched_tokens  # of tokens, and of logits: those of a prompt may all be asked
    activations = plan_buffers(program).nbytes(Load(((0, most),), most))
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
    blocks = -(-(config.max_model_len or 1) // config.block_size)
    least = blocks * plan.kv_block_bytes  # a cache of one sequence, or one block where no length was asked
    fixed = plan.working_bytes + plan.activation_bytes
    needed = fixed + max(plan.kv_bytes, least)
    if needed > plan.available_bytes:
        what, hint = _too_large(plan, plan.available_bytes - fixed, least)
        return ConfigError(
            f"{gigabytes(plan.available_bytes)} of memory are available; the model needs "
            f"{gigabytes(needed)}, {gigabytes(needed - plan.available_bytes)} short{what}",
            hint,
        )
    if plan.num_blocks < blocks:
        room = f"the KV cache has room for {plan.num_blocks * config.block_size:,} tokens"
        wanted = f"sequence of {config.max_model_len:,}" if config.max_model_len else "block"
        shorter = ", or lower max_model_len" if blocks > 1 else ""
        hint = f"give kv_cache_memory_bytes = {least} or more{shorter}"
        return ConfigError(f"{room}, less than one {wanted}", hint)
    return None


def _too_large(plan: MemoryPlan, left: int, least: int) -> tuple[str, str]:
    """What of the model is too large, and what to do. `left` bytes are for a cache of `least` or more."""
    if plan.working_bytes > plan.available_bytes:
        hint = "take a smaller model: the reference backend computes in float32, however weights are stored"
        return ": the weights alone are too large", hint
    if left >= least:
        return "", f"give kv_cache_memory_bytes = {left} or less"
    return "", "lower max_num_batched_tokens or max_model_len, or take a smaller model"


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes a new process can take: what the machine has free, within the limit of the control group."""
    free = 0
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read(cgroup / "memory.max").strip(), _read(cgroup / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        within = int(limit) - int(used) + _reclaimable(cgroup)
        free = min(free, within) if free else within
    return max(free, 0) if free else 8 << 30  # a system that tells nothing: assume 8 GiB


def _reclaimable(cgroup: Path) -> int:
    """Bytes counted as used that hold cached files: the system gives them up for whoever asks."""
    for line in _read(cgroup / "memory.stat").splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


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
