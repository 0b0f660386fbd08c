"""The Device of the cuda backend: what a GPU stores, what it takes of its memory, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

from quire.backends.backend import Capacity
from quire.backends.cuda.accelerator import Accelerator, DeviceFault
from quire.backends.cuda.asked import require_compiled
from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.caches import token_bytes
from quire.backends.cuda.coded_form import coded_form
from quire.backends.cuda.divided import divide, divided_axes, divided_spec
from quire.backends.cuda.drafts import require_host_memory
from quire.backends.cuda.exchanges import exchange_row_bytes
from quire.backends.cuda.fused import prepared
from quire.backends.cuda.graphs import GRAPH_BYTES, LAUNCH_BYTES, graph_rows, padded_rows
from quire.backends.cuda.images import keeps_halves
from quire.backends.cuda.kernels.product_variants import INTEGERS
from quire.backends.cuda.library import prove_products
from quire.backends.cuda.loops import CudaLoops
from quire.backends.cuda.lower import scratch_row_bytes
from quire.backends.cuda.quantizing import STAGED_BYTES, is_rounded
from quire.backends.cuda.refused import require_kernels
from quire.backends.cuda.sampler import penalty_bytes, sampling_bytes
from quire.backends.cuda.segments import MEMORY_BYTES
from quire.backends.cuda.weights import SUPPORTED, axes_of, format_of, plan_layout, upload
from quire.backends.draft_model import DraftModel
from quire.backends.host import Kind
from quire.backends.kv_cache import OWN_DTYPES
from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.program import ops
from quire.program.caches import CacheSpec
from quire.program.passes import plan_buffers
from quire.program.program import Load, Op, Program, WeightSpec
from quire.quantize.kinds import Storage
from quire.quantize.round_to_nearest import kind_of
from quire.weights.load import Progress
from quire.weights.plan import Layout, WeightPlan

_ON_CPU = "use device='native'"
_FLOAT_BYTES = 4
# Of a step's arrays: integers, and the rotations of two ropes of 512 numbers.
_TOKEN_BYTES = 4 * 24 + 2 * 4 * 512


def cuda_device(name: str, num_threads: int | None = None, num_gpus: int = 1) -> CudaDevice:
    """Return the device that a configuration calls "cuda", "cuda:1" or "cuda-interpreted".

    With `num_gpus` it is that one and those after it. Raises ConfigError if something of it is missing, or if
    a GPU computes wrongly.
    """
    if name == "cuda-interpreted":
        from quire.backends.cuda.interpreted import InterpretedAccelerator, InterpretedGroup

        interpreted = InterpretedAccelerator() if num_gpus == 1 else InterpretedGroup(num_gpus)
        return CudaDevice(interpreted, "interpreted", num_threads)
    if find_spec("cuda") is None or find_spec("cuda.core") is None:
        problem = f"device = {name!r} needs cuda-core, which is not installed"
        raise ConfigError(problem, "pip install 'quire[cuda]', or leave device out to use the CPU")
    try:
        from quire.backends.cuda.driver import open_gpu
        from quire.backends.cuda.gpu_group import GpuGroup
    except ImportError as error:  # what another package brought may be older, or a part of it
        problem = f"device = {name!r} needs another cuda-core than is installed: {error}"
        raise ConfigError(problem, "pip install 'quire[cuda]', or leave device out to use the CPU") from error

    first = int(name.partition(":")[2] or 0)
    gpus = [open_gpu(index) for index in range(first, first + num_gpus)]
    for gpu in gpus:
        _check_once(gpu)
    accelerator = gpus[0] if num_gpus == 1 else GpuGroup(gpus)
    return CudaDevice(accelerator, gpus[0].manifest.digest[:12], num_threads)


@cache
def _check_once(accelerator: Accelerator) -> None:
    """Raise ConfigError if an accelerator computes wrongly; each is checked once in a process."""
    from quire.backends.cuda.self_check import check_accelerator

    check_accelerator(accelerator)


class CudaDevice:
    """A GPU or several, or an accelerator that stands for them, with the kernels compiled for it.

    `kernels` identifies these: the digest of their manifest. `num_threads` threads load weights. All bytes
    are those of each GPU.
    """

    name = "cuda"
    computes = True
    tile_rows = 16
    keeps_floats_as = ""
    kv_dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16", "int8")
    shares_weights = False
    is_host = False

    def __init__(self, accelerator: Accelerator, kernels: str, num_threads: int | None = None) -> None:
        self._accelerator = accelerator
        self._kernels = kernels
        self._num_threads = num_threads
        self._num_gpus = accelerator.num_ranks
        self._products = ""  # what a library computes of the model that was built last

    def _divide(self, program: Program, weights: WeightPlan) -> Program:
        """Return the part of a program that each GPU computes, with planned weights."""
        return divide(program, self._num_gpus, axes_of(weights))

    @property
    def arithmetic(self) -> str:
        return f"{self._accelerator.target}-{self._kernels}"

    def in_words(self) -> str:
        return f"{self._accelerator.name}: {self._accelerator.in_words()}"

    def facts(self) -> Mapping[str, str | int]:
        return {
            "gpu": self._accelerator.in_words(),
            "target": self._accelerator.target,
            "kernels": self._kernels,
            **({"large_products": self._products} if self._products else {}),
        }

    def storage(self, spec: WeightSpec, stored: Storage, quantization: str | None) -> Storage:
        kept = kind_of(spec, stored, quantization)
        if kept.kind not in SUPPORTED and coded_form(kept) is None:
            *others, last = map(repr, SUPPORTED)
            raise ConfigError(
                f"{spec.name} is stored as {kept}, which the cuda backend has no kernel for",
                f"{_ON_CPU}, or a checkpoint in {', '.join(others)} or {last}",
            )
        return kept

    def layout(self, program: Program, storage: Mapping[str, Storage]) -> Layout:
        """Lay out the weights. Raises ConfigError for a program with an op that has no kernel."""
        require_kernels(program, storage)
        axes = divided_axes(program, self._num_gpus)
        return plan_layout(divide(program, self._num_gpus, axes), storage)

    def arithmetic_of(self, op: Op, storage: Mapping[str, Storage], kv_dtype: str) -> Kind:
        """Return what the kernels multiply: integers meet int8, bf16 and 8-bit floats bf16."""
        if isinstance(op, ops.Attention | ops.SharedAttention | ops.LatentAttention):
            return "bf16" if kv_dtype in ("bfloat16", "int8") else "f32"
        if not isinstance(op, ops.Linear | ops.LinearByHead | ops.GatedLinear | ops.Experts):
            return "f32"
        kept = storage[op.weights()[0].name]
        if (form := coded_form(kept)) is not None:
            of_floats: Kind = "f32" if form.kind.table == "floats" else "bf16"
            return of_floats if form.kind.is_float else "int8"
        return "int8" if kept.kind in INTEGERS else "bf16" if kept.kind == "bf16" else "f32"

    def own_kv_dtype(self, floats: str) -> str:
        return OWN_DTYPES[floats]

    def block_bytes(self, spec: CacheSpec, kv_dtype: str, block_size: int) -> int:
        return token_bytes(divided_spec(spec, self._num_gpus), kv_dtype) * block_size

    def step_bytes(
        self, program: Program, weights: WeightPlan, num_tokens: int, num_logits: int | None = None
    ) -> int:
        """Return the bytes of all values, of uploads, of segments of contexts, and of sampling.

        A step of rows of one token has more rows in its graph than it was planned with.
        """
        program = self._divide(program, weights)
        formats = {name: format_of(storage) for name, storage in weights.storage.items()}
        if isinstance(first := program.ops[0], ops.Patches):
            return _tower_bytes(program, formats, first.out.width, num_tokens, num_logits or num_tokens)
        most = padded_rows(num_logits or num_tokens)
        num_tokens = padded_rows(num_tokens)
        read = (op.out.row_bytes for op in program if isinstance(op, ops.PreviousHidden))
        token_bytes = _TOKEN_BYTES + 2 * sum(read)  # uploads have as much to spare
        values = plan_buffers(prepared(program)).nbytes(Load(((0, num_tokens),), most))
        exchanged = exchange_row_bytes(program)
        values += num_tokens * (token_bytes + scratch_row_bytes(program, formats) + exchanged["T"])
        values += most * exchanged["L"]
        return values + MEMORY_BYTES + sampling_bytes(program.output.width, most)

    def slots_bytes(self, program: Program, num_slots: int, block_bytes: int) -> int:
        """Return the bytes of counts of tokens, for requests with penalties, of graphs, and of spare blocks.

        A graph has two launches for each op: few ops have more, and many have one. With adapters of a format
        there are others, with two more for each product that may have any.
        """
        counts = (num_slots + 1) * penalty_bytes(program.output.width)
        return counts + _graphs_bytes(program, num_slots) + block_bytes

    def drafting_bytes(self, target: Program, draft: Program, num_slots: int, spare_bytes: int) -> int:
        """Return the bytes of spare blocks, also of a slot that is nobody's, and of graphs.

        Logits of another number of tokens than the target's are copied.
        """
        vocab, own = target.output.width, draft.output.width
        fitted = _FLOAT_BYTES * padded_rows(num_slots) * vocab if own != vocab else 0
        return (num_slots + 1) * spare_bytes + _graphs_bytes(draft, num_slots) + fitted

    def loading_bytes(self, weights: WeightPlan) -> int:
        """Return the bytes of floats that are rounded together."""
        return STAGED_BYTES if any(is_rounded(weights, name) for name in weights.specs) else 0

    def available_bytes(self) -> int:
        """Return the free memory of the GPU, less what its driver takes for launches."""
        return self._accelerator.free_bytes()

    def require_runnable(
        self,
        program: Program,
        weights: WeightPlan,
        capacity: Capacity,
        draft: DraftModel[WeightPlan] | None,
        vision: Vision | None,
    ) -> None:
        require_compiled(self._divide(program, weights), weights.layout, capacity, self._accelerator)
        if draft is not None:
            own = draft.weights or weights
            require_compiled(self._divide(draft.program, own), own.layout, capacity, self._accelerator)
            require_host_memory(program, draft, capacity)
        if vision is not None:
            halves = keeps_halves(capacity.kv_dtype)
            tower = self._divide(vision.program, weights)
            require_compiled(tower, weights.layout, capacity, self._accelerator, halves)

    def build(
        self,
        program: Program,
        weights: WeightPlan,
        capacity: Capacity,
        progress: Progress | None = None,
        draft: DraftModel[WeightPlan] | None = None,
        vision: Vision | None = None,
    ) -> CudaBackend:
        self.require_runnable(program, weights, capacity, draft, vision)
        try:
            uploaded = upload(weights, self._accelerator, progress, self._num_threads)
            drafter = None
            if draft is not None:
                kept = draft.weights
                more = None if kept is None else upload(kept, self._accelerator, None, self._num_threads)
                drafter = replace(draft, program=self._divide(draft.program, kept or weights)).having(more)
            if vision is not None:
                vision = replace(vision, program=self._divide(vision.program, weights))
            own = self._divide(program, weights)
            models = [(own, uploaded)]
            models += [(drafter.program, drafter.weights or uploaded)] if drafter is not None else []
            self._products = prove_products(models, self._accelerator)
            return CudaBackend(own, uploaded, self._accelerator, capacity, drafter, vision)
        except DeviceFault as fault:
            raise ConfigError(f"{self._accelerator.name}: {fault.message}", fault.hint) from fault

    def loops(self) -> CudaLoops:
        return CudaLoops(self._accelerator, self._kernels)


def _graphs_bytes(program: Program, num_slots: int) -> int:
    """Return the bytes of the graphs of a program, by the rule that slots_bytes states."""
    adapted = sum(isinstance(op, ops.Linear) and op.adapted for op in program)
    launches = 2 * len(program.ops) + (2 * (len(program.ops) + adapted) if adapted else 0)
    each = GRAPH_BYTES * (2 if adapted else 1) + launches * LAUNCH_BYTES
    return len(graph_rows(num_slots)) * each


def _tower_bytes(
    program: Program, formats: Mapping[str, str], columns: int, num_patches: int, num_tokens: int
) -> int:
    """Return the bytes of values of a tower, and of uploads of its patches."""
    values = plan_buffers(prepared(program)).nbytes(Load(((0, num_patches),), num_tokens))
    scratch = max(scratch_row_bytes(program, formats, halves) for halves in (False, True))
    exchanged = exchange_row_bytes(program)
    values += num_patches * exchanged["T"] + num_tokens * exchanged["L"]
    return values + num_patches * (_TOKEN_BYTES + scratch + 2 * _FLOAT_BYTES * columns)
