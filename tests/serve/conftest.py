"""Fixtures of tests that talk to a server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server import Server, asked_flags, cache_folder, running


@pytest.fixture(scope="session", autouse=True)
def _own_cache() -> None:
    """Take the cache of servers, whose ceilings spare engines in processes of their own from measuring."""
    os.environ["QUIRE_CACHE_DIR"] = cache_folder()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server with default flags for all tests of a process. Leave it as it was."""
    with running(*asked_flags()) as server:
        yield server


@pytest.fixture(scope="module")
def unmeasured() -> Iterator[Server]:
    """A server without ceilings and so without a law: it drafts for few rows, whatever the machine does."""
    with running("--device", "reference") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """A client of that server."""
    with server.client() as client:
        yield client


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[asyncio.subprocess.Process]]:
    """The processes that were started. All have ended when the test has."""
    found: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def started(*command: str, **options: Any) -> asyncio.subprocess.Process:
        found.append(await start(*command, **options))
        return found[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    yield found
    assert found
    assert None not in [child.returncode for child in found]
