"""The Device of the native backend: its storage kinds, its use of host memory, and its construction."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from quire.backends.backend import Capacity
from quire.backends.draft_model import DraftModel
from quire.backends.host import HostDevice, Kind
from quire.backends.kv_cache import KV_ITEM_BYTES, OWN_DTYPES
from quire.backends.native import _core
from quire.backends.native.attention import OverPositions
from quire.backends.native.backend import NativeBackend
from quire.backends.native.coding import format_of
from quire.backends.native.layout import plan_layout
from quire.backends.native.weights import Packed, converts, load_packed
from quire.backends.packed_cache import PackedCache, packed_folder
from quire.environment import instruction_set
from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.linux import granted_processors
from quire.program import ops
from quire.program.ops.experts import ExpertWeights
from quire.program.program import Op, Program, WeightSpec
from quire.quantize.coded import CodedStorage
from quire.quantize.kinds import DTYPES, FloatStorage, Storage
from quire.quantize.mixed import MixedStorage
from quire.weights.load import Progress
from quire.weights.plan import Layout, WeightPlan

_LOG = logging.getLogger(__name__)
_ATTENTION = OverPositions | ops.CompressedAttention
# Instruction sets with products of bf16; the twin computes the bits of AMX without it.
_BF16_ISAS = frozenset({"avx512_amx", "avx512_amx_twin", "avx512_vnni_bf16"})


class NativeDevice(HostDevice):
    """The kernels of one instruction set: that of QUIRE_ISA, else the best this machine supports.

    `model` is its name in the cache of packed weights, used if `packed_cache`. The default number of threads
    is one per core that this process may use. With `share_weights` the memory of the weights is that of a
    file, which other processes with the same weights use too.
    """

    name = "native"
    tile_rows = 8  # kTile of csrc/kernels/kernels.h
    kv_dtypes = tuple(KV_ITEM_BYTES)

    def __init__(
        self,
        model: str,
        num_threads: int | None = None,
        packed_cache: bool = True,
        share_weights: bool = False,
    ) -> None:
        self.isa = _chosen_isa()
        self.num_threads = num_threads or usable_cores()
        if self.num_threads > (processors := len(os.sched_getaffinity(0))):
            words = "num_threads = %d is slower than %d: this process has no more processors"
            _LOG.warning(words, self.num_threads, processors)
        self.nodes = _core.Nodes(self.num_threads)
        self._model = model
        self._packed_cache = packed_cache
        self.shares_weights = share_weights and packed_cache

    @property
    def arithmetic(self) -> str:
        return self.isa

    def in_words(self) -> str:
        nodes = f" on {self.nodes.count} NUMA nodes" if self.nodes.count > 1 else ""
        return f"C++ for {self.isa}, {self.num_threads} thread{'s' * (self.num_threads > 1)}{nodes}"

    def facts(self) -> Mapping[str, str | int]:
        facts: dict[str, str | int] = {"isa": self.isa, "num_threads": self.num_threads}
        return facts | ({"numa_nodes": self.nodes.count} if self.nodes.count > 1 else {})

    def storage(self, spec: WeightSpec, stored: Storage, quantization: str | None) -> Storage:
        """Keep or quantize floats; unpack to float32, which is exact, what no kernel multiplies."""
        if not stored.is_float and not isinstance(stored, CodedStorage | MixedStorage):
            raise ConfigError(
                f"{spec.name} is stored as {stored}, which the native backend has no kernel for",
                "use device='reference', or an unquantized checkpoint",
            )
        kept = super().storage(spec, stored, quantization)
        if isinstance(kept, MixedStorage):
            return MixedStorage(tuple(map(_multiplied, kept.kinds)))
        return _multiplied(kept)

    def layout(self, program: Program, storage: Mapping[str, Storage]) -> Layout:
        return plan_layout(program, storage)

    def arithmetic_of(self, op: Op, storage: Mapping[str, Storage], kv_dtype: str) -> Kind:
        """Return what the kernels multiply (csrc/kernels/product.cpp, attention.cpp).

        Quantized weights meet quantized activations. bf16 is multiplied as stored if the instruction set has
        products of it, else as f32, like all other numbers.
        """
        stored = kv_dtype.replace("bfloat16", "bf16") if isinstance(op, _ATTENTION) else "f32"
        if isinstance(op, ops.Linear | ops.LinearByHead | ops.GatedLinear | ops.Experts):
            kept = storage[op.weights()[0].name]
            own = kept.kinds[0] if isinstance(kept, MixedStorage) else kept
            rounded_to = _core.activations(format_of(own))
            if rounded_to in ("int8", "int4", "rows", "spans_128", "spans_32"):
                return "int8"
            stored = "bf16" if rounded_to == "float8" else rounded_to
        return "bf16" if stored == "bf16" and self.isa in _BF16_ISAS else "f32"

    def own_kv_dtype(self, floats: str) -> str:
        """Return the model's own format."""
        return OWN_DTYPES[floats]

    def step_bytes(
        self, program: Program, weights: WeightPlan, num_tokens: int, num_logits: int | None = None
    ) -> int:
        """Return the bytes of values, packed activations, and the intermediate results of chosen experts."""
        values = super().step_bytes(program, weights, num_tokens, num_logits)
        matrices = [w for op in program for w in op.weights() if len(w.shape) == 2]
        packed = max((_core.row_bytes(w.shape[-1]) for w in matrices), default=0)
        by_head = (op.weight for op in program if isinstance(op, ops.LinearByHead))
        packed += max((w.shape[0] * _core.row_bytes(w.shape[-1]) for w in by_head), default=0)
        experts = (op for op in program if isinstance(op, ops.Experts))
        apart = max((op.routing.chosen * _expert_bytes(op.experts) for op in experts), default=0)
        return values + num_tokens * (packed + apart)

    def loading_bytes(self, weights: WeightPlan) -> int:
        """Return the bytes of the largest tensor as it is packed, and of buffers for the cache file."""
        floats = DTYPES[weights.floats].itemsize
        largest = max(
            spec.size * (floats if weights.stored[spec.name].is_float else 4)
            for spec in weights.specs.values()
            if spec.name not in weights.layout.in_place
        )
        through_file = self._packed_cache and (converts(weights) or self.shares_weights)
        return largest + (2 * max(part.nbytes for part in weights.layout.parts) if through_file else 0)

    def build(
        self,
        program: Program,
        weights: WeightPlan,
        capacity: Capacity,
        progress: Progress | None = None,
        draft: DraftModel[WeightPlan] | None = None,
        vision: Vision | None = None,
    ) -> NativeBackend:
        packed = self._load(weights, progress, self._model)
        drafter = None
        if draft is not None:
            more = None if draft.weights is None else self._load(draft.weights, None, draft.name)
            drafter = draft.having(None if more is None else (more.matrices, more.vectors))
        return NativeBackend(
            program,
            packed.matrices,
            packed.vectors,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            kv_cache_dtype=capacity.kv_dtype,
            isa=self.isa,
            nodes=self.nodes,
            max_num_seqs=capacity.max_num_seqs,
            num_snapshots=capacity.num_snapshots,
            ahead=capacity.max_steps_in_flight > 1,
            draft=drafter,
            vision=vision,
        )

    def _load(self, weights: WeightPlan, progress: Progress | None, model: str) -> Packed:
        return load_packed(
            weights,
            isa=self.isa,
            nodes=self.nodes,
            progress=progress,
            cache=self._cache(),
            model=model,
        )

    def _cache(self) -> PackedCache | None:
        if not self._packed_cache:
            return None
        if self.shares_weights:
            return PackedCache(packed_folder(), least_bytes=0, shared=True)
        return PackedCache(packed_folder())

    def loops(self) -> NativeLoops:
        return NativeLoops(self.isa, self.num_threads)


