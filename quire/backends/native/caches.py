"""The caches of the native backend: the cache specs it supports, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from quire.backends.native import _core
from quire.errors import ConfigError
from quire.program.caches import CacheSpec, PagedKV, SlotState
from quire.program.ops.state import CHUNK
from quire.program.program import Program


@dataclass(frozen=True, slots=True)
class NativeCaches:
    """Caches by layer: the cache shared by its group, and the layer's index in it."""

    paged: dict[int, tuple[_core.KVCache, int]]
    states: dict[int, tuple[_core.StateCache, int]]


def refuse(spec: CacheSpec) -> None:
    """Raise ConfigError for a cache spec without native kernels."""
    if isinstance(spec, SlotState) or (isinstance(spec, PagedKV) and spec.key_dim == spec.value_dim):
        return
    if isinstance(spec, PagedKV):
        what = f"keys of {spec.key_dim} numbers beside values of {spec.value_dim}"
    else:
        what = f"a cache of latent vectors (MLA), here of {spec.dim} numbers"
    problem = f"the native backend has no attention over {what}"
    raise ConfigError(problem, "use device='reference'")


def allocate(
    program: Program,
    *,
    kv_dtype: str,
    num_blocks: Sequence[int],
    block_size: int,
    num_slots: int,
    num_snapshots: int,
) -> NativeCaches:
    """Allocate one cache per group. Raises ConfigError for a spec without native kernels."""
    layers, caches = program.layer_groups, NativeCaches({}, {})
    for group, (spec, blocks) in enumerate(zip(program.cache_groups, num_blocks, strict=True)):
        refuse(spec)
        members = [layer for layer, of in enumerate(layers) if of == group]
        if isinstance(spec, SlotState):
            numbers = (prod(spec.shape), spec.inputs, spec.reach, spec.history, CHUNK)
            states = _core.StateCache(group, spec.dtype, len(members), num_slots, num_snapshots, *numbers)
            caches.states.update((layer, (states, i)) for i, layer in enumerate(members))
        elif isinstance(spec, PagedKV):
            size = (blocks, block_size, spec.num_heads, spec.key_dim)
            paged = _core.KVCache(group, kv_dtype, len(members), *size)
            caches.paged.update((layer, (paged, i)) for i, layer in enumerate(members))
    return caches
