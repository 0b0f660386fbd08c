"""Checks of launches, in tests of kernels, and in all tests with --check-launches."""

from __future__ import annotations

from importlib import import_module

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--check-launches", action="store_true", help="check launches in tests of models, too")


@pytest.fixture(autouse=True)
def checked_launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every launch of a test (launch_checks)."""
    is_of_kernels = request.path.stem.endswith("_kernels")
    if is_of_kernels or request.config.getoption("--check-launches"):
        import_module("quire.backends.cuda.interpreter")  # before Triton, which it tells to interpret
        from launch_checks import LaunchChecks

        LaunchChecks(monkeypatch)
