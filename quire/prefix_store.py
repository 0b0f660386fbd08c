"""The store of cache blocks that a configuration asks for, and what identifies its contents."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from quire.block_store import BlockStore
from quire.build_digest import build_digest
from quire.config import EngineConfig
from quire.environment import user_path
from quire.memory import gigabytes
from quire.transfer.disk_store import DiskStore
from quire.transfer.memory_store import MemoryStore
from quire.transfer.segment_folder import SegmentFolder

if TYPE_CHECKING:
    from quire.description import Description


def open_store(description: Description, layout: str) -> BlockStore | None:
    """Return the store of `prefix_cache_dir` and `prefix_cache_memory_bytes`; None without either.

    `layout` is that of blocks, as the backend describes it. Raises ConfigError for a folder that cannot be
    used.
    """
    config = description.config
    disk = None
    if config.prefix_cache_dir is not None:
        folder = SegmentFolder(user_path(config.prefix_cache_dir), config.prefix_cache_bytes)
        disk = DiskStore(folder, content_fingerprint(description, layout))
    if config.prefix_cache_memory_bytes is not None:
        return MemoryStore(config.prefix_cache_memory_bytes, disk)
    return disk


def content_fingerprint(description: Description, layout: str) -> bytes:
    """Identify everything that determines the content of a block, beside its tokens and their salt.

    The files of the checkpoint count by their paths, sizes, modification times and headers; the build by its
    source and native library, the machine by its instruction set.
    """
    found = hashlib.sha256()
    for part in (
        build_digest(),
        description.fingerprint,
        json.dumps(description.source.config(), sort_keys=True),
        description.weights.need_tensors().identity().hex(),
        layout,
    ):
        found.update(hashlib.sha256(part.encode()).digest())
    return found.digest()


def store_summary(config: EngineConfig) -> dict[str, str]:
    """Return what is kept beyond the KV cache, for the list of what was chosen."""
    parts = []
    if config.prefix_cache_memory_bytes is not None:
        parts.append(f"{gigabytes(config.prefix_cache_memory_bytes)} of memory")
    if config.prefix_cache_dir is not None:
        parts.append(f"{gigabytes(config.prefix_cache_bytes)} in {config.prefix_cache_dir}")
    return {"prefix_cache": ", ".join(parts)} if parts else {}
