"""What tests of every kind share: fixtures for data, and Hypothesis drawing the same examples every time."""

import os
import sys
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from hypothesis import settings

import quire


def _use_core(path: str) -> None:
    """Take another build of the native core than the one installed: `make sanitize` names it."""
    name = "quire.backends.native._core"
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    sys.modules["quire.backends.native"]._core = sys.modules[name]  # type: ignore[attr-defined]


if "QUIRE_TEST_CORE" in os.environ:
    import quire.backends.native

    _use_core(os.environ["QUIRE_TEST_CORE"])

collect_ignore = ["agents", "browser", "ray"]  # they need more installed: `make agents` and so on
if "QUIRE_TEST_CUDA" not in os.environ:  # that is `make cuda`
    collect_ignore.append("cuda")
if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:  # that is scripts/numa_in_qemu.py
    collect_ignore.append("native/test_node_pages.py")

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# The suite gives the same verdict on every machine; `--hypothesis-profile=default` searches further.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take a cache without ceilings: with them, whether drafts pay depends on how fast the machine is."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["QUIRE_CACHE_DIR"] = str(folder)
    yield
    assert not (folder / "ceilings").exists(), "a test has measured this machine"


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
