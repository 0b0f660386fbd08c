"""Uploads of weights through a ring of host buffers: threads fill them while earlier ones are copied."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from quire.backends.cuda.accelerator import DeviceArray, HostBuffer, Rank, Upload

BUFFER_BYTES = 16 << 20  # of each; a multiple of 256
NUM_BUFFERS = 8
_MOST_THREADS = 8


class UploadRing:
    """Copies arrays to an accelerator in pieces, in the order of `put`.

    It takes NUM_BUFFERS * BUFFER_BYTES of the memory of the host, pinned where that makes copies faster.
    Reading pages of mapped files happens in the threads that fill the buffers; only the caller's thread calls
    the accelerator. Leaving the context waits for everything.
    """

    def __init__(self, accelerator: Rank, num_threads: int | None = None) -> None:
        self._accelerator = accelerator
        self._threads = num_threads or min(os.cpu_count() or 1, _MOST_THREADS)
        self._free: deque[tuple[HostBuffer, Upload | None]] = deque()  # with the copy that read it last
        self._filling: deque[tuple[Future[Any], HostBuffer, DeviceArray]] = deque()
        self._num_buffers = 0

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="quire-upload")
        return self

    def __exit__(self, raised: type[BaseException] | None, *rest: object) -> None:
        try:
            if raised is None:
                self.flush()
            for _, last in self._free:
                if last is not None and raised is None:
                    last.wait()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def put(self, array: DeviceArray, values: np.ndarray) -> None:
        """Replace the numbers of an array by as many of its type, which do not change until the end."""
        contents = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        for first in range(0, len(contents), BUFFER_BYTES):
            piece = contents[first : first + BUFFER_BYTES]
            place = array.part(first, piece.shape, piece.dtype)
            buffer = self._take()
            filled = self._pool.submit(np.copyto, buffer.bytes[: len(piece)], piece)
            self._filling.append((filled, buffer, place))

    def fill(self, array: DeviceArray, make: Callable[[], np.ndarray]) -> None:
        """Replace the bytes of an array, which fit in a buffer, by those that `make` returns, in a thread."""
        buffer = self._take()

        def fill() -> None:
            made = np.ascontiguousarray(make()).reshape(-1).view(np.uint8)
            np.copyto(buffer.bytes[: array.num_bytes], made)

        self._filling.append((self._pool.submit(fill), buffer, array))

    def flush(self) -> None:
        """Begin all copies: launches after this call find what was put."""
        while self._filling:
            self._copy_next()

    def _take(self) -> HostBuffer:
        """Return a buffer that nothing reads or writes any more."""
        if self._num_buffers < NUM_BUFFERS:
            self._num_buffers += 1
            return self._accelerator.stage(BUFFER_BYTES)
        if not self._free:
            self._copy_next()
        buffer, last = self._free.popleft()
        if last is not None:
            last.wait()
        return buffer

    def _copy_next(self) -> None:
        """Begin to copy the buffer that was given to a thread first, when it is filled."""
        filled, buffer, place = self._filling.popleft()
        filled.result()
        self._free.append((buffer, self._accelerator.upload(buffer, place)))
