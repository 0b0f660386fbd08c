"""The script that checks a GPU, on the interpreted accelerator at toy sizes: its code and what it finds."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.backends.cuda.accelerator import DeviceArray, Launch
from quire.backends.cuda.interpreted import InterpretedAccelerator, view_of
from quire.backends.cuda.kernels.variants import variants
from quire.backends.cuda.manifest import launch_key
from quire.backends.cuda.self_check import check_accelerator
from quire.errors import ConfigError

FILE = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script()


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def run(script: Any, name: str, folder: Path) -> dict[str, Any]:
    """What a piece wrote."""
    passed = script.run_piece(name, folder, True, True)
    part: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert part["passed"] is passed
    assert script.is_finished(folder / f"{name}.json", True, True)
    return part


@pytest.mark.parametrize(
    ("name", "checks"),
    [("launch", 3), ("ops", 30), ("bits", 7), ("exact", 11), ("speed", 0), ("model", 1), ("start", 1)],
)
def test_every_piece_passes(script: Any, tmp_path: Path, name: str, checks: int) -> None:
    part = run(script, name, tmp_path)
    assert part["error"] == ""
    assert part["passed"], [row for row in part["rows"] if not row.get("passed", True)]
    assert sum("passed" in row for row in part["rows"]) == checks
    assert len(part["rows"]) > 0


def test_kernels_of_the_script_and_of_the_self_check_were_compiled(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes for a GPU, where an 8B shape has two layers: nothing is computed."""
    compiled = {variant.key for variant in variants()}
    asked: set[str] = set()

    def launch(self: InterpretedAccelerator, one: Launch) -> None:
        if one.grid[0]:
            asked.add(launch_key(one))
            self.loaded.add(launch_key(one))

    monkeypatch.setattr(InterpretedAccelerator, "launch", launch)
    with pytest.raises(ConfigError, match="wrongly"):
        check_accelerator(InterpretedAccelerator())
    small = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256}
    small |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    monkeypatch.setattr(script, "TOY", script.LLAMA_8B | small)
    monkeypatch.setattr(script.RowResult, "error", None)
    for name in ("bits", "exact", "speed", "model"):
        script.run_piece(name, tmp_path, True, True)
        assert json.loads((tmp_path / f"{name}.json").read_text())["error"] == ""
    assert asked - compiled == set()
    names = {key.partition("(")[0] for key in asked}
    assert {"attend", "feed_tokens", "choose_tokens", "token_logprobs", "scale", "add"} <= names
    assert {"rope_and_kv", "list_segments", "attend_segments", "merge_segments"} <= names
    assert any("TABLE=fp4" in key for key in asked)


def test_all_pieces_are_tested(script: Any) -> None:
    assert set(script.QUICK) < set(script.PIECES)
    assert sum(script.QUICK.values()) <= 360
    assert list(script.PIECES) == ["launch", "ops", "bits", "exact", "speed", "model", "start"]


def test_what_depends_on_the_number_of_rows_is_found(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last bit of a number changed where there are many rows, as by another order of sums."""
    launch = InterpretedAccelerator.launch

    def changed(self: InterpretedAccelerator, one: Launch) -> None:
        launch(self, one)
        out = one.args[0]
        if one.kernel == "product" and isinstance(out, DeviceArray) and out.shape[0] > 16:
            view_of(out).view("i4")[0, 0] += 1

    monkeypatch.setattr(InterpretedAccelerator, "launch", changed)
    part = run(script, "bits", tmp_path)
    assert not part["passed"]
    assert [row["rows"] for row in part["rows"] if row.get("differ")] == [18]


def test_a_piece_that_fails_keeps_what_it_found(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(piece: Any) -> None:
        piece.found(True, what="one")
        written = json.loads((tmp_path / "start.json").read_text())
        assert (written["finished"], written["passed"]) == (False, False)
        raise RuntimeError("lost")

    monkeypatch.setitem(script.PIECES, "start", fails)
    part = run(script, "start", tmp_path)
    assert "RuntimeError: lost" in part["error"]
    assert part["rows"] == [{"what": "one", "passed": True}]


@pytest.mark.parametrize(
    ("before", "now", "left_out"),
    [
        (("--interpreted", "--quick"), ("--quick",), False),
        (("--interpreted", "--quick"), (), False),
        (("--quick",), (), False),
        (("--quick",), ("--quick",), True),
        ((), ("--quick",), True),
        ((), (), True),
    ],
)
def test_a_piece_is_left_out_if_as_much_of_it_was_run(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Any, now: Any, left_out: bool
) -> None:
    def runs(argv: list[str], timeout: float) -> Any:
        facts = {name: f"--{name}" in argv for name in ("quick", "interpreted")}
        script.Part(tmp_path / "launch.json", facts | {"began_at": 0.0}).write(None, True)
        ran.append(argv)
        return SimpleNamespace(returncode=0)

    ran: list[list[str]] = []
    monkeypatch.setattr(script.subprocess, "run", runs)
    for flags in (before, now):
        monkeypatch.setattr(
            sys, "argv", ["gpu_check", "--folder", str(tmp_path), "--pieces", "launch", *flags]
        )
        assert script.main() == 0
    assert len(ran) == 2 - left_out
    assert [file.name for file in tmp_path.iterdir()] == ["launch.json"]


def test_a_part_is_there_as_a_whole_or_not(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, "launch", tmp_path)
    write = Path.write_text

    def ended(self: Path, text: str, *how: Any) -> int:
        write(self, text[: len(text) // 2], *how)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", ended)
    with pytest.raises(KeyboardInterrupt):
        script.run_piece("launch", tmp_path, True, True)
    assert script.is_finished(tmp_path / "launch.json", True, True)


def test_the_report_replaces_the_last_one(script: Any, tmp_path: Path) -> None:
    page, parts = tmp_path / "gpu.md", tmp_path / "parts"
    page.write_text("# GPUs\n\nText.\n")
    run(script, "launch", parts)
    script.write_report(parts, page)
    first = page.read_text()
    assert first.startswith("# GPUs\n\nText.\n\n<!-- measured")
    assert "3 of 3 checks passed" in first
    assert "| device | target | free_bytes |" in first
    script.write_report(parts, page)
    assert page.read_text() == first
    part = json.loads((parts / "launch.json").read_text())
    part["rows"][1] |= {"passed": False, "problem": "wrong"}
    (parts / "launch.json").write_text(json.dumps(part))
    script.write_report(parts, page)
    assert "2 of 3 checks passed" in page.read_text()
    assert "- not passed: what self-check, problem wrong" in page.read_text()
