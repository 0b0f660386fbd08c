"""BroughtBlocks: blocks that come with a request, from the engine that computed its prompt."""

from __future__ import annotations

from quire.block_store import BlockContent
from quire.transfer.parcels import Parcel, unpack


class BroughtBlocks:
    """A Fetch whose blocks have arrived in parcels.

    What is damaged or of another fingerprint is left out, with all blocks after it.
    """

    done = True

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint
        self._arrived: list[tuple[bytes, BlockContent]] = []
        self._whole = True

    @property
    def num_arrived(self) -> int:
        """See Fetch."""
        return len(self._arrived)

    def bring(self, parcel: Parcel) -> None:
        """Take in a parcel, the blocks of which follow those of the last one."""
        if not self._whole:
            parcel.discard()
            return
        found = [*unpack(parcel, self._fingerprint)]
        self._arrived += found
        self._whole = len(found) == len(parcel.hashes)

    def take(self) -> list[tuple[bytes, BlockContent]]:
        """See Fetch."""
        arrived, self._arrived = self._arrived, []
        return arrived
