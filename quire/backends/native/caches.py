"""The caches of the native backend: the cache specs it supports, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from quire.backends.block_memory import BlockMemory
from quire.backends.native import _core
from quire.program.caches import PagedIndex, PagedKV, SlotState
from quire.program.ops.slot_states import CHUNK
from quire.program.program import Program


@dataclass(frozen=True, slots=True)
class NativeCaches:
    """Caches by layer: the cache shared by its group, and the layer's index in it.

    With `halves` attention within rows keeps keys and values in bfloat16, too.
    """

    paged: dict[int, tuple[_core.KVCache, int]]
    states: dict[int, tuple[_core.StateCache, int]]
    memory: BlockMemory
    halves: bool = False


def allocate(
    program: Program,
    *,
    kv_dtype: str,
    num_blocks: Sequence[int],
    block_size: int,
    num_slots: int,
    num_snapshots: int,
    nodes: _core.Nodes,
) -> NativeCaches:
    """Allocate one cache per group, spread over the nodes: any thread reads any block."""
    layers, arrays = program.layer_groups, list[list[np.ndarray]]()
    found_paged: dict[int, tuple[_core.KVCache, int]] = {}
    found_states: dict[int, tuple[_core.StateCache, int]] = {}
    for group, (spec, blocks) in enumerate(zip(program.cache_groups, num_blocks, strict=True)):
        members = [layer for layer, of in enumerate(layers) if of == group]
        if isinstance(spec, SlotState):
            numbers = (prod(spec.shape), spec.inputs, spec.reach, spec.history, CHUNK)
            states = _core.StateCache(group, spec.dtype, len(members), num_slots, num_snapshots, *numbers)
            states.spread(nodes)
            arrays.append([states.snapshots(num_snapshots)])
            found_states.update((layer, (states, i)) for i, layer in enumerate(members))
        else:
            if isinstance(spec, PagedKV):
                dims = (spec.num_heads, spec.key_dim, spec.value_dim)
            elif isinstance(spec, PagedIndex):
                dims = (1, spec.dim, 0)
            else:
                dims = (0, spec.dim, spec.rank)
            size = (blocks, block_size, *dims)
            paged = _core.KVCache(group, kv_dtype, len(members), *size)
            paged.spread(nodes)
            arrays.append(paged.blocks(blocks))
            found_paged.update((layer, (paged, i)) for i, layer in enumerate(members))
    return NativeCaches(found_paged, found_states, BlockMemory(arrays))
