"""Every command and program of README.md, run as a reader runs it, and what it says about figures."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_hub
from pseudo_terminal import Terminal
from server import Server

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LINES = [line for language, block in BLOCKS if language == "sh" for line in block.splitlines()]
COMMANDS = [re.sub(r"\s+# .*", "", line) for line in LINES]
PROGRAMS = [block for language, block in BLOCKS if language == "python"]
REQUESTS = [line for language, block in BLOCKS if language == "json" for line in block.splitlines(True)]
HUB_IDS = sorted(set(re.findall(r"quire \w+ (\w[\w.-]*/[\w.-]+)", "\n".join(COMMANDS))))

ADDRESS = "http://127.0.0.1:8000"
CHAT = re.compile(r"quire run( [\w./-]+)?( --\w+ \w+)*")  # no prompt, so it asks for one
QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]


class Home(NamedTuple):
    """The folder that commands run in, and their environment."""

    folder: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> Home:
    """A folder with the files that the README's commands name, and a hub cache with its models."""
    folder = tmp_path_factory.mktemp("readme")
    first, *_ = tiny_hub.fill(folder / "hf", HUB_IDS, demo_folder)
    (folder / "my-model").symlink_to(first)
    (folder / "notes.txt").write_text("The lantern is blue.\n")
    (folder / "in.jsonl").write_text("".join(REQUESTS))
    for language, block in BLOCKS:
        if language == "yaml":
            (folder / block.split("\n")[0].removeprefix("# ")).write_text(block)
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))}
    return Home(folder, {**inherited, **own})


class CommandServer(Server):
    """A server that a command of the README starts, at a free port."""

    def __init__(self, command: str, home: Home) -> None:
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed by stop
        self.process = subprocess.Popen(
            ["bash", "-c", f"{command} --port 0"],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=home.folder,
            env=home.environment,
        )
        self.url = self._last_log = ""


def check_served(command: str, home: Home) -> None:
    """Start the server, ask for an answer, and end it; with a key, nobody is answered without it."""
    key = re.match(r"QUIRE_API_KEY=(\S+) ", command)
    server = CommandServer(command, home)
    try:
        server.wait_until_ready()
        with server.client() as client:
            body = {"messages": QUESTION, "max_tokens": 8}
            headers = {"Authorization": f"Bearer {key[1]}"} if key else {}
            reply = client.post("/v1/chat/completions", json=body, headers=headers)
            assert reply.json()["usage"]["completion_tokens"] > 0
            if key:
                assert client.post("/v1/chat/completions", json=body).status_code == 401
    finally:
        status = server.stop()
    assert status == 0


def check_chat(command: str, home: Home) -> None:
    """Type a question into the program, see what the answer took, and leave."""
    terminal = Terminal(["bash", "-c", command], cwd=home.folder, **home.environment)
    terminal.read_until(">>> ")
    terminal.type("What is 3 + 4?\n")
    assert "output token" in terminal.read_until("\n>>> ")
    assert terminal.close() == 0


