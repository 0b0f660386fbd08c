"""What the C library keeps of freed memory goes back to the system now and then.

Its heaps break up under requests of all sizes: without this a process comes to hold twice of what it uses.
"""

from __future__ import annotations

import ctypes

PERIOD_S = 60.0
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give back by themselves


def trim() -> None:
    """Give back all whole pages that are free: about a millisecond, during which Python runs on."""
    if _malloc_trim is not None:
        _malloc_trim(0)
