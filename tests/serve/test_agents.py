"""What coding agents send, replayed: requests of the shapes that `make agents` sees, short and hand-written.

The model is the demo model with a longer context, and what it says is scripted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_streams import LogprobCursor, told
from scripted_server import call, scripted
from server import Server

FOLDER = Path(__file__).with_name("agents")
NOT_OFFERED = "Launch the rockets."
RED_TO_BLUE = {"old_string": "red", "new_string": "blue"}
PATCH = "*** Begin Patch\n*** Update File: notes.txt\n@@\n-The colour is red.\n+It is blue.\n*** End Patch"
NO_PATCH, SPAWN = "Patch without a mark.", "Let another do it."
# By fixture: a text of its prompt, and what is answered
ANSWERS: dict[str, tuple[str, str]] = {
    "claude_code": (
        "in claude-code/notes.txt",
        call("Edit", file_path="/src/claude-code/notes.txt", **RED_TO_BLUE),
    ),
    "claude_code_media": ("claude-media/plan.pdf", call("mcp__shapes__draw", shape="circle")),
    "opencode": (
        "in opencode/notes.txt",
        call("edit", filePath="/src/opencode/notes.txt", oldString="red", newString="blue"),
    ),
    "qwen_code": (
        "in qwen-code/notes.txt",
        call("edit", file_path="/src/qwen-code/notes.txt", **RED_TO_BLUE),
    ),
    "codex": ("in codex/notes.txt", call("exec_command", cmd="sed -i s/red/blue/ notes.txt")),
    "codex_exec": ("in codex-exec/notes.txt", call("functions.exec", input='text("blue")\nexit()')),
    "codex_patch": ("in codex-patch/notes.txt", call("apply_patch", input=PATCH)),
    "aider": ("in aider/notes.txt", "notes.txt\n```\nThe colour is blue.\n```\n"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    scripts = {marker: [answer] for marker, answer in ANSWERS.values()}
    scripts[NOT_OFFERED] = [call("launch_rockets")]
    scripts[NO_PATCH] = [call("apply_patch", input=PATCH.replace("-", ""))]
    scripts[SPAWN] = [call("multi_agent_v1.spawn_agent", message="Replace red by blue.")]
    folder = tmp_path_factory.mktemp("scripted")
    names = ("--served-model-name", "quire", "--served-model-name", "claude-*")
    flags = (*names, "--max-num-batched-tokens", "2048")
    with scripted(scripts, folder, *flags, max_positions=32_768) as server:
        yield server


def fixture(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return read


def ask(client: httpx.Client, path: str, headers: dict[str, str], body: dict[str, Any]) -> LogprobCursor:
    reply = client.post(path, headers=headers, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return told(path, reply.text)


def test_every_fixture_is_replayed() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(ANSWERS)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_agents_request(server: Server, name: str) -> None:
    """It is answered by a whole stream without errors, and the second time its prompt is cached."""
    _, answer = ANSWERS[name]
    with server.client() as client:
        first, second = (ask(client, **fixture(name)) for _ in range(2))
    assert (first.text, first.calls) == (second.text, second.calls)
    if answer.startswith("<tool_call>"):
        written = json.loads(answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        tool, arguments = written["name"].removeprefix("functions."), written["arguments"]
        expected = arguments["input"] if name in ("codex_exec", "codex_patch") else arguments  # no JSON
        assert (first.text, first.calls) == ("", [(tool, expected)])
    else:
        assert (first.text, first.calls) == (answer, [])
    if first.num_prompt_tokens is not None:
        assert second.num_prompt_tokens == first.num_prompt_tokens
        assert second.num_cached_tokens >= 0.9 * first.num_prompt_tokens


@pytest.mark.parametrize("name", ["codex", "codex_patch"])
def test_codex_calls_a_function_in_a_namespace(server: Server, name: str) -> None:
    """By the two names that it looks tools up by, whether the namespace came at once or was found later."""
    body = {**fixture(name)["body"], "stream": False}
    body["input"] = [*body["input"], {"role": "user", "content": SPAWN}]
    body["input"] = [item for item in body["input"] if "notes.txt" not in json.dumps(item)]
    with server.client() as client:
        reply = client.post("/v1/responses", json=body).json()
    (item,) = reply["output"]
    assert (item["namespace"], item["name"]) == ("multi_agent_v1", "spawn_agent")
    assert json.loads(item["arguments"]) == {"message": "Replace red by blue."}
    assert any("web_search" in warning for warning in reply["warnings"])


def test_codex_gets_no_patch_that_its_grammar_bars(server: Server) -> None:
    body = {**fixture("codex_patch")["body"], "stream": False, "input": NO_PATCH}
    with server.client() as client:
        reply = client.post("/v1/responses", json=body)
    assert reply.status_code == 400, reply.text
    assert "no token may follow" in reply.json()["error"]["message"]


def test_the_script_cannot_say_what_the_grammar_bars(server: Server) -> None:
    """A call of a tool that the request does not offer: the scripted engine has real grammars."""
    tools = fixture("opencode")["body"]["tools"]
    asked = {"messages": [{"role": "user", "content": NOT_OFFERED}], "tools": tools}
    with server.client() as client:
        reply = client.post("/v1/chat/completions", json=asked)
    assert reply.status_code == 400, reply.text
    assert "no token may follow" in reply.json()["error"]["message"]
