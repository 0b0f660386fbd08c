"""Coding agents, as they are installed, against the server: each reads a file, edits it and ends, twice.

The model is the demo model with a longer context; what it says is scripted (tests/serve/scripted_engine.py).
Run by `make agents`, which installs the agents into .agents.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from agent_streams import LogprobCursor, told
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ASIDE
from scripted_server import call, scripted
from server import Server

AGENTS = Path(__file__).resolve().parents[2] / ".agents"
MODEL, KEY = "quire", "any"
BEFORE, AFTER = "The colour is red.\n", "The colour is blue.\n"
DONE = "Done."
LIMIT_S = 600.0  # for one run of an agent: the first computes tens of thousands of tokens
MIN_CACHED = 0.9  # share of all prompt tokens of a second run
FLAGS = ("--served-model-name", "*", "--num-threads", "2", "--max-num-batched-tokens", "2048")


@dataclass(frozen=True)
class Agent:
    """How to run an agent, and what the model is to say to it.

    `arguments`, `environment` and `files` (of the home folder) are given the server's URL, the first also the
    task. `answers` are what the model says, given the path of the file.
    """

    name: str
    binary: str
    path: str  # of the endpoint that it uses
    arguments: Callable[[str, str], list[str]]
    environment: Callable[[str], dict[str, str]]
    answers: Callable[[Path], list[str]]
    files: Callable[[str], dict[str, Any]] = field(default=lambda url: {})


def task(file: Path) -> str:
    return f"Read {file} and replace red by blue in it."


def codex_arguments(url: str, prompt: str) -> list[str]:
    provider = f'{{name="Quire",base_url="{url}/v1",env_key="QUIRE_API_KEY",wire_api="responses"}}'
    settings = (
        "model_provider=quire",
        f"model={MODEL}",
        f"model_providers.quire={provider}",
        "analytics.enabled=false",
        "check_for_update_on_startup=false",
    )
    options = [word for setting in settings for word in ("-c", setting)]
    # The sandbox needs rights that a container does not give; the folder is the test's own.
    unguarded = ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]
    return ["exec", "--json", *unguarded, *options, prompt]


def opencode_files(url: str) -> dict[str, Any]:
    model = {"name": MODEL, "limit": {"context": 131072, "output": 8192}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
        "models": {MODEL: model},
    }
    config = {
        "model": f"quire/{MODEL}",
        "provider": {"quire": provider},
        "autoupdate": False,
        "share": "disabled",
    }
    return {".config/opencode/opencode.json": config}


AIDER = ["--yes-always", "--no-git", "--no-analytics", "--no-check-update", "--no-show-model-warnings"]
ALL = (
    Agent(
        "claude",
        "node_modules/.bin/claude",
        "/v1/messages",
        lambda url, prompt: ["-p", prompt, "--dangerously-skip-permissions"],
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": KEY,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # or root may not skip permissions
        },
        lambda file: [
            call("Read", file_path=str(file)),
            call("Edit", file_path=str(file), old_string="red", new_string="blue"),
            DONE,
        ],
    ),
    Agent(
        "codex",
        "node_modules/.bin/codex",
        "/v1/responses",
        codex_arguments,
        lambda url: {"QUIRE_API_KEY": KEY},
        lambda file: [
            call("exec_command", cmd=f"cat {file}"),
            call("exec_command", cmd=f"sed -i s/red/blue/ {file}"),
            DONE,
        ],
    ),
    Agent(
        "opencode",
        "node_modules/.bin/opencode",
        "/v1/chat/completions",
        lambda url, prompt: ["run", "--format", "json", prompt],
        lambda url: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        lambda file: [
            call("read", filePath=str(file)),
            call("edit", filePath=str(file), oldString="red", newString="blue"),
            DONE,
        ],
        opencode_files,
    ),
    Agent(
        "qwen-code",
        "node_modules/.bin/qwen",
        "/v1/chat/completions",
        lambda url, prompt: ["--auth-type", "openai", "--yolo", "-p", prompt],
        lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL},
        lambda file: [
            call("read_file", file_path=str(file)),
            call("edit", file_path=str(file), old_string="red", new_string="blue"),
            DONE,
        ],
        lambda url: {".qwen/settings.json": {"privacy": {"usageStatisticsEnabled": False}}},
    ),
    Agent(
        "aider",
        "aider/bin/aider",
        "/v1/chat/completions",
        lambda url, prompt: ["--model", f"openai/{MODEL}", *AIDER, "--message", prompt, "notes.txt"],
        lambda url: {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": KEY},
        lambda file: [f"notes.txt\n```\n{AFTER}```\n"],  # it calls no tools: the whole file is the answer
    ),
)


@dataclass(frozen=True)
class Site:
    """A server, the folder that the agents work in, and the file that says what they asked."""

    server: Server
    folder: Path
    record: Path

    def take_record(self) -> list[dict[str, Any]]:
        """What was asked and answered since the last call."""
        lines = self.record.read_text("utf-8").splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]

    def prefix_cache(self) -> tuple[float, float]:
        """How many prompt tokens were looked up in the prefix cache so far, and how many found."""
        with self.server.client() as client:
            families = text_string_to_metric_families(client.get("/metrics").text)
        values = {sample.name: sample.value for family in families for sample in family.samples}
        return values["vllm:prefix_cache_queries_total"], values["vllm:prefix_cache_hits_total"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("agents")
    files = {agent: folder / agent.name / "notes.txt" for agent in ALL}
    scripts = {task(file): agent.answers(file) for agent, file in files.items()}
    record = folder / "record.jsonl"
    here = str(Path(__file__).parent)
    before = f"import sys; sys.path.append({here!r}); import recorder; recorder.install({str(record)!r})"
    with scripted(scripts, folder, *FLAGS, max_positions=262_144, before=before) as server:
        yield Site(server, folder, record)


def run(agent: Agent, site: Site, file: Path) -> None:
    """Run an agent to its end on a file as it was. AssertionError with its output when it fails."""
    binary = AGENTS / agent.binary
    if not binary.exists():
        pytest.fail(f"{binary} is not there: `make agents` installs the agents and runs these tests")
    home = site.folder / "home" / agent.name
    for name, content in agent.files(site.server.url).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(json.dumps(content), "utf-8")
    home.mkdir(parents=True, exist_ok=True)
    file.parent.mkdir(exist_ok=True)
    file.write_text(BEFORE, "utf-8")
    # Nothing of whoever runs this: their keys, their settings, their proxies.
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    done = subprocess.run(
        [str(binary), *agent.arguments(site.server.url, task(file))],
        cwd=file.parent,
        env={**kept, "HOME": str(home), "TERM": "dumb", **agent.environment(site.server.url)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{site.server.log[-4000:]}"
    assert file.read_text("utf-8") == AFTER, f"{done.stdout[-4000:]}\n{site.server.log[-4000:]}"


def conversation(agent: Agent, site: Site, file: Path) -> list[LogprobCursor]:
    """What the model said in the agent's task, all of it in streams; what was asked aside is left out."""
    answers = []
    for exchange in site.take_record():
        if exchange["path"] == agent.path:
            assert exchange["status"] == 200, exchange["answer"]
            assert exchange["body"]["stream"] is True
            assert exchange["content_type"].startswith("text/event-stream")
            answer = told(exchange["path"], exchange["answer"])
            if task(file) in json.dumps(exchange["body"]) and answer.text != ASIDE:
                answers.append(answer)
    return answers


@pytest.mark.parametrize("agent", ALL, ids=lambda agent: agent.name)
def test_an_agent_reads_a_file_edits_it_and_ends_twice(agent: Agent, site: Site) -> None:
    file = site.folder / agent.name / "notes.txt"
    said = [answer.partition('"name": ')[2].partition(",")[0] for answer in agent.answers(file)]
    names = [json.loads(name) for name in said if name]
    shares = []
    for _ in range(2):
        begin = site.prefix_cache()
        run(agent, site, file)
        end = site.prefix_cache()
        answers = conversation(agent, site, file)
        assert [name for answer in answers for name, _ in answer.calls] == names
        assert answers[-1].text == agent.answers(file)[-1]
        shares.append((end[1] - begin[1]) / (end[0] - begin[0]))
    assert shares[1] >= MIN_CACHED, shares
