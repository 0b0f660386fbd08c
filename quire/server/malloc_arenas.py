"""glibc's malloc arenas: one for all threads, with free pages returned to the system regularly.

Arenas fragment under requests of many sizes: without this a process would grow to twice the memory it uses.
"""

from __future__ import annotations

import ctypes
import gc
import itertools

PERIOD_S = 5.0
COLLECTED_EVERY = 12  # periods; under load a collection takes about 5 ms, and trimming less than 1
_M_ARENA_MAX = -8  # of malloc.h
_calls = itertools.count()
_libc = ctypes.CDLL(None)
_mallopt = getattr(_libc, "mallopt", None)  # glibc's; other libraries return memory by themselves
_malloc_trim = getattr(_libc, "malloc_trim", None)


def share() -> None:
    """Make threads started from now on share the main arena: each arena of its own would fragment."""
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Return free pages to the system, sometimes after a garbage collection.

    There is little garbage: loaded objects are frozen, and the cycles are those of ended connections, 1.1 KB
    each (asyncio's transports), of TLS and of malformed HTTP.
    """
    if next(_calls) % COLLECTED_EVERY == 0:
        gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)
