"""One heap for all threads, and what nothing uses of it goes back to the system now and then.

Heaps of the C library break up under requests of all sizes: without this a process would come to hold twice
of what it uses.
"""

from __future__ import annotations

import ctypes
import gc
import itertools

PERIOD_S = 5.0
COLLECTED_EVERY = 12  # periods: beside a soak that takes some 5 ms, giving back less than one
_M_ARENA_MAX = -8  # of malloc.h
_calls = itertools.count()
_libc = ctypes.CDLL(None)
_mallopt = getattr(_libc, "mallopt", None)  # these are glibc's; others give back by themselves
_malloc_trim = getattr(_libc, "malloc_trim", None)


def share() -> None:
    """Let threads that start from now on use the first one's heap: each of their own would have holes."""
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Give back whole pages that are free; now and then collect first what waits for the collector.

    There is little of that, as what was loaded is frozen and requests end without cycles: what TLS and broken
    HTTP leave.
    """
    if next(_calls) % COLLECTED_EVERY == 0:
        gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)
