"""The ring: the latest epochs of a journal, bounded in bytes and age."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from quire.recording.chunks import ChunkKind, JournalLimits

EPOCHS = 4  # that fit in the ring at least: when a new one begins, at most a quarter of the past is dropped


@dataclass(slots=True)
class _Epoch:
    """An epoch: its chunks, and when the first one came."""

    began_s: float
    chunks: list[bytes] = field(default_factory=list)
    num_bytes: int = 0


class Ring:
    """Keeps whole epochs, the latest ones: at most `max_bytes`, none begun more than `max_age_s` ago.

    Times are those of the caller's clock. An epoch that alone exceeds the limits is dropped, and what follows
    is kept from the next one on.
    """

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        self.header: bytes | None = None
        self._epochs: deque[_Epoch] = deque()
        self._num_bytes = 0
        self._lost = True  # the beginning of the current epoch

    def limits(self, contents: bool) -> JournalLimits:
        """Return the limits of the journal whose epochs are kept here."""
        return JournalLimits(self.max_bytes // EPOCHS, self.max_age_s / EPOCHS, contents)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def clear(self) -> None:
        """Forget everything: another engine begins a journal."""
        self.header, self._lost = None, True
        self._epochs.clear()
        self._num_bytes = 0

    def take(self, chunk: bytes, kind: ChunkKind, now: float) -> None:
        """Keep a chunk of the journal."""
        if kind == "header":
            self.clear()
            self.header = chunk
            return
        if kind == "epoch":
            self._epochs.append(_Epoch(now))
            self._lost = False
        if self._lost:
            return
        current = self._epochs[-1]
        current.chunks.append(chunk)
        current.num_bytes += len(chunk)
        self._num_bytes += len(chunk)
        self.expire(now)

    def expire(self, now: float) -> None:
        """Drop the epochs that are too old or too many."""
        while self._epochs and (
            self._num_bytes > self.max_bytes or now - self._epochs[0].began_s > self.max_age_s
        ):
            self._num_bytes -= self._epochs.popleft().num_bytes
            self._lost = not self._epochs

    def chunks(self, now: float, last_s: float | None = None) -> list[bytes]:
        """Return the chunks of all epochs kept, or only those that the last `last_s` seconds need."""
        self.expire(now)
        epochs = list(self._epochs)
        while last_s is not None and len(epochs) > 1 and epochs[1].began_s < now - last_s:
            del epochs[0]
        return [chunk for epoch in epochs for chunk in epoch.chunks]
