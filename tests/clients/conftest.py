"""Fixtures of tests in which the packages that people call a server with call this one.

Tests of a package that is not installed are skipped; `make clients` runs all of them, in an environment that
has older lines of those packages that .venv has the newest of.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from readme import model_names
from server import Server, asked_flags, running


class RunningServer(Server):
    """A server that others started, at this address."""

    def __init__(self, url: str) -> None:
        self.url = url


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server that goes by the names which the packages' own examples ask for. Leave it as it was.

    QUIRE_TEST_SERVER is the address of one that runs already.
    """
    if url := os.environ.get("QUIRE_TEST_SERVER"):
        yield RunningServer(url)
        return
    names = ("demo", *model_names("openai"), *model_names("anthropic"))
    flags = [flag for name in names for flag in ("--served-model-name", name)]
    with running(*flags, *asked_flags()) as server:
        yield server
