"""The scripts of examples/, run as their headers say; `make clients` runs evaluate.sh."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from server import Server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ELSEWHERE = {"evaluate.sh"}  # needs lm-eval: tests/clients/test_evaluate_example.py
ENVIRONMENT = {**os.environ, "QUIRE_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"}


def run(name: str, *arguments: str, typed: str = "", **environment: str) -> str:
    """Run an example and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=120,
        env={**ENVIRONMENT, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chat_remembers_the_conversation() -> None:
    said = run("chat.py", typed="What is 3 + 4?\nTell me a story about a fox.\n\nnever read\n")
    first, second, end = said.split("> ")[1:]
    assert "7" in first
    assert "fox" in second
    assert end == ""


def test_extraction_fills_in_the_schema() -> None:
    lines = run("extract.py").splitlines()
    assert lines[1] == "    Mira, 34, baker in Oslo"
    assert len(lines) == 6


def test_the_tool_loop_answers_with_the_result(server: Server) -> None:
    url = f"{server.url}/v1"
    one = run("tools.py", OPENAI_BASE_URL=url)
    assert "get_weather({'city': 'Oslo'}) -> {'condition': 'rainy', 'temperature': 4}" in one
    assert one.splitlines()[-1] == "It is rainy in Oslo, with 4 degrees."
    both = run(
        "tools.py", "What is the weather in Oslo? And what is the weather in Rome?", OPENAI_BASE_URL=url
    )
    assert both.count("get_weather(") == 2


def test_scores_rank_sentences(tmp_path: Path) -> None:
    rows = [line.split(maxsplit=3) for line in run("score.py").splitlines()]
    assert [row[3] for row in rows[1:]] == [
        "The capital of Norway is Oslo.",
        "The capital of Norway is Paris.",
        "Norway capital the Oslo of is.",
    ]
    scores = [float(row[0]) for row in rows[1:]]
    assert scores == sorted(scores, reverse=True)
    file = tmp_path / "lines.txt"
    file.write_text("Norway capital the Oslo of is.\n\nA\n")
    again = [line.split(maxsplit=3) for line in run("score.py", str(file)).splitlines()]
    assert again[1:] == [rows[3], ["0.000", "0", "nan", "A"]]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.[ps][yh]")), ids=lambda path: path.name)
def test_every_script_is_listed_and_run(path: Path) -> None:
    listed = re.findall(r"\[(\w+\.(?:py|sh))\]\(\1\)", (EXAMPLES / "README.md").read_text("utf-8"))
    assert path.name in listed
    assert path.name in ELSEWHERE or f'run("{path.name}"' in Path(__file__).read_text("utf-8")
    assert f"examples/{path.name}" in path.read_text("utf-8")  # the header says how to run it