@dataclass(slots=True)
class NativeLoops:
    """Loops in assembly (csrc/core/probe.cpp), which no compiler optimizes away."""

    isa: str
    threads: int
    machine: str = ""
    levels: Mapping[str, int] | None = None

    def operations(self, kind: str, seconds: float) -> float:
        return _core.peak_operations(self.threads, self.isa, kind, seconds)

    def read_bytes(self, threads: int, nbytes: int, seconds: float) -> float:
        return _core.read_bandwidth(threads, self.isa, nbytes, seconds)


def _multiplied(storage: Storage) -> Storage:
    """Return the storage kind, or float32 if no kernel multiplies it."""
    coded = isinstance(storage, CodedStorage)
    return FloatStorage("f32") if coded and format_of(storage) == "f32" else storage


def usable_cores() -> int:
    """Return the physical cores of this process, within the processors that its control groups grant it."""
    return max(1, math.floor(min(granted_processors(), _core.num_cores())))


def _chosen_isa() -> str:
    runnable, asked = _core.isas(), instruction_set()
    if not runnable:
        raise ConfigError("Quire was built for another processor", "build it here, or for all: pip install .")
    if asked is None:
        return runnable[0]
    if asked not in runnable:
        raise ConfigError(
            f"QUIRE_ISA = {asked!r} is not an instruction set of this machine that Quire was built for",
            f"those are {', '.join(runnable)}; `make run` builds for the best, `pip install .` for all",
        )
    return asked


def _expert_bytes(experts: ExpertWeights) -> int:
    """Return the bytes an expert keeps per token: input, gate, up, output and packed activations."""
    inner, hidden = experts.up.shape[-2:]
    return 4 * (2 * inner + 2 * hidden) + _core.row_bytes(hidden) + _core.row_bytes(experts.down.shape[-1])
