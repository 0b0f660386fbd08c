"""The device of a recording: the same model with caches of the same sizes, or the reason there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import quire
from quire.build import Built, Progress, assemble
from quire.build_digest import build_digest
from quire.config import EngineConfig
from quire.description import describe
from quire.errors import ConfigError
from quire.recording.identity import checkpoint_digest
from quire.recording.incident import Header


def check_build(header: Header) -> None:
    """Raise ConfigError unless this is the build of Quire that wrote the recording."""
    if (header.quire, header.build) != (own := (quire.__version__, build_digest())):
        raise ConfigError(
            f"recorded by Quire {header.quire}, build {header.build}; this is {own[0]}, build {own[1]}",
            "plans and bits are equal only within one build: replay it with the one that recorded it",
        )


def rebuild(header: Header, changes: dict[str, Any] | None = None, progress: Progress | None = None) -> Built:
    """Load the model of a recording with contents. `changes` are fields of the EngineConfig to replace.

    Raises ConfigError, before the weights are loaded, for another checkpoint or instruction set.
    """
    alone = {"prefix_cache_dir": None, "prefix_cache_memory_bytes": None}  # nothing comes from elsewhere
    config: EngineConfig = replace(header.config, **(alone | (changes or {})))
    description = describe(config)
    if (own := checkpoint_digest(description)) != header.checkpoint:
        raise ConfigError(
            f"recorded with checkpoint {header.checkpoint}; {config.model} is {own}",
            "--model names a copy of the one that was recorded",
        )
    if description.fingerprint != header.arithmetic:
        raise ConfigError(
            f"recorded with {header.arithmetic}; this engine is {description.fingerprint}",
            "QUIRE_ISA selects an instruction set that this machine has",
        )
    groups = [shape.group() for shape in header.groups]
    snapshots = [shape.num_blocks for shape in header.groups if shape.every is not None]
    memory = replace(
        description.memory,
        blocks=tuple(0 if shape.every is not None else shape.num_blocks for shape in header.groups),
        num_snapshots=max(snapshots, default=0),
        max_model_len=header.arguments["max_model_len"],
    )
    built = assemble(replace(description, memory=memory), progress)
    if list(built.engine.scheduler.caches.groups) != groups:
        raise ConfigError("the cache groups of this model are not those of the recording")
    return built
