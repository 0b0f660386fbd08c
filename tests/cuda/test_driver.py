"""The module that knows the CUDA driver, with cuda-core, on pretended GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_driver_is_asked_for_what_gpus_shall_do() -> None:
    """In a process of its own, since whoever looks for a GPU there finds one."""
    tests = Path(__file__).with_name("on_pretended_gpu.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", str(tests)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"QUIRE_TEST_CUDA": "1"}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "25 passed" in run.stdout
    assert "skipped" not in run.stdout
