"""The interface of the adapters of an engine."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol


class AdapterTable(Protocol):
    """The adapters that requests may have, by what identifies them. Other threads load and unload them."""

    def __contains__(self, adapter: object) -> bool:
        """Return True for an adapter that new requests may have."""

    @property
    def has_unloaded(self) -> bool:
        """True if the memory of an unloaded adapter is still to be freed."""

    def free(self, used: Container[str]) -> None:
        """Free the unloaded adapters that no request uses any more."""
