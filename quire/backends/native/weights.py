"""Loading for the native backend: from the mapped checkpoint directly into packed memory.

There is no intermediate form. The pages of the checkpoint are released tensor by tensor, so the peak memory
of this process is the packed model and one tensor of the checkpoint.

Quantized models, by us or as they are stored, are packed into a file of the packed cache and read from it
into huge pages, now and at every later start. Others are not: a cache file would be as large as the
checkpoint, to save a second of copying. Engines that share their weights map the file instead, of any model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from quire.backends.native import _core
from quire.backends.native.coding import packing_of
from quire.backends.native.layout import IN_PLACE, VECTOR
from quire.backends.packed_cache import Allocate, Bytes, PackedCache, PackedFileWriter, allocate
from quire.program.program import WeightSpec
from quire.quantize.coded import Coded
from quire.quantize.kinds import DTYPE_NAMES, Array, StoredWeight, to_float32
from quire.quantize.round_to_nearest import SCHEMES, quantize
from quire.weights.load import Progress, canonical, pull_source
from quire.weights.plan import Layout, WeightPlace, WeightPlan
from quire.weights.tensors import Tensors

# The candidates that the reference tries for each group.
_TRIES = {name: list(map(float, scheme.candidates)) for name, scheme in SCHEMES.items()}
_TASK = 1 << 20  # weights packed by one task


@dataclass(frozen=True, slots=True)
class Packed:
    """The weights of a program by name: matrices, and float32 vectors (with a first axis of experts).

    Tables that are read in place are among the vectors, as the mapped checkpoint has them.
    """

    matrices: Mapping[str, _core.Matrix]
    vectors: Mapping[str, Array]
    from_cache: bool


def load_packed(
    plan: WeightPlan,
    *,
    isa: str,
    nodes: _core.Nodes,
    progress: Progress | None = None,
    cache: PackedCache | None = None,
    model: str = "",
) -> Packed:
    """Pack every weight of a plan at its place in the layout.

    `progress` is called with bytes read of the checkpoint or of the packed cache, where the model is `model`.
    The result does not depend on `isa`, whose kernels are used, nor on the `nodes`, whose threads pack and
    near whose threads memory is placed, unless it is that of a file.
    """
    tensors, layout, quantization = plan.need_tensors(), plan.layout, plan.quantization
    new = partial(_placed, plan, nodes)
    with ThreadPoolExecutor(nodes.num_threads, thread_name_prefix="quire-load") as pool:
        packer = _Packer(tensors, isa, pool, progress)
        if cache is None or not cache.holds(layout.nbytes) or not (converts(plan) or cache.shared):
            return _named(plan, packer.to_memory(layout, plan.specs, new), False)
        key = packing_key(plan)
        with cache.turn(key):
            if (kept := cache.read(key, layout.nbytes, pool.map, progress, new)) is not None:
                return _named(plan, kept, True)
            if (writer := cache.create(key, layout.nbytes)) is not None:
                try:
                    packer.to_file(layout, plan.specs, writer)
                    memory = writer.finish(model, quantization or "as stored", pool.map, new)
                    return _named(plan, memory, False)
                except OSError as error:
                    cache.give_up(error)
                finally:
                    writer.close()
        return _named(plan, packer.to_memory(layout, plan.specs, new), False)


def converts(plan: WeightPlan) -> bool:
    """True if packing does more than to move numbers, so that its result is worth a file."""
    return plan.quantization is not None or any(not stored.is_float for stored in plan.stored.values())


def packing_key(plan: WeightPlan) -> str:
    """Return a digest of everything that determines the packed form of a model."""
    found = hashlib.blake2b(plan.need_tensors().identity(), digest_size=20)
    packing = (_core.PACKING_VERSION, plan.layout.digest(), plan.quantization, _TRIES)
    found.update(repr(packing).encode())
    return found.hexdigest()


def _matrix(part: WeightPlace, buffer: Bytes) -> _core.Matrix:
    count, outputs, inputs = part.shape
    return _core.Matrix.mapped(part.format, count, outputs, inputs, buffer)


def _placed(plan: WeightPlan, nodes: _core.Nodes, nbytes: int) -> Bytes:
    """Return new memory for all weights, each page near the threads that will multiply most of it."""
    memory = allocate(nbytes)
    if nodes.count > 1:
        nodes.place(memory, list(_matrices_in(plan, memory).values()))
    return memory


def _matrices_in(plan: WeightPlan, memory: Bytes) -> dict[str, _core.Matrix]:
    """Return the matrices by name, at their places in memory."""
    matrices, experts = dict[str, _core.Matrix](), dict[str, list[_core.Matrix]]()
    for part in plan.layout.parts:
        if part.format in (VECTOR, IN_PLACE):
            continue
        if part.expert is None:
            matrices[part.name] = _matrix(part, part.of(memory))
        else:
            experts.setdefault(part.name, []).append(_matrix(part, part.of(memory)))
    return matrices | {name: _core.Matrix.joined(parts) for name, parts in experts.items()}


def _named(plan: WeightPlan, memory: Bytes, found: bool) -> Packed:
    vectors = dict[str, Array]()
    for part in plan.layout.parts:
        spec = plan.specs[part.name]
        if part.format == VECTOR:
            vectors[part.name] = part.of(memory).view(np.float32).reshape(spec.shape)
        elif part.format == IN_PLACE:
            vectors[part.name] = canonical(spec, plan.need_tensors().pull(spec.sources[0])).floats()
    return Packed(_matrices_in(plan, memory), vectors, found)


def _sources(part: WeightPlace, spec: WeightSpec) -> tuple[str, ...]:
    return spec.sources if part.expert is None else (spec.sources[part.expert],)


class _Packer:
    """Pulls the weights of a checkpoint, one at a time, and packs each with all threads."""

    def __init__(
        self, tensors: Tensors, isa: str, pool: ThreadPoolExecutor, progress: Progress | None
    ) -> None:
        self._tensors = tensors
        self._isa = isa
        self._pool = pool
        self._progress = progress

    def to_memory(self, layout: Layout, specs: Mapping[str, WeightSpec], new: Allocate) -> Bytes:
        """Pack all weights into new memory of this process."""
        memory = new(layout.nbytes)
        for part in self._in_order(layout, specs):
            self._begin(part, specs[part.name], part.of(memory))()
        return memory

    def to_file(self, layout: Layout, specs: Mapping[str, WeightSpec], writer: PackedFileWriter) -> None:
        """Pack all weights into a file: while one is packed, the previous one is written."""
        most = max(part.nbytes for part in layout.parts)
        buffers, before = (allocate(most), allocate(most)), None
        for number, part in enumerate(self._in_order(layout, specs)):
            buffer = buffers[number % 2][: part.nbytes]
            buffer.fill(0)  # packing does not write the padding between the parts of a matrix
            end = self._begin(part, specs[part.name], buffer)
            try:
                if before is not None:
                    writer.put(*before)
            finally:
                end()
            before = buffer, part.offset
        if before is not None:
            writer.put(*before)

    def _in_order(self, layout: Layout, specs: Mapping[str, WeightSpec]) -> Iterator[WeightPlace]:
        """Yield each part; prefetch the tensors of the next, release its own, and report progress."""
        parts = [part for part in layout.parts if part.format != IN_PLACE]
        sources = [_sources(part, specs[part.name]) for part in parts]
        total = sum(self._tensors[source].nbytes for names in sources for source in names)
        done = 0
        for part, names, following in zip(parts, sources, [*sources[1:], ()], strict=True):
            for source in following:
                self._tensors.prefetch(source)
            yield part
            for source in names:
                self._tensors.release(source)
                done += self._tensors[source].nbytes
            if self._progress is not None:
                self._progress(done, total)

    def _begin(self, part: WeightPlace, spec: WeightSpec, buffer: Bytes) -> Callable[[], None]:
        """Start packing one weight; return a function that waits for the end.

        That raises ConfigError if the weight is to be quantized and has numbers that are not finite.
        """
        pulled_parts = [pull_source(spec, source, self._tensors) for source in _sources(part, spec)]
        weights = [canonical(spec, weight) for weight in pulled_parts]
        if part.format.startswith("coded"):
            matrices = [matrix for weight in weights for matrix in _coded(weight)]
            return self._submit_codes(_matrix(part, buffer), matrices)
        arrays = [weight.floats() for weight in weights]
        if part.format == VECTOR:
            numbers = buffer.view(np.float32).reshape(len(arrays), -1)
            for row, array in zip(numbers, arrays, strict=True):
                row[...] = to_float32(array).reshape(-1)
            return lambda: None
        tasks = self._submit(_matrix(part, buffer), _matrices(arrays))

        def end() -> None:
            finite = [task.result() for task in tasks]
            if not all(finite):
                quantize(spec, arrays[0] if len(arrays) == 1 else arrays, part.format)  # names the tensor
                raise RuntimeError(f"{spec.name}: NumPy rounds what the native core refuses to")

        return end

    def _submit_codes(self, matrix: _core.Matrix, weights: Sequence[Coded]) -> Callable[[], None]:
        """Start packing codes as they are; return a function that waits for the end."""
        tasks = list[Future[bool]]()
        for index, weight in enumerate(weights):
            pack = packing_of(matrix, index, weight)
            tasks += [self._pool.submit(pack, first, last) for first, last in _cuts(matrix)]

        def end() -> None:
            for task in tasks:
                task.result()

        return end

    def _submit(self, matrix: _core.Matrix, sources: Sequence[Array]) -> list[Future[bool]]:
        tries, tasks = _TRIES.get(matrix.format, []), []
        for index, source in enumerate(sources):
            kind = DTYPE_NAMES[source.dtype]
            bits: Any = source if kind == "f32" else source.view(np.uint16)
            for first, last in _cuts(matrix):
                pack = partial(_core.pack, matrix, index, bits, kind, tries, self._isa, first, last)
                tasks.append(self._pool.submit(pack))
        return tasks


def _cuts(matrix: _core.Matrix) -> Iterator[tuple[int, int]]:
    """Yield the first and last panel of each task."""
    _, outputs, inputs = matrix.shape
    panels = -(-outputs // _core.PANEL)
    step = max(1, _TASK // (_core.PANEL * inputs))
    for first in range(0, panels, step):
        yield first, min(first + step, panels)


def _coded(weight: StoredWeight) -> Iterator[Coded]:
    """Yield the matrices [out, in] of a weight."""
    if not isinstance(weight, Coded):
        raise TypeError(f"{weight.storage} was planned as coded")
    if len(weight.shape) == 2:
        yield weight
    else:
        yield from (weight[expert] for expert in range(weight.shape[0]))


def _matrices(arrays: Sequence[Array]) -> Sequence[Array]:
    """Return the sources of one weight as matrices [out, in], one per expert."""
    if len(arrays) == 1 and arrays[0].ndim == 3:
        return list(arrays[0])
    return arrays
