"""The KV caches of a program in the memory of an accelerator, and the contents of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, DeviceArray, Memory
from quire.backends.kv_cache import KV_DTYPES, KV_ITEM_BYTES, KV_SCALE_BYTES
from quire.errors import ConfigError
from quire.program.caches import CacheSpec, PagedKV
from quire.program.program import Program

_KINDS = {"PagedLatent": "latent attention (MLA)", "SlotState": "recurrent states and short convolutions"}


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


def paged(spec: CacheSpec) -> PagedKV:
    """Return the spec of a cache. Raises ConfigError for one that has no kernels."""
    if not isinstance(spec, PagedKV):
        kind = _KINDS[type(spec).__name__]
        raise ConfigError(f"the cuda backend has no kernels for {kind}", "use device='native'")
    return spec


def token_bytes(spec: CacheSpec, kv_dtype: str) -> int:
    """Return the bytes of a token in one layer. Raises ConfigError for a cache that has no kernels."""
    return paged(spec).token_bytes(KV_ITEM_BYTES[kv_dtype], KV_SCALE_BYTES.get(kv_dtype, 0))


class DeviceCaches:
    """The cache of each layer, and the contents of blocks of each group: those of its layers in order.

    Each has one block more than `num_blocks`, its last, for rows that are no request's.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        program: Program,
        num_blocks: Sequence[int],
        block_size: int,
        kv_dtype: str,
    ) -> None:
        self._accelerator = accelerator
        with_spare = [number + 1 for number in num_blocks]
        self.layers = layer_caches(accelerator, program, with_spare, block_size, kv_dtype)
        self._groups: list[list[DeviceArray]] = [[] for _ in num_blocks]
        for cache, group in zip(self.layers, program.layer_groups, strict=True):
            self._groups[group] += cache.arrays

    def block_bytes(self, group: int) -> int:
        return sum(array.rows(0, 1).num_bytes for array in self._groups[group])

    def read(self, group: int, block_ids: Sequence[int]) -> list[bytes]:
        """Return the contents of these blocks."""
        arrays = self._groups[group]
        begun = [[self._accelerator.fetch(array.rows(block, 1)) for array in arrays] for block in block_ids]
        return [b"".join(fetch.result().tobytes() for fetch in block) for block in begun]

    def write(self, group: int, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]) -> None:
        """Replace the contents of these blocks. Raises ValueError for one of another size."""
        num_bytes = self.block_bytes(group)
        for block, content in zip(block_ids, contents, strict=True):
            if len(content) != num_bytes:
                raise ValueError(f"a block of group {group} has {num_bytes} bytes, not {len(content)}")
            first = 0
            for array in self._groups[group]:
                place = array.rows(block, 1)
                values = np.frombuffer(content, np.uint8, place.num_bytes, first).view(place.dtype)
                self._accelerator.write(place, values)
                first += place.num_bytes


def layer_caches(
    memory: Memory, program: Program, num_blocks: Sequence[int], block_size: int, kv_dtype: str
) -> list[LayerCache]:
    """Allocate the cache of each layer, with as many blocks as its group has."""
    layers = zip(program.caches, program.layer_groups, strict=True)
    return [_allocate(memory, paged(spec), num_blocks[group], block_size, kv_dtype) for spec, group in layers]


def _allocate(memory: Memory, spec: PagedKV, num_blocks: int, block_size: int, kv_dtype: str) -> LayerCache:
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
