"""What a model takes of this machine's memory, counted before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.backends.kv_cache import is_native, kv_dtype, kv_token_bytes
from quire.backends.native.layout import plan_layout
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.program import ops
from quire.program.numerics import GROUP
from quire.program.ops.experts import ExpertWeights
from quire.program.passes import plan_buffers
from quire.program.program import Load, Program, WeightBytes, WeightSpec
from quire.quantize.kinds import DTYPES, Storage

_UNLIMITED = 1 << 60  # control groups of version 1 say "none" with a number beyond any memory
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
    program: Program,
    nbytes: WeightBytes,
    config: EngineConfig,
    longest: int,
    available_bytes: int,
    storage: Mapping[str, Storage] | None = None,
) -> MemoryPlan:
    """Decide the size of the KV cache and the longest sequence.

    `longest` is the most tokens the model was made for. `storage` says how every weight is stored; without
    it all count as float32.
    """
    weights = program.weights()
    storage = storage or {name: Storage("f32") for name in weights}
    stored = stored_format(storage)
    working, packing = _working_bytes(program, storage, config)
    activations = _activation_bytes(program, storage, config)
    block_bytes = kv_token_bytes(program, kv_dtype(config, stored)) * config.block_size
    left = available_bytes - working - activations
    max_model_len = config.max_model_len or longest
    num_blocks, reason = _kv_blocks(config, max_model_len, block_bytes, max(left, 0))
    if config.max_model_len is None:
        max_model_len = min(max_model_len, num_blocks * config.block_size)
    largest = max(spec.size for spec in weights.values()) * DTYPES[stored].itemsize
    return MemoryPlan(
        weight_bytes=sum(nbytes(spec) for spec in weights.values()),
        working_bytes=working,
        activation_bytes=activations,
        kv_block_bytes=block_bytes,
        num_blocks=num_blocks,
        kv_reason=reason,
        max_model_len=max_model_len,
        available_bytes=available_bytes,
        loading_bytes=largest + packing if is_native(config) else 0,
    )


def _kv_blocks(config: EngineConfig, longest: int, block_bytes: int, left: int) -> tuple[int, str]:
    """Return the number of KV blocks and its reason (MemoryPlan.kv_reason). `left` bytes are free for it.

    Without kv_cache_memory_bytes they are enough for max_num_seqs requests of REQUEST_TOKENS (or of the
    longest, if that is less) and for the longest one, within half of what is left; the longest one alone may
    take more.
    """
    whole, each = -(-longest // config.block_size), min(longest, REQUEST_TOKENS)
    if (asked := config.kv_cache_memory_bytes) is not None and config.device != "null":
        return min(whole * config.max_num_seqs, asked // block_bytes), "as asked for"
    useful = -(-each // config.block_size) * config.max_num_seqs
    reason = f"{config.max_num_seqs:,} requests of {each:,}"
    if useful <= whole:
        useful, reason = whole, f"one request of {longest:,}"
    share = int(left * KV_SHARE) // block_bytes
    if config.device == "null" or useful <= share:
        return useful, reason
    if share < whole <= int(left * KV_MOST) // block_bytes:
        return whole, f"one request of {longest:,}"
    return share, "half of the memory left"


def stored_format(storage: Mapping[str, Storage]) -> str:
    """The format of the checkpoint's numbers (bf16, f16 or f32): that of most weights that keep it."""
    kept = Counter(how.kind for how in storage.values() if how.kind in DTYPES)
    return kept.most_common(1)[0][0] if kept else "bf16"


def _working_bytes(program: Program, storage: Mapping[str, Storage], config: EngineConfig) -> tuple[int, int]:
    """Bytes of all weights as the backend holds them; and of what is packed before it goes to a file."""
    if config.device == "null":
        return 0, 0
    if is_native(config):
        layout = plan_layout(program, storage)
        through_file = config.quantization is not None and config.packed_cache
        return layout.nbytes, 2 * max(part.nbytes for part in layout.parts) if through_file else 0
    return sum(_kept_bytes(spec, storage[name]) for name, spec in program.weights().items()), 0


def _kept_bytes(spec: WeightSpec, how: Storage) -> int:
    """By the reference: floats as float32, whatever is quantized as it is stored."""
    return spec.size * 4 if how.kind in DTYPES else how.nbytes(spec.shape)


def _activation_bytes(program: Program, storage: Mapping[str, Storage], config: EngineConfig) -> int:
    """Of the largest step: all values, and what products take beside them: natively, rows laid out for them;
    in the reference, a quantized matrix unpacked.
    """
    most = config.max_num_batched_tokens  # of tokens, and of logits: those of a prompt may all be asked
    values = plan_buffers(program).nbytes(Load(((0, most),), most))
    if not is_native(config):
        return values + max(_unpacked_bytes(w, storage[name]) for name, w in program.weights().items())
    room = max((_row_bytes(w) for op in program for w in op.weights() if len(w.shape) == 2), default=0)
    experts = (op for op in program if isinstance(op, ops.Experts))
    apart = max((op.chosen * _expert_bytes(op.experts) for op in experts), default=0)
    return values + most * (room + apart)


def _unpacked_bytes(spec: WeightSpec, how: Storage) -> int:
    """What the reference makes of a quantized matrix while it multiplies (numerics.quantized_matmul): a group
    of inputs and three sums as float64, and of integers that are packed by two, two copies one by one, of
    which one stays.
    """
    if how.kind in DTYPES:
        return 0
    outputs, inputs = spec.shape[-2:]
    group = 8 * (min(GROUP, inputs) + 3)
    return outputs * (max(2 * inputs, inputs + group) if how.kind == "int4" else group)


def _row_bytes(weight: WeightSpec) -> int:
    """A row laid out for a product with this weight, at most (csrc/kernels/kernels.h, Rows)."""
    return -(-weight.shape[-1] // 32) * 32 * 4


def _expert_bytes(experts: ExpertWeights) -> int:
    """What an expert keeps of one token: input, gate, up and output, and rows for its products."""
    inner, hidden = experts.gate.shape[-2:]
    return 4 * (2 * inner + 2 * hidden) + _row_bytes(experts.gate) + _row_bytes(experts.down)


def misfit(plan: MemoryPlan, config: EngineConfig) -> ConfigError | None:
    """Why the model, or one sequence of the max_model_len asked for, does not fit; None if it does."""
    if config.device == "null":
        return None
    blocks = -(-(config.max_model_len or 1) // config.block_size)
    least = blocks * plan.kv_block_bytes  # a cache of one sequence, or one block where no length was asked
    needed = plan.needed_bytes(max(plan.kv_bytes, least))
    if needed > plan.available_bytes:
        what, hint = _too_large(plan, config, least)
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


def _too_large(plan: MemoryPlan, config: EngineConfig, least: int) -> tuple[str, str]:
    """What of the model is too large, and what to do. A cache has `least` bytes or more."""
    if plan.working_bytes + plan.loading_bytes > plan.available_bytes:
        fewer = {None: "give quantization = 'int8' or 'int4', or ", "int8": "give quantization = 'int4', or "}
        hint = fewer.get(config.quantization, "") + "take a smaller model"
        if not is_native(config) and config.quantization is None:
            hint += ": the reference backend keeps float32, however weights are stored"
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


def gigabytes(nbytes: float) -> str:
    """For people: 1.50 GB, 12.3 MB, 4.0 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
