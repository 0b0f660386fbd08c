"""The checksum of bytes that leave memory and come back: it detects damage, not manipulation."""

from __future__ import annotations

import numpy as np

from quire.backends.native import _core

CHECKSUM_BYTES = 8


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """Return the checksum of bytes, at the speed of memory: three times that of CRC-32."""
    return int(_core.checksum(np.frombuffer(data, np.uint8))).to_bytes(CHECKSUM_BYTES, "little")
