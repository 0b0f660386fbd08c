"""The command line of `quire page`: what it refuses before anything is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cli import call

from quire.server.page import export


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(*arguments: object, **options: object) -> None:
        raise RuntimeError("a server would be started")

    monkeypatch.setattr(export, "served", served)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--out DIR is missing"),
        (("--out",), "--out"),
        (("demo", "--out", "site"), "unknown argument 'demo'"),
        (("--out", "site", "--to", "x"), "unknown argument '--to'"),
    ],
)
def test_a_wrong_command_line(argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("page", *argv) == 2
    assert words in capsys.readouterr().err


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    assert call("page", "--out", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert "is not empty" in said
    assert "--force" in said
    with pytest.raises(RuntimeError, match="would be started"):
        call("page", "--out", str(tmp_path), "--force")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_place_that_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert call("page", "--out", str(tmp_path / "file")) == 1
    assert "error: " in capsys.readouterr().err


def test_help_shows_how_to_look_at_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("page", "--help") == 0
    shown = capsys.readouterr().out
    assert "python3 -m http.server --directory site" in shown
    assert "quire page --out site" in shown
