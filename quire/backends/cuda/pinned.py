"""Pinned memory of the host for copies to and from a GPU, which is kept for later copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LEAST_BYTES = 1 << 16  # that are allocated


class PinnedBuffers:
    """Buffers from `allocate`, a function of bytes; one is taken again when the last copy of it has ended.

    Their sizes are powers of two: else copies that grow little by little would each leave one behind that is
    too small for the next.
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self.allocate = allocate
        self._busy: list[tuple[Any, Any]] = []  # buffers, and the events of their last copies
        self._free: list[Any] = []

    def take(self, num_bytes: int) -> Any:
        """Return the smallest free buffer that has so many bytes, or a new one."""
        ended = [event.is_done for _, event in self._busy]
        self._free += [buffer for (buffer, _), done in zip(self._busy, ended, strict=True) if done]
        self._busy = [pair for pair, done in zip(self._busy, ended, strict=True) if not done]
        enough = [buffer for buffer in self._free if buffer.size >= num_bytes]
        if not enough:
            return self.allocate(1 << (max(num_bytes, LEAST_BYTES) - 1).bit_length())
        best = min(enough, key=lambda buffer: buffer.size)
        self._free.remove(best)
        return best

    def give_back(self, buffer: Any, last: Any) -> None:
        """Let a buffer be taken again when the event `last` has come."""
        self._busy.append((buffer, last))