def finish(command: str, home: Home) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; AssertionError if it fails."""
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=home.folder,
        env=home.environment,
    )
    assert done.returncode == 0, done.stderr
    return done


def check_output(command: str, home: Home) -> None:
    """Run to the end without an error; what is asked for as JSON is JSON."""
    done = finish(command, home)
    assert done.stdout.strip()
    assert "error" not in done.stderr
    if "--json" in command:
        assert json.loads(done.stdout)["text"]


def check_batch(command: str, home: Home) -> None:
    """Answer the README's requests."""
    finish(command, home)
    answers = (home.folder / "out.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(answer)["error"] for answer in answers] == [None] * len(REQUESTS)


def check_make(command: str, home: Home) -> None:
    """Find the target in the Makefile; `make run` ends in `quire run`."""
    done = subprocess.run(
        [*shlex.split(command), "--dry-run"], capture_output=True, text=True, cwd=ROOT, env=home.environment
    )
    assert done.returncode == 0, done.stderr
    if command == "make run":
        assert done.stdout.split("\n")[-2].split() == ["exec", ".venv/bin/quire", "run"]


def check_installation(command: str, home: Home) -> None:
    """Compare with pyproject.toml and the Makefile: nothing is downloaded or installed."""
    if clone := re.fullmatch(r"git clone (https://\S+) && cd (\w+)", command):
        assert PROJECT["urls"]["Documentation"].startswith(f"{clone[1]}/")
        assert clone[1].endswith(f"/{clone[2]}")
    elif extra := re.fullmatch(r"pip install --no-build-isolation -e '\.\[(\w+)\]'", command):
        assert extra[1] in PROJECT["optional-dependencies"]
    else:
        assert command == "source .venv/bin/activate"
        assert "\nBIN := .venv/bin\n" in (ROOT / "Makefile").read_text("utf-8")


def check(command: str, home: Home) -> None:
    """Run a command in the way that suits it."""
    if re.match(r"git|pip|source", command):
        check_installation(command, home)
    elif command.startswith("make "):
        check_make(command, home)
    elif " serve" in command:
        check_served(command, home)
    elif " batch " in command:
        check_batch(command, home)
    elif CHAT.fullmatch(command):
        check_chat(command, home)
    else:
        check_output(command, home)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works(home: Home, command: str) -> None:
    check(command, home)


@pytest.mark.parametrize(
    "command",
    [
        "git clone https://github.com/quire-engine/quine && cd quine",
        "pip install --no-build-isolation -e '.[hubs]'",
        "make runn",
        "quire inspct demo",
        "quire run demo Hello! --jsn",
        'echo "What is 3 + 4?" | quire run dem --json',
        "quire serve demo --quantisation int8",
        "quire run Qwen/Qwen3-0.7B Hello!",
        "quire batch inn.jsonl -o out.jsonl",
    ],
)
def test_a_broken_command_is_noticed(home: Home, command: str) -> None:
    with pytest.raises(AssertionError):
        check(command, home)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_works(home: Home, server: Server, number: int) -> None:
    program = PROGRAMS[number]
    assert ("OpenAI(" in program) == (ADDRESS in program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program.replace(ADDRESS, server.url)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=home.folder,
        env=home.environment,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 10
    if "tool_calls" in program:
        assert json.loads(done.stdout).keys() == {"city"}


def test_the_readme_has_what_is_tested() -> None:
    assert len(COMMANDS) >= 15
    assert len(PROGRAMS) >= 3
    assert {language for language, _ in BLOCKS} == {"sh", "python", "json", "yaml"}
    assert REQUESTS
    for kind in ("make run", "quire run", "quire serve", "quire batch", *HUB_IDS):
        assert any(kind in command for command in COMMANDS)


def test_figures_are_those_of_performance() -> None:
    section = README.split("## Measured")[1].split("##")[0]
    measured = (ROOT / "docs" / "performance.md").read_text("utf-8")
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    assert rows
    for row in rows:
        label, *figures = (cell.strip() for cell in row.strip("|").split("|"))
        known = re.search(rf"^\| l1b {label.removesuffix(' tokens')} \|(.*)\|$", measured, re.MULTILINE)
        assert known, label
        assert [cell.strip() for cell in known[1].split("|")][: len(figures)] == figures


def test_the_pictures_are_small_and_need_no_network() -> None:
    terminal, page = (ROOT / path for path in re.findall(r"!\[[^]]+\]\((\S+)\)", README))
    picture = terminal.read_text("utf-8")
    assert len(picture) < 60_000
    assert set(re.findall(r"https?://[^\"]+", picture)) == {"http://www.w3.org/2000/svg"}
    assert "quire&#160;run" in picture
    content = page.read_bytes()
    assert content[8:12] == b"WEBP"
    assert len(content) < 150_000
