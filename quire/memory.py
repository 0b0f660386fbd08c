"""What a model takes of this machine's memory, counted before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from quire.backends.device import Device, kv_dtype
from quire.config import QUANTIZATIONS, EngineConfig
from quire.errors import ConfigError
from quire.program.program import Program
from quire.weights.plan import WeightPlan

# Of the KV cache, when no size is asked for. Few requests are as long as a context of 100,000 tokens; what is
# reserved for them is taken from others on this machine as soon as it was used once.
REQUEST_TOKENS = 8192  # that each of max_num_seqs requests is given room for
KV_SHARE = 0.5  # of the memory left beside weights and activations: the most that is taken,
KV_MOST = 0.9  # except for one request of full length


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. The cache has `num_blocks` blocks; sequences may have `max_model_len` tokens.

    `kv_reason` says in words what the cache has room for, or what bounds it.
    """

    weight_bytes: int  # as stored
    working_bytes: int  # as the backend keeps them: packed, or in the reference floats as float32
    activation_bytes: int
    kv_block_bytes: int
    num_blocks: int
    kv_reason: str
    max_model_len: int
    available_bytes: int
    loading_bytes: int = (
        0  # beside the weights while they are packed: the largest of the checkpoint, and room
    )

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.kv_block_bytes

    @property
    def total_bytes(self) -> int:
        return self.needed_bytes(self.kv_bytes)

    def needed_bytes(self, kv_bytes: int) -> int:
        """The most held at any time, with a cache of this size: loading is over before steps begin."""
        return self.working_bytes + max(self.activation_bytes + kv_bytes, self.loading_bytes)


def plan_memory(
    device: Device,
    program: Program,
    weights: WeightPlan,
    config: EngineConfig,
    longest: int,
    available_bytes: int | None = None,
) -> MemoryPlan:
    """Decide the size of the KV cache and the longest sequence.

    `longest` is the most tokens the model was made for. `available_bytes` is what the device says, if None.
    """
    available = device.available_bytes() if available_bytes is None else available_bytes
    working = weights.layout.nbytes
    activations = device.step_bytes(program, weights, config.max_num_batched_tokens)
    dtype = kv_dtype(device, config.kv_cache_dtype, weights.floats)
    block_bytes = device.block_bytes(program, dtype, config.block_size)
    left = max(available - working - activations, 0) if device.computes else None
    max_model_len = config.max_model_len or longest
    num_blocks, reason = _kv_blocks(config, max_model_len, block_bytes, left)
    if config.max_model_len is None:
        max_model_len = min(max_model_len, num_blocks * config.block_size)
    return MemoryPlan(
        weight_bytes=sum(map(weights.stored_bytes, weights.specs.values())),
        working_bytes=working,
        activation_bytes=activations,
        kv_block_bytes=block_bytes,
        num_blocks=num_blocks,
        kv_reason=reason,
        max_model_len=max_model_len,
        available_bytes=available,
        loading_bytes=device.loading_bytes(weights),
    )


def _kv_blocks(config: EngineConfig, longest: int, block_bytes: int, left: int | None) -> tuple[int, str]:
    """Return the number of KV blocks and its reason (MemoryPlan.kv_reason). `left` bytes are free for it;
    None: any number.

    Without kv_cache_memory_bytes they are enough for max_num_seqs requests of REQUEST_TOKENS (or of the
    longest, if that is less) and for the longest one, within half of what is left; the longest one alone may
    take more.
    """
    whole, each = -(-longest // config.block_size), min(longest, REQUEST_TOKENS)
    if (asked := config.kv_cache_memory_bytes) is not None and left is not None:
        return min(whole * config.max_num_seqs, asked // block_bytes), "as asked for"
    useful = -(-each // config.block_size) * config.max_num_seqs
    reason = f"{config.max_num_seqs:,} requests of {each:,}"
    if useful <= whole:
        useful, reason = whole, f"one request of {longest:,}"
    share = useful if left is None else int(left * KV_SHARE) // block_bytes
    if left is None or useful <= share:
        return useful, reason
    if share < whole <= int(left * KV_MOST) // block_bytes:
        return whole, f"one request of {longest:,}"
    return share, "half of the memory left"


def misfit(plan: MemoryPlan, config: EngineConfig, device: Device) -> ConfigError | None:
    """Why the model, or one sequence of the max_model_len asked for, does not fit; None if it does."""
    if not device.computes:
        return None
    blocks = -(-(config.max_model_len or 1) // config.block_size)
    least = blocks * plan.kv_block_bytes  # a cache of one sequence, or one block where no length was asked
    needed = plan.needed_bytes(max(plan.kv_bytes, least))
    if needed > plan.available_bytes:
        what, hint = _too_large(plan, config, device, least)
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


def _too_large(plan: MemoryPlan, config: EngineConfig, device: Device, least: int) -> tuple[str, str]:
    """What of the model is too large, and what to do. A cache has `least` bytes or more."""
    if plan.working_bytes + plan.loading_bytes > plan.available_bytes:
        tried = QUANTIZATIONS.index(config.quantization) + 1 if config.quantization else 0
        fewer = " or ".join(map(repr, QUANTIZATIONS[tried:]))
        hint = f"give quantization = {fewer}, or take a smaller model" if fewer else "take a smaller model"
        if device.keeps_floats_as and config.quantization is None:
            kept = f"keeps {device.keeps_floats_as}, however weights are stored"
            hint += f": the {device.name} backend {kept}"
        return ": the weights alone are too large", hint
    left = plan.available_bytes - plan.working_bytes - plan.activation_bytes
    if left >= least:
        return "", f"give kv_cache_memory_bytes = {left} or less"
    return "", "lower max_num_batched_tokens or max_model_len, or take a smaller model"


def summary(plan: MemoryPlan, config: EngineConfig) -> str:
    """The plan in one line, for people."""
    tokens = plan.num_blocks * config.block_size
    cache = f"KV cache {gigabytes(plan.kv_bytes)} ({tokens:,} tokens: {plan.kv_reason})"
    weights, activations = gigabytes(plan.working_bytes), gigabytes(plan.activation_bytes)
    available = gigabytes(plan.available_bytes)
    return f"memory: weights {weights}, {cache}, activations {activations}, of {available} available"


def gigabytes(nbytes: float) -> str:
    """For people: 1.50 GB, 12.3 MB, 4.0 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
