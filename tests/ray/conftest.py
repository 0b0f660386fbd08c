"""A deployment on a Ray cluster of this machine, and one server beside it, for tests that compare them.

They need Ray, which has an environment of its own: `make ray`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cluster.ray import RayConfig
from quire.config import EngineConfig, ServerConfig

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), *(str(TESTS / folder) for folder in ("ray", "serve", "clients"))]
from deployments import Deployment, free_port, processes  # noqa: E402
from readme import model_names  # noqa: E402
from server import Server, cache_folder, running  # noqa: E402

NAMES = ("demo", *model_names("openai"), *model_names("anthropic"))
DRAIN_S = 20


@pytest.fixture(scope="session")
def deployed() -> Iterator[Deployment]:
    os.environ |= {"QUIRE_CACHE_DIR": cache_folder(), "QUIRE_OFFLINE": "1"}
    config = RayConfig(
        server=ServerConfig(port=free_port(), served_model_name=NAMES, drain_timeout_s=DRAIN_S),
        engine=EngineConfig(model="demo", num_threads=1, max_num_prefill_tokens=48),
        replicas=2,
    )
    before = processes()
    deployment = Deployment(config)
    yield deployment
    deployment.end()
    left = {pid: name for pid, name in processes().items() if pid not in before}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes that did not end"


@pytest.fixture(scope="session")
def alone() -> Iterator[Server]:
    """One server without Ray."""
    with running(*(flag for name in NAMES for flag in ("--served-model-name", name))) as server:
        yield server
