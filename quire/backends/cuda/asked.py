"""The launches of a program in steps of every kind, found without memory or weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quire.backends.backend import Capacity
from quire.backends.cuda.accelerator import Accelerator, DeviceArray, Launch, RankExchange
from quire.backends.cuda.caches import layer_caches
from quire.backends.cuda.kernels.variant import MOST_SMALL
from quire.backends.cuda.lower import lower, step_memory
from quire.backends.cuda.manifest import launch_key
from quire.backends.cuda.segments import LEAST, SEGMENT
from quire.backends.cuda.weights import weight_at
from quire.errors import ConfigError
from quire.program import ops
from quire.program.batch import Batch
from quire.program.program import Program
from quire.weights.plan import Layout

_MOST = 8192  # rows that have the largest tile of most matrices


class _Nowhere:
    """Memory of any size that keeps nothing."""

    num_ranks = 1

    def allocate(self, num_bytes: int) -> DeviceArray:
        return DeviceArray(None, np.dtype(np.uint8), (num_bytes,))

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        """Do nothing."""

    def addresses(self, array: DeviceArray) -> tuple[int, ...]:
        return (0,)


def launches_of(
    program: Program, layout: Layout, capacity: Capacity, halves: bool = False
) -> Iterator[Launch]:
    """Return the launches of steps of one token, with a short and a long context, and of many tokens.

    The last one has the largest of all tiles. `halves` as for `lower`.
    """
    nowhere = _Nowhere()
    memory = nowhere.allocate(max(layout.nbytes, 1))
    weights = {place.name: weight_at(place, memory) for place in layout.parts}
    few = [1] * len(program.cache_groups)
    sizes = (few, capacity.block_size, capacity.kv_dtype, 1, 1)
    caches = layer_caches(nowhere, program, *sizes)
    lowered = lower(program, weights, caches, capacity.block_size, nowhere, halves)
    steps = step_memory(lowered, nowhere)
    number = max((op.num_experts for op in program if isinstance(op, ops.Experts)), default=1)
    many = (MOST_SMALL + 1) * number
    most = max(many, _MOST)
    for context, count in ((1, 1), (LEAST * SEGMENT, 1), (many, many), (most, most)):
        step = steps.put(_row(program, context, count, capacity.block_size))
        for launch in (launch(step) for launch in lowered.launches):
            if not (isinstance(launch, RankExchange) or launch.is_empty):
                yield launch


def _row(program: Program, context: int, count: int, block_size: int) -> Batch:
    """Return a row of the last `count` tokens of a context, all of which need logits."""
    width = max((op.out.width for op in program if isinstance(op, ops.PreviousHidden)), default=0)
    numbers, one = np.arange(count), np.zeros(1, np.int64)
    table = np.zeros((1, -(-context // block_size)), np.int64)
    return Batch(
        token_ids=numbers * 0,
        positions=numbers + context - count,
        row_offsets=np.array([0, count]),
        block_tables=(table,) * len(program.cache_groups),
        context_lens=one + context,
        slots=one,
        variants=one,
        logit_rows=numbers,
        block_size=block_size,
        hidden=np.zeros((count, width), np.float32),
        windows=np.array([0, count]),
    )


def require_compiled(
    program: Program, layout: Layout, capacity: Capacity, accelerator: Accelerator, halves: bool = False
) -> None:
    """Raise ConfigError if a step of the program would ask for a kernel that was not compiled."""
    for launch in launches_of(program, layout, capacity, halves):
        if not accelerator.has_kernel(key := launch_key(launch)):
            problem = f"no kernel {key} was compiled for {accelerator.target}, and this model needs it"
            raise ConfigError(problem, "use device='native', or weights and a cache in bfloat16 or int8")
