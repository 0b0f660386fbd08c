"""What tests of every kind share: fixtures for data, and Hypothesis drawing the same examples every time."""

from pathlib import Path

import pytest
from hypothesis import settings

import quire

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# The suite gives the same verdict on every machine; `--hypothesis-profile=default` searches further.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ci")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of published checkpoints, configs and texts beside the repository, if it is there."""
    if not DATA.is_dir():
        pytest.skip("../shared/data is not here")
    return DATA


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The checkpoint of the embedded demo model."""
    return Path(quire.__file__).parent / "assets" / "demo"
