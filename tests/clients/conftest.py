"""Fixtures of tests in which the packages that people call a server with call this one.

Tests of a package that is not installed are skipped; `make clients` runs all of them, in an environment that
has older lines of those packages that .venv has the newest of.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from readme import model_names
from server import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server that goes by the names which the packages' own examples ask for. Leave it as it was."""
    names = ("demo", *model_names("openai"), *model_names("anthropic"))
    with running(*(flag for name in names for flag in ("--served-model-name", name))) as server:
        yield server
