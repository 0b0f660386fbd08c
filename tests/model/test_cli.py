"""The command line as a user meets it: answers, JSON, errors with hints, a conversation in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.cli.main import main


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    assert 'quire run demo "Tell me a story' in capsys.readouterr().out
    assert call("run", "--help") == 0
    text = capsys.readouterr().out
    for flag in (
        "--temperature",
        "--max-model-len",
        "--quantization",
        "--no-enable-prefix-caching",
        "--json",
    ):
        assert flag in text


def test_answer_once(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("run", "demo", "Hi!", "--temperature", "0.9", "--max-tokens", "12", "--seed", "5")
    assert call(*arguments) == 0
    first = capsys.readouterr()
    assert first.out.strip()
    for word in ("prompt tokens", "cached", "output tokens", "first token after", "tokens/s"):
        assert word in first.err
    assert call(*arguments) == 0
    assert capsys.readouterr().out == first.out
    assert call("run", "Hi there!", "--max-tokens", "3") == 0  # no model named: the demo


def test_prompt_from_a_pipe_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 3 + 4?\n"))
    assert call("run", "--json", "--max-tokens", "8", "--temperature", "0") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["output_tokens"] <= 8
    assert report["prompt_tokens"] > 5
    assert report["time_to_first_token_s"] > 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert call("run") == 1
    assert "standard input is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["run", "demo", "hi", "--max-token", "3"], 2, "did you mean '--max-tokens'?"),
        (["run", "demo", "hi", "--temperature", "9"], 1, "temperature must be a number from 0 to 2"),
        (["run", "no/such/folder", "hi"], 1, "no such folder"),
        (["run", "demo", "hi", "--max-num-seqs", "0"], 1, "max_num_seqs"),
        (["inspect", "demo", "--quantization", "int3"], 2, "invalid choice"),
        (["runn"], 2, "invalid choice"),
    ],
)
def test_errors_say_what_to_do(
    argv: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*argv) == status
    printed = capsys.readouterr().err
    assert words in printed
    assert "Traceback" not in printed


def test_inspect(capsys: pytest.CaptureFixture[str], demo_folder: Path) -> None:
    assert call("inspect", "demo", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "LlamaForCausalLM"
    file_bytes = (demo_folder / "model.safetensors").stat().st_size
    assert sum(facts["weight_bytes"].values()) <= file_bytes <= sum(facts["weight_bytes"].values()) + 8192
    assert facts["parameters"] * 2 == sum(facts["weight_bytes"].values())
    assert call("inspect", "demo", "--quantization", "int4") == 0
    shown = capsys.readouterr().out
    assert "int4" in shown
    assert "parameters" in shown
    assert "KV cache" in shown


class Terminal:
    """`quire run` in a pseudo-terminal."""

    def __init__(self) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "quire", "run", "--temperature", "0", "--max-model-len", "128"]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def read_until(self, words: str, seconds: float = 60) -> str:
        """What was shown since the last call, up to these words."""
        end = time.monotonic() + seconds
        while words not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"{words!r} did not come; shown: {self.seen!r}"
            self.seen += os.read(self.master, 4096).decode(errors="replace")
        shown, self.seen = self.seen.split(words, 1)
        return shown

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> int:
        self.type("\x04")
        status = self.process.wait(30)
        os.close(self.master)
        return status


def test_conversation_in_a_terminal() -> None:
    terminal = Terminal()
    assert "demo" in terminal.read_until(">>> ")
    terminal.type("Hello!\n")
    assert "(0 cached)" in terminal.read_until(">>> ")
    terminal.type("What is 2 + 2?\n")
    assert "cached)" in terminal.read_until(">>> ")
    terminal.type("Say that again, please, and say it slowly. " * 4 + "\n")
    assert "its beginning is forgotten" in terminal.read_until(">>> ")
    terminal.type("/help\n")
    assert "/system" in terminal.read_until(">>> ")
    terminal.process.send_signal(signal.SIGINT)  # Ctrl-C at the prompt: nothing happens but a new line
    terminal.read_until(">>> ")
    assert terminal.close() == 0
