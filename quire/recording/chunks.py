"""Chunks of a journal, as they pass from the engine's process to the server's."""

from __future__ import annotations

from typing import Literal, NamedTuple

ChunkKind = Literal["header", "epoch", "more"]


class JournalLimits(NamedTuple):
    """Limits of an epoch, after which the next one begins; `contents`: whether they are recorded."""

    epoch_bytes: int
    epoch_s: float
    contents: bool = False
