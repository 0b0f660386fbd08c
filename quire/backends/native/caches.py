"""The caches of the native backend: the cache specs it supports, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from quire.backends.block_memory import BlockMemory
from quire.backends.native import _core
from quire.program.cache_arrays import Paged
from quire.program.caches import PagedIndex, PagedInputs, PagedKV, PagedVectors, SlotState
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
            format, size = _shape(spec, kv_dtype, block_size)
            paged = _core.KVCache(group, format, len(members), blocks, *size)
            paged.spread(nodes)
            arrays.append(paged.blocks(blocks))
            found_paged.update((layer, (paged, i)) for i, layer in enumerate(members))
    return NativeCaches(found_paged, found_states, BlockMemory(arrays))


def _shape(spec: Paged, kv_dtype: str, block_size: int) -> tuple[str, tuple[int, ...]]:
    """Return the format of a cache in blocks, and what follows the number of its blocks (_core.KVCache)."""
    if isinstance(spec, PagedKV):
        return kv_dtype, (block_size, spec.num_heads, spec.key_dim, spec.value_dim)
    if isinstance(spec, PagedIndex):
        return kv_dtype, (block_size, 1, spec.dim, 0)
    if isinstance(spec, PagedInputs):
        return "float32", (block_size, 0, spec.width, spec.width // 2)
    if isinstance(spec, PagedVectors):
        apart = max(1, spec.every // block_size)
        return kv_dtype, (spec.entries(block_size), 0, spec.dim, spec.dim, spec.every, apart)
    return kv_dtype, (block_size, 0, spec.dim, spec.rank)
