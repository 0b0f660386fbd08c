"""Memory that nothing uses goes back to the system now and then.

Heaps of the C library break up under requests of all sizes, and each connection ends as a cycle of asyncio's
objects: without this a process would come to hold twice of what it uses.
"""

from __future__ import annotations

import ctypes
import gc

PERIOD_S = 15.0  # of busy traffic: some 10 MB, and a pause of some milliseconds
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give back by themselves


def trim() -> None:
    """Collect what waits for the collector, then give back whole pages that are free: some milliseconds."""
    gc.collect()  # what was loaded is frozen, so it looks at open requests alone
    if _malloc_trim is not None:
        _malloc_trim(0)
