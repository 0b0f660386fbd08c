"""`quire page`: the files it writes are the page's, and what they recorded is what the engine did."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from server import cache_folder

from quire.errors import QuireError
from quire.server.page import export, visit
from quire.server.page.static import DIRECTIVES, SCRIPT, contents, is_loaded

MAX_BYTES = 3_000_000  # a busy machine takes longer, so more is seen; an idle one makes 1.2 MB
EXPERIMENT = "cache"  # the one that takes least time


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a visit without pauses, and with one experiment."""
    folder = tmp_path_factory.mktemp("site") / "new" / "folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", cache_folder())
        patch.setenv("QUIRE_API_KEY", "sk-sesame")
        patch.setattr(visit, "PAUSE_S", 0.0)
        patch.setattr(visit, "PARAMETERS", {EXPERIMENT: visit.PARAMETERS[EXPERIMENT]})
        said: list[str] = []
        nbytes = export.export(folder, "sk-sesame", said.append)
    assert said[0] == "starting quire serve demo"
    assert said[-1] == f"recording the experiment {EXPERIMENT} (1 of 1)"
    assert nbytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < MAX_BYTES
    return folder


@pytest.fixture(scope="module")
def recorded(site: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((site / "page/recorded.json").read_bytes())
    return found


def rows_of(recorded: dict[str, Any], tag: str) -> list[list[Any]]:
    steps = [step for frame in recorded["frames"] for step in frame.get("steps", ())]
    return [row for step in steps for row in step["rows"] or () if row[7] == tag]


def test_it_has_every_file_of_the_page(site: Path) -> None:
    needed = {name: content for name, content in contents().items() if is_loaded(name)}
    assert needed.keys() >= {"js/main.js", "page.css", "vendor/htm-LICENSE.txt"}
    for name, content in needed.items():
        if name != "index.html":
            assert (site / "page" / name).read_bytes() == content
    assert [path.name for path in (site / "page").rglob("*.js")] == ["main.js"]
    assert (site / "page/recorded.pftrace").read_bytes()[0] == 0x0A


def test_its_page_shows_a_recording_and_has_the_policy(site: Path) -> None:
    index = (site / "index.html").read_text()
    assert '<meta name="quire-data" content="recorded">' in index
    assert 'content="live"' not in index
    policy = index.index("Content-Security-Policy")
    assert "; ".join(DIRECTIVES) in index
    assert policy < index.index("<link")
    assert policy < index.index("<script")
    linked = re.findall(r'(?:href|src)="([^"]+)"', index)
    assert linked
    assert [link for link in linked if not (site / link).is_file()] == []  # none begins at the root of a host


def test_frames_are_as_a_viewer_gets_them(recorded: dict[str, Any]) -> None:
    frames = recorded["frames"]
    assert {"t", "facts", "law", "counts", "steps", "cache"} <= frames[0].keys()
    assert frames[0]["facts"]["names"] == ["demo"]
    assert frames[0]["facts"]["recording"]
    times = [frame["t"] for frame in frames]
    assert times == sorted(times)
    indices = [step["index"] for frame in frames for step in frame.get("steps", ())]
    assert indices == list(range(indices[0], indices[-1] + 1))
    latest = {name: value for frame in frames for name, value in frame.items()}
    assert latest["counts"]["num_running"] == 0
    assert [(group["num_held"], group["tables"]) for group in latest["cache"]["groups"]] == [(0, [])]


def test_answers_are_found_in_the_steps(recorded: dict[str, Any]) -> None:
    answers = recorded["answers"]
    kinds = [answer["kind"] for answer in answers]
    tried = [*visit.TRIED, visit.AGAIN]
    expected = {"chat": len(visit.CONVERSATION), "alone": len(tried), "alike": 2, "together": visit.TOGETHER}
    assert kinds == [kind for kind, count in expected.items() for _ in range(count)]
    for answer in answers:
        rows, timings = rows_of(recorded, answer["tag"]), answer["timings"]
        assert {row[3] for row in rows} == {timings["prompt_tokens"]}
        computed = sum(row[2] for row in rows if row[1] + row[2] <= row[3])
        assert computed == timings["prompt_tokens"] - timings["cached_tokens"]
        assert recorded["frames"][0]["t"] <= answer["sent_s"] < answer["token_s"][0]
        assert answer["token_s"] == sorted(answer["token_s"])
        assert answer["token_s"][-1] <= recorded["frames"][-1]["t"]
    alone = [answer["timings"] for answer in answers if answer["kind"] == "alone"]
    assert [timings["prompt_tokens"] for timings in alone] == tried
    assert [timings["cached_tokens"] > 0 for timings in alone] == [False] * len(visit.TRIED) + [True]
    alike = [answer["timings"]["cached_tokens"] for answer in answers if answer["kind"] == "alike"]
    assert alike == [0, visit.ALIKE // 16 * 16]
    chat = [answer for answer in answers if answer["kind"] == "chat"]
    assert [answer["prompt"] for answer in chat] == list(visit.CONVERSATION)
    assert [bool(answer["text"]) for answer in answers] == [kind == "chat" for kind in kinds]
    assert chat[1]["timings"]["cached_tokens"] > 0  # a conversation begins as the one before
    assert [bool(answer["drafting"]) for answer in answers] == [kind == "chat" for kind in kinds]
    for answer in chat:
        said = "".join(token for step in answer["drafting"] for token in step["tokens"])
        assert said.removesuffix("<|im_end|>") == answer["text"]
        gained = sum(len(step["tokens"]) - 1 for step in answer["drafting"])
        assert gained == answer["timings"]["accepted_tokens"]
    # Later on, it depends on the times of this machine whether drafts are worth looking for.
    assert chat[0]["timings"]["accepted_tokens"] > 0


def test_replies_are_of_the_same_run(recorded: dict[str, Any]) -> None:
    replies = recorded["replies"]
    assert set(replies) == {"/props", "/server_info", "/steps", "/steps/law"}
    steps = {step["index"]: step for frame in recorded["frames"] for step in frame.get("steps", ())}
    for step in replies["/steps"]["steps"]:
        seen = steps[step["index"]]
        assert {name: seen[name] for name in step} == step
    assert replies["/server_info"]["model"] == recorded["frames"][0]["facts"]["model"]
    assert replies["/steps/law"]["law"]["features"]


def test_what_the_page_asks_for_was_recorded(recorded: dict[str, Any]) -> None:
    asked = set(re.findall(r"\bjson\([\"'`](/[\w/]+)", contents()[SCRIPT].decode()))
    several = {"/v1/models", "/tokenize"}  # of servers with several models: a recording is of one
    assert several < asked
    assert asked - several <= recorded["replies"].keys()


def test_experiments_are_whole(recorded: dict[str, Any]) -> None:
    lines = recorded["experiments"][EXPERIMENT]
    assert "done" in lines[-1]
    assert len(lines) > 2


def test_nothing_of_this_machine_is_in_it(site: Path, tmp_path: Path) -> None:
    text = (site / "page/recorded.json").read_text()
    for secret in ("sk-sesame", str(tmp_path.parents[2]), str(Path.home()), cache_folder(), "quire-bench-"):
        assert secret not in text


class Scripted(visit.Visitor):
    """A visitor whose frames come one at each look at them."""

    def __init__(self, *frames: dict[str, Any]) -> None:
        self._coming = [(0.0, frame) for frame in frames]
        self.frames = [self._coming.pop(0)]

    def get(self, path: str) -> bytes:
        return b'{"steps": [{"index": 2}]}'

    def next_frame(self, _: float) -> None:
        if self._coming:
            self.frames.append(self._coming.pop(0))


def test_frames_end_when_the_engine_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def frame(step: int, num_running: int, num_held: int) -> dict[str, Any]:
        cache = {"groups": [{"num_held": num_held}]}
        return {"steps": [{"index": step}], "counts": {"num_running": num_running}, "cache": cache}

    visitor = Scripted(frame(1, 0, 0), frame(2, 1, 1), frame(2, 0, 1), {"cache": frame(2, 0, 0)["cache"]}, {})
    monkeypatch.setattr(visit.time, "sleep", visitor.next_frame)
    assert len(visitor.frames_until_idle()) == 4
    monkeypatch.setattr(visit, "TIMEOUT_S", 0.01)
    with pytest.raises(QuireError, match="its last step"):
        Scripted(frame(1, 0, 0)).frames_until_idle()


def test_a_server_that_is_not_there_is_reported() -> None:
    with pytest.raises(QuireError, match="does not answer /page/events"):
        visit.Visitor("http://127.0.0.1:9")


@pytest.mark.parametrize("index", ["<html></html>", export.LIVE + export.CHARSET + export.LIVE])
def test_another_index_is_not_rewritten(index: str) -> None:
    with pytest.raises(ValueError, match="has no line"):
        export.recorded_index(index)
