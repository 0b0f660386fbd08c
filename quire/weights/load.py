"""Loading: the weights a program names, pulled from a checkpoint, all of them or none.

Everything is checked on names and shapes before the first byte of data is touched. Unquantized weights
stay views of the mapped file wherever they are stored as the program wants them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from quire.program.program import WeightSpec
from quire.quantize.kinds import DTYPES, Array, Dense, Int4, Int8, to_float32
from quire.quantize.round_to_nearest import Mapper, quantize
from quire.weights.plan import HEAD, WeightPlan, outputs_axis, stored_kind
from quire.weights.safetensors import Checkpoint

Progress = Callable[[int, int], None]  # (bytes of the checkpoint done, in all)

_ROWS = 1024  # compared at a time


def load(
    plan: WeightPlan, progress: Progress | None = None, num_threads: int | None = None
) -> dict[str, Dense | Int8 | Int4]:
    """Load every weight of a plan, in canonical shape and as it is to be stored.

    The result does not depend on `num_threads` (default: one per processor, at most 16).
    """
    checkpoint = plan.need_checkpoint()
    threads = num_threads or min(os.cpu_count() or 1, 16)
    total = sum(checkpoint[source].nbytes for spec in plan.specs.values() for source in spec.sources)
    done, weights = 0, {}
    with ThreadPoolExecutor(threads, thread_name_prefix="quire-load") as pool:
        for name, spec in plan.specs.items():
            weights[name] = _pull(spec, plan, checkpoint, pool.map)
            done += sum(checkpoint[source].nbytes for source in spec.sources)
            if progress is not None:
                progress(done, total)
    return weights


def has_own_head(checkpoint: Checkpoint, tied: str) -> bool:
    """Return True if lm_head.weight is there and differs from `tied`, which config.json puts in its place.

    Both are read as far as they are equal.
    """
    if HEAD not in checkpoint or tied not in checkpoint:
        return False
    head, table = checkpoint.read(HEAD), checkpoint.read(tied)
    if head.shape != table.shape:
        return True
    parts = range(0, len(head), _ROWS)
    return any(
        not np.array_equal(to_float32(head[i : i + _ROWS]), to_float32(table[i : i + _ROWS])) for i in parts
    )


def canonical(spec: WeightSpec, array: Array) -> Array:
    """A view of one source with axes and outputs as the program wants them."""
    axis = outputs_axis(spec, array.shape)
    if spec.transposed:
        array = array.swapaxes(-1, -2)
    if spec.interleaved is None:
        return array
    outputs = slice(spec.interleaved[0], None, spec.interleaved[1])
    return array[..., outputs] if axis == -1 else array[..., outputs, :]


def _pull(spec: WeightSpec, plan: WeightPlan, checkpoint: Checkpoint, mapper: Mapper) -> Dense | Int8 | Int4:
    arrays = [canonical(spec, checkpoint.read(source)) for source in spec.sources]
    kind = stored_kind(spec, checkpoint)
    if plan.storage[spec.name].kind not in DTYPES:
        return quantize(spec, arrays[0] if len(arrays) == 1 else arrays, str(plan.quantization), mapper)
    if len(arrays) == 1:
        return Dense(np.ascontiguousarray(arrays[0]))
    stack = np.empty(spec.shape, DTYPES[kind])
    for i, array in enumerate(arrays):
        stack[i] = array if array.dtype == stack.dtype else to_float32(array)
    return Dense(stack)
