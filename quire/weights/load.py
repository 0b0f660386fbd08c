"""Loading: the weights a program names, pulled from a checkpoint, all of them or none.

Names and shapes are checked before any data is read. Unquantized weights remain views of the mapped file if
they are stored in the form the program needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from quire.errors import ConfigError, shortened
from quire.program.program import WeightSpec
from quire.quantize.kinds import DTYPES, Dense, StoredWeight
from quire.quantize.mixed import Mixed, MixedStorage
from quire.quantize.round_to_nearest import Mapper, quantize
from quire.weights.plan import HEAD, WeightPlan, as_stored, outputs_axis
from quire.weights.tensors import Tensors

Progress = Callable[[int, int], None]  # (bytes of the checkpoint done, total)

_ROWS = 1024  # compared at a time


def load(
    plan: WeightPlan, progress: Progress | None = None, num_threads: int | None = None
) -> dict[str, StoredWeight]:
    """Load every weight of a plan, in canonical shape and in its planned storage kind.

    The result does not depend on `num_threads` (default: one per processor, at most 16).
    """
    tensors = plan.need_tensors()
    threads = num_threads or min(os.cpu_count() or 1, 16)
    total = sum(tensors[source].nbytes for spec in plan.specs.values() for source in spec.sources)
    done, weights = 0, dict[str, StoredWeight]()
    with ThreadPoolExecutor(threads, thread_name_prefix="quire-load") as pool:
        for name, spec in plan.specs.items():
            weights[name] = _pull(spec, plan, tensors, pool.map)
            done += sum(tensors[source].nbytes for source in spec.sources)
            if progress is not None:
                progress(done, total)
    return weights


def has_own_head(tensors: Tensors, tied: str) -> bool:
    """Return True if lm_head.weight exists and differs from `tied`, the tensor config.json ties it to.

    Both are read up to the first difference.
    """
    if HEAD not in tensors or tied not in tensors:
        return False
    head, table = tensors.pull(HEAD), tensors.pull(tied)
    if head.shape != table.shape:
        return True
    parts = (np.arange(i, min(i + _ROWS, head.shape[0])) for i in range(0, head.shape[0], _ROWS))
    return any(not np.array_equal(head.rows(ids), table.rows(ids)) for ids in parts)


def pull_source(spec: WeightSpec, source: str, tensors: Tensors) -> StoredWeight:
    """Return the data of one source of a weight. Raises ConfigError for integers that are out of range."""
    if not spec.below:
        return tensors.pull(source)
    numbers = tensors.integers(source)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < spec.below:
        problem = f"has numbers that are not from 0 to {spec.below - 1}"
        raise ConfigError(f"{tensors.where}: tensor {shortened(tensors.name_in_files(source))} {problem}")
    return Dense(numbers.astype(np.float32))


def canonical(spec: WeightSpec, weight: StoredWeight) -> StoredWeight:
    """Return a view of one source with the axes and outputs that the program needs."""
    spec = as_stored(spec, weight)
    axis = outputs_axis(spec, weight.shape)
    if spec.stored or spec.turns > 1:
        alternating = weight.floats().reshape(spec.shape[0], -1, spec.turns)
        return Dense(alternating.swapaxes(1, 2).reshape(spec.shape))
    if spec.transposed:
        weight = weight.transposed()
    if spec.rows is not None:
        axis = -2 if axis is None else axis
        weight = weight.outputs(spec.rows.of(weight.shape[axis]), axis)
    if spec.by_head == "outputs":
        return weight.split(spec.shape[0])
    if spec.by_head == "inputs":
        floats = weight.split(spec.shape[0])
        if not floats.storage.is_float:  # groups are along the inputs: others need other scales
            floats = Dense(floats.dense().astype(DTYPES["bf16"]))
        return floats.transposed()
    return weight


def _pull(spec: WeightSpec, plan: WeightPlan, tensors: Tensors, mapper: Mapper) -> StoredWeight:
    parts = [canonical(spec, pull_source(spec, source, tensors)) for source in spec.sources]
    if not plan.storage[spec.name].is_float and plan.storage[spec.name] != plan.stored[spec.name]:
        arrays = [part.floats() for part in parts]
        return quantize(spec, arrays[0] if len(arrays) == 1 else arrays, str(plan.quantization), mapper)
    if isinstance(plan.storage[spec.name], MixedStorage):
        return Mixed(tuple(type(part).stack([part]) for part in parts))
    if len({part.storage for part in parts}) == 1:
        return type(parts[0]).stack(parts)
    return Dense.stack([Dense(part.floats()) for part in parts])  # planned as float32
