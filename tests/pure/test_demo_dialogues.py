"""The generator of the demo models' training text: the same dialogues for the same seed, for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MADE = """
import hashlib, itertools, json
from scripts.demo.dialogues import stream

made = hashlib.sha256()
for split in ("train", "held"):
    for one in itertools.islice(stream(0, split), 500):
        made.update(json.dumps([one.messages, one.task, one.tools, one.expect], sort_keys=True).encode())
print(made.hexdigest())
"""


def test_dialogues_stay_what_the_models_were_trained_on() -> None:
    run = subprocess.run([sys.executable, "-c", MADE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "4f88e30dd49725fab15a20878d6f785fa44381c4f926f1464368cb200b675f42"
