"""Fixtures of tests that talk to a server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from server import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server with default flags for all tests of a process. Leave it as it was."""
    with running() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """A client of that server."""
    with server.client() as client:
        yield client
