"""Memory planning: what a model needs of this machine's memory, computed before loading."""

from __future__ import annotations

from dataclasses import dataclass

from quire.backends.device import Device, kv_dtype
from quire.backends.draft_model import DraftModel, shared_table, spare_blocks
from quire.cache_plan import Sizing, by_spec, with_more
from quire.config import QUANTIZATIONS, EngineConfig
from quire.environment import user_path
from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.program.program import Program
from quire.weights.adapters import stored_bytes
from quire.weights.plan import WeightPlan

# Default size of the KV cache. Few requests fill a context of 100,000 tokens, and memory reserved for them is
# lost to other programs on this machine once it has been touched.
REQUEST_TOKENS = 8192  # tokens reserved for each of max_num_seqs requests
KV_SHARE = 0.5  # maximum share of the memory that weights and activations leave,
KV_MOST = 0.9  # and its maximum if one request of full length needs more
FLOAT_BYTES = 4
SNAPSHOT_SHARE = 0.05  # maximum share of that memory for snapshots of states
BITS_OF = {"int8": 8.25, "int4": 4.25}  # of a weight, in each of QUANTIZATIONS
_SMALLER = 0.9  # share of the bits that weights have, above which it is not worth to round them again


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Bytes of a draft model by purpose: `block_bytes` in each block of a cache group of the target.

    The activations contain its spare blocks.
    """

    group: int
    block_bytes: int
    weight_bytes: int
    activation_bytes: int
    loading_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. The cache has `blocks` of each group; sequences may have `max_model_len` tokens.

    `kv_reason` says in words what the cache holds, or what limits it. Layers that keep a state have it for
    each of `num_slots` slots and in each of `num_snapshots` snapshots.
    """

    weight_bytes: int  # as stored
    num_weights: int
    working_bytes: int  # as the backend keeps them: packed, or as float32 in the reference backend; the part
    # of this engine, if several share them
    activation_bytes: int
    sizing: Sizing
    blocks: tuple[int, ...]
    kv_reason: str
    max_model_len: int
    available_bytes: int
    loading_bytes: int = 0  # in addition to the weights, while they are packed
    num_slots: int = 0
    num_snapshots: int = 0
    beside_bytes: int = 0  # of adapters, and of blocks that the host keeps outside of the cache
    draft: DraftMemory | None = None

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block in every group."""
        return sum(group.block_bytes for group in self.sizing.groups)

    @property
    def num_tokens(self) -> int:
        """Capacity of the cache in tokens, ignoring windows."""
        return self.sizing.tokens(self.blocks)

    @property
    def kv_bytes(self) -> int:
        return self.sizing.nbytes(self.blocks)

    @property
    def state_bytes(self) -> int:
        return sum(
            self.num_slots * group.slot_bytes + self.num_snapshots * group.snapshot_bytes
            for group in self.sizing.groups
        )

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model, which the other numbers contain."""
        if (draft := self.draft) is None:
            return 0
        return draft.weight_bytes + draft.activation_bytes + self.blocks[draft.group] * draft.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.needed_bytes(self.kv_bytes)

    def needed_bytes(self, kv_bytes: int) -> int:
        """Return the peak memory with a cache of this size: loading ends before steps begin."""
        return self.working_bytes + max(self.running_bytes + kv_bytes, self.loading_bytes)

    @property
    def running_bytes(self) -> int:
        """Bytes in addition to the weights while steps run, without the cache."""
        return self.activation_bytes + self.state_bytes + self.beside_bytes


