"""examples/evaluate.sh: lm-eval runs a task of its own against the server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from server import Server

pytest.importorskip("lm_eval")
pytest.importorskip("datasets")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "evaluate.sh"


def test_the_score_is_printed(server: Server, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OPENAI_BASE_URL": f"{server.url}/v1",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    (score,) = re.findall(r"\|capitals *\|.*\|acc *\|↑ *\| *([\d.]+)\|", done.stdout)
    assert float(score) >= 0.6  # four cities each: 0.25 by chance
