"""The arrays of caches in blocks, for references of ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.program.caches import PagedIndex, PagedInputs, PagedKV, PagedLatent, PagedVectors

Paged = PagedKV | PagedLatent | PagedIndex | PagedVectors | PagedInputs


def paged_arrays(spec: Paged, num_blocks: int, block_size: int, dtype: np.dtype[Any]) -> Any:
    """Return the arrays of one layer's cache (quire.program.program.Run)."""
    if isinstance(spec, PagedKV):
        shapes = [(num_blocks, block_size, spec.num_heads, dim) for dim in (spec.key_dim, spec.value_dim)]
        return tuple(np.zeros(shape, dtype) for shape in shapes)
    if isinstance(spec, PagedInputs):
        return np.zeros((num_blocks, block_size, spec.width), np.float32)
    size = spec.entries(block_size) if isinstance(spec, PagedVectors) else block_size
    return np.zeros((num_blocks, size, spec.dim), dtype)