def plan_memory(
    device: Device,
    program: Program,
    weights: WeightPlan,
    config: EngineConfig,
    longest: int,
    available_bytes: int | None = None,
    draft: DraftModel[WeightPlan] | None = None,
    num_sharing: int = 1,
    vision: Vision | None = None,
) -> MemoryPlan:
    """Decide the size of each cache group and the longest sequence.

    `longest` is the maximum context of the model. `available_bytes` defaults to what the device reports.
    Of weights that `num_sharing` engines share, this one counts its part. Raises ConfigError if the draft
    model cannot use the block tables of the model.
    """
    dtype = kv_dtype(device, config.kv_cache_dtype, weights.floats)
    groups = by_spec(program, lambda spec: device.block_bytes(spec, dtype, config.block_size))
    drafting = None if draft is None else _draft_memory(device, program, weights, draft, config, dtype)
    if drafting is not None:
        groups = with_more(groups, drafting.group, drafting.block_bytes)
    sizing = Sizing(groups, config.block_size, config.max_num_batched_tokens)
    available = device.available_bytes() if available_bytes is None else available_bytes
    working = weights.layout.nbytes
    working += drafting.weight_bytes if drafting and draft and draft.weights is not None else 0
    working = -(-working // (num_sharing if device.shares_weights else 1))
    activations = device.step_bytes(program, weights, config.max_num_batched_tokens)
    activations += device.slots_bytes(program, config.max_num_seqs, sizing.nbytes([1] * len(groups)))
    activations += drafting.activation_bytes if drafting else 0
    activations += _image_bytes(device, weights, vision, config) if vision else 0
    left = available - working - activations - (beside := _beside_bytes(device, config))
    left -= config.max_num_seqs * sum(group.slot_bytes for group in groups)
    longest = config.max_model_len or longest
    if program.pooled:  # a step computes whole texts, and nothing outlives it
        longest = min(longest, config.max_num_batched_tokens)
    num_snapshots = sizing.snapshots(
        int(max(left, 0) * SNAPSHOT_SHARE), config.max_num_seqs, min(longest, REQUEST_TOKENS)
    )
    left -= num_snapshots * sum(group.snapshot_bytes for group in groups)
    if program.pooled:
        blocks, reason = _blocks_of_steps(sizing, config), "the texts of a step"
    else:
        blocks, reason = _blocks(sizing, config, longest, max(left, 0) if device.computes else None)
    return MemoryPlan(
        weight_bytes=sum(map(weights.stored_bytes, weights.specs.values())),
        num_weights=sum(spec.size for spec in weights.specs.values()),
        working_bytes=working,
        activation_bytes=activations,
        sizing=sizing,
        blocks=blocks,
        kv_reason=reason,
        max_model_len=config.max_model_len or sizing.longest(blocks, longest),
        available_bytes=available,
        loading_bytes=max(device.loading_bytes(weights), drafting.loading_bytes if drafting else 0),
        num_slots=config.max_num_seqs,
        num_snapshots=num_snapshots,
        beside_bytes=beside,
        draft=drafting,
    )


def _beside_bytes(device: Device, config: EngineConfig) -> int:
    """Return the bytes beside weights, steps and cache: of adapters, and of blocks that the host keeps."""
    folder = config.adapter_dir
    adapters = 0 if folder is None else stored_bytes(user_path(folder))
    return adapters + (config.prefix_cache_memory_bytes or 0 if device.is_host else 0)


def _draft_memory(
    device: Device,
    program: Program,
    weights: WeightPlan,
    draft: DraftModel[WeightPlan],
    config: EngineConfig,
    dtype: str,
) -> DraftMemory:
    """Count what a draft model needs: logits of one position of each sequence, and its spare blocks.

    `weights` are those of the model, among which a prediction layer has its own.
    """
    block_bytes = sum(device.block_bytes(spec, dtype, config.block_size) for spec in draft.program.caches)
    block_bytes += draft.block_bytes(config.block_size) if device.is_host else 0
    logits, used = min(draft.max_tokens, config.max_num_seqs), draft.weights or weights
    spare_bytes = spare_blocks(config.block_size) * block_bytes
    kept = device.drafting_bytes(program, draft.program, config.max_num_seqs, spare_bytes)
    names = program.weights()
    own_bytes = sum(part.nbytes for part in weights.layout.parts if part.name not in names)
    return DraftMemory(
        group=shared_table(program, draft.program).group,
        block_bytes=block_bytes,
        weight_bytes=draft.weights.layout.nbytes if draft.weights else own_bytes,
        activation_bytes=device.step_bytes(draft.program, used, draft.max_tokens, logits) + kept,
        loading_bytes=device.loading_bytes(draft.weights) if draft.weights else 0,
    )


def _image_bytes(device: Device, weights: WeightPlan, vision: Vision, config: EngineConfig) -> int:
    """Return the bytes of encoding the largest image, with its patches, and of embeddings a step may read."""
    patches, tokens = vision.patching.most
    columns = vision.program.ops[0].out.width
    kept = (tokens + config.max_num_batched_tokens) * vision.program.output.width
    return device.step_bytes(vision.program, weights, patches, tokens) + FLOAT_BYTES * (
        patches * columns + kept
    )


def _blocks_of_steps(sizing: Sizing, config: EngineConfig) -> tuple[int, ...]:
    """Return the blocks of each group that the texts of the steps in flight fill, some of them in part."""
    num_tokens = config.max_num_batched_tokens
    each = -(-num_tokens // config.block_size) + min(config.max_num_seqs, num_tokens)
    count = each * (config.max_steps_in_flight or 1)
    return tuple(count if group.block_bytes else 0 for group in sizing.groups)


def _blocks(
    sizing: Sizing, config: EngineConfig, longest: int, left: int | None
) -> tuple[tuple[int, ...], str]:
    """Return the blocks of each group and the reason (MemoryPlan.kv_reason). `left` bytes are free for
    them; None: unlimited.

    Without kv_cache_memory_bytes they hold max_num_seqs requests of REQUEST_TOKENS (or of the longest, if
    that is less) and the longest one, within KV_SHARE of what is left; the longest one alone may take more.
    """
    num_requests, each = config.max_num_seqs, min(longest, REQUEST_TOKENS)
    if (asked := config.kv_cache_memory_bytes) is not None and left is not None:
        return sizing.fit(asked, num_requests, longest, longest), "as asked for"
    one = sizing.blocks(1, longest)
    useful = tuple(map(max, sizing.blocks(num_requests, each), one))
    for_one = f"one request of {longest:,}"
    reason = f"{num_requests:,} requests of {each:,}" if num_requests * each > longest else for_one
    if left is None or sizing.nbytes(useful) <= int(left * KV_SHARE):
        return useful, reason
    if int(left * KV_SHARE) < sizing.nbytes(one) <= int(left * KV_MOST):
        return one, for_one
    return sizing.fit(int(left * KV_SHARE), num_requests, each, longest), "half of the memory left"


def misfit(plan: MemoryPlan, config: EngineConfig, device: Device) -> ConfigError | None:
    """Return the error if the model, or one sequence of max_model_len, does not fit; None if it does."""
    if not device.computes:
        return None
    wanted = config.max_model_len or 1  # or one block, if no length was requested
    one = plan.sizing.blocks(1, wanted)
    least = plan.sizing.nbytes(one)
    needed = plan.needed_bytes(max(plan.kv_bytes, least))
    if needed > plan.available_bytes:
        what, hint = _too_large(plan, config, device, least)
        return ConfigError(
            f"{gigabytes(plan.available_bytes)} of memory are available; the model needs "
            f"{gigabytes(needed)}, {gigabytes(needed - plan.available_bytes)} short{what}",
            hint,
        )
    capacity = plan.sizing.longest(plan.blocks, wanted)
    if capacity < wanted:
        what = f"sequence of {wanted:,}" if config.max_model_len else "block"
        shorter = ", or lower max_model_len" if wanted > config.block_size else ""
        hint = f"give kv_cache_memory_bytes = {least} or more{shorter}"
        return ConfigError(f"the KV cache has room for {capacity:,} tokens, less than one {what}", hint)
    return None


def _too_large(plan: MemoryPlan, config: EngineConfig, device: Device, least: int) -> tuple[str, str]:
    """Return what is too large, and what to do. The cache needs at least `least` bytes."""
    if plan.working_bytes + plan.loading_bytes > plan.available_bytes:
        tried = QUANTIZATIONS.index(config.quantization) + 1 if config.quantization else 0
        most = _SMALLER * 8 * plan.weight_bytes / plan.num_weights
        fewer = " or ".join(repr(name) for name in QUANTIZATIONS[tried:] if BITS_OF[name] < most)
        hint = f"give quantization = {fewer}, or take a smaller model" if fewer else "take a smaller model"
        if device.keeps_floats_as and config.quantization is None:
            kept = f"keeps {device.keeps_floats_as}, however weights are stored"
            hint += f": the {device.name} backend {kept}"
        return ": the weights alone are too large", hint
    left = plan.available_bytes - plan.working_bytes - plan.running_bytes
    if left >= least:
        return "", f"give kv_cache_memory_bytes = {left} or less"
    kept = ", prefix_cache_memory_bytes" if config.prefix_cache_memory_bytes and device.is_host else ""
    return "", f"lower max_num_batched_tokens{kept} or max_model_len, or take a smaller model"


def summary(plan: MemoryPlan) -> str:
    """Return the plan in one readable line."""
    cache = f"KV cache {gigabytes(plan.kv_bytes)} ({plan.num_tokens:,} tokens: {plan.kv_reason})"
    if plan.state_bytes:
        of = f"{plan.num_slots} slots, {plan.num_snapshots} snapshots"
        cache += f", states {gigabytes(plan.state_bytes)} ({of})"
    weights, activations = gigabytes(plan.working_bytes), gigabytes(plan.activation_bytes)
    available = gigabytes(plan.available_bytes)
    drafting = f", {gigabytes(plan.draft_bytes)} of it for the draft model" if plan.draft else ""
    beside = f", kept blocks and adapters {gigabytes(plan.beside_bytes)}" if plan.beside_bytes else ""
    needed = f"weights {weights}, {cache}, activations {activations}{beside}{drafting}"
    return f"memory: {needed}, of {available} available"


def gigabytes(nbytes: float) -> str:
    """Format bytes for people: 1.06 TB, 1.5 GB, 12.3 MB, 4 kB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * size:  # what three digits round to it
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
