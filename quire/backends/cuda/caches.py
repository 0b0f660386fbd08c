"""The KV caches of a program in the memory of an accelerator, and the contents of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, DeviceArray, Memory
from quire.backends.cuda.states import LayerState, Restores, require_states, state_groups
from quire.backends.kv_cache import KV_DTYPES, KV_ITEM_BYTES, KV_SCALE_BYTES
from quire.errors import ConfigError
from quire.program.cache_arrays import Paged
from quire.program.caches import (
    CacheSpec,
    PagedIndex,
    PagedInputs,
    PagedKV,
    PagedLatent,
    PagedVectors,
    SlotState,
)
from quire.program.program import Program


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys [blocks, block_size, heads, key_dim] and values [..., value_dim] of a layer.

    Of int8 each vector has a float32 scale, [blocks, block_size, heads]; other formats have no scales.
    """

    keys: DeviceArray
    values: DeviceArray
    key_scales: DeviceArray | None = None
    value_scales: DeviceArray | None = None

    @property
    def arrays(self) -> tuple[DeviceArray, ...]:
        found = (self.keys, self.values, self.key_scales, self.value_scales)
        return tuple(array for array in found if array is not None)


def token_bytes(spec: CacheSpec, kv_dtype: str) -> int:
    """Return the bytes of a token in one layer. Raises ConfigError for a cache that has no kernels."""
    if isinstance(spec, SlotState):
        return require_states(spec).token_bytes(0)
    return spec.token_bytes(KV_ITEM_BYTES[kv_dtype], KV_SCALE_BYTES.get(kv_dtype, 0))


class DeviceCaches:
    """The cache of each layer, and the contents of blocks of each group: those of its layers in order.

    Each has one block more than `num_blocks`, its last, for rows that are no request's. Groups of states have
    snapshots instead.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        program: Program,
        num_blocks: Sequence[int],
        block_size: int,
        kv_dtype: str,
        num_slots: int = 0,
        num_snapshots: int = 0,
    ) -> None:
        self._accelerator = accelerator
        with_spare = [number + 1 for number in num_blocks]
        sizes = (with_spare, block_size, kv_dtype, num_slots, num_snapshots)
        self.layers = layer_caches(accelerator, program, *sizes)
        self._groups: list[list[DeviceArray]] = [[] for _ in num_blocks]
        states = {}
        for cache, group in zip(self.layers, program.layer_groups, strict=True):
            if isinstance(cache, LayerState):
                states[group] = cache.group
                self._groups[group] = list(cache.group.snapshots)
            else:
                self._groups[group] += cache.arrays
        self.restores = Restores(accelerator, states)

    def block_bytes(self, group: int) -> int:
        """Return the bytes of a block's contents: those of all ranks, one after the other."""
        return self._accelerator.num_ranks * sum(array.rows(0, 1).num_bytes for array in self._groups[group])

    def read(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """Return the contents of these blocks."""
        arrays = self._groups[group]
        begun = [
            [
                rank.fetch(self._accelerator.on(number, array.rows(block, 1)))
                for number, rank in enumerate(self._accelerator.ranks)
                for array in arrays
            ]
            for block in block_ids
        ]
        return [b"".join(fetch.result().tobytes() for fetch in block) for block in begun]

    def write(self, group: int, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]) -> None:
        """Replace the contents of these blocks. Raises ValueError for one of another size."""
        num_bytes = self.block_bytes(group)
        for block, content in zip(block_ids, contents, strict=True):
            if len(content) != num_bytes:
                raise ValueError(f"a block of group {group} has {num_bytes} bytes, not {len(content)}")
            first = 0
            for number, rank in enumerate(self._accelerator.ranks):
                for array in self._groups[group]:
                    place = self._accelerator.on(number, array.rows(block, 1))
                    values = np.frombuffer(content, np.uint8, place.num_bytes, first).view(place.dtype)
                    rank.write(place, values)
                    first += place.num_bytes


def layer_caches(
    memory: Memory,
    program: Program,
    num_blocks: Sequence[int],
    block_size: int,
    kv_dtype: str,
    num_slots: int,
    num_snapshots: int,
) -> list[LayerCache | LayerState]:
    """Allocate the cache of each layer, with as many blocks as its group has, or slots and snapshots."""
    states, found = state_groups(memory, program, num_slots, num_snapshots), list[LayerCache | LayerState]()
    for layer, (spec, group) in enumerate(zip(program.caches, program.layer_groups, strict=True)):
        if isinstance(spec, SlotState):
            found.append(LayerState(states[group], program.layer_groups[:layer].count(group)))
        else:
            found.append(_allocate(memory, spec, num_blocks[group], block_size, kv_dtype))
    return found


def _allocate(memory: Memory, spec: Paged, num_blocks: int, block_size: int, kv_dtype: str) -> LayerCache:
    """Allocate the cache of a layer. Raises ConfigError for one that has no kernels."""
    if isinstance(spec, PagedVectors | PagedInputs):
        raise ConfigError(f"the cuda backend has no kernels for {type(spec).__name__}")
    if isinstance(spec, PagedIndex):  # the key of one head without a value
        spec = PagedKV(1, spec.dim, 0)
    if isinstance(spec, PagedLatent):  # as the value of one head, and its rotated part as the key
        spec = PagedKV(1, spec.rope_dim, spec.rank)
    places = (num_blocks, block_size, spec.num_heads)
    dtype = np.dtype(np.int8) if kv_dtype == "int8" else KV_DTYPES[kv_dtype]
    keys, values = (_array(memory, (*places, dim), dtype) for dim in (spec.key_dim, spec.value_dim))
    if kv_dtype != "int8":
        return LayerCache(keys, values)
    scales = [_array(memory, places, np.dtype(np.float32)) for _ in range(2)]
    return LayerCache(keys, values, *scales)


def _array(memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
    num_bytes = prod(shape) * dtype.itemsize
    return memory.allocate(max(num_bytes, 1)).part(0, shape, dtype)
