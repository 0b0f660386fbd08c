"""The part of a service, or of the host of several models, that starting and ending the server needs."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Protocol

from quire.config import ServerConfig


class Served(Protocol):
    """Open requests, and what to do with them when the server ends."""

    config: ServerConfig
    draining: bool
    refusing: bool

    @property
    def requests(self) -> AbstractSet[Endable]:
        """The open requests."""

    @property
    def is_over(self) -> bool:
        """True when nothing can be served any more."""

    def end_feeds(self) -> None:
        """End the streams of those who watch engines."""


class Endable(Protocol):
    """A request that is not answered yet."""

    def end(self, error: Exception) -> None:
        """Report this error to the client."""
