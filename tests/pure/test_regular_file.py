"""What stands under the name of a model's file may be anything: it is read, or one error says what it is."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers as small
from model_folders import chat_template_of

from quire.errors import ConfigError
from quire.regular_file import present, read_limited
from quire.text.tokenizer import find_tokenizer
from quire.weights.folder import ModelFolder
from quire.weights.gguf.container import GgufFile


def a_socket(path: Path) -> None:
    there = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(there)


IRREGULAR: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (lambda path: path.mkdir(), "it is a folder, not a file"),
    "pipe": (os.mkfifo, "it is a pipe, not a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
    "socket": (a_socket, "it is a socket, not a file"),
    "link loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "broken link": (lambda path: path.symlink_to(path.with_name("gone")), "no such file"),
}


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A pipe that is waited for, or a device that is read to its end, ends here."""

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("kind", IRREGULAR)
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    make, message = IRREGULAR[kind]
    path = tmp_path / "config.json"
    make(path)
    assert present(path)
    with pytest.raises(ConfigError, match=message) as caught:
        read_limited(path, 1000)
    assert caught.value.message.startswith(f"{path}: ")


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert not present(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_limited(path, 3)
    path.write_bytes(b"abc")
    assert read_limited(path, 3) == b"abc"
    with pytest.raises(ConfigError, match=r"3 bytes are too many for this file \(limit 2\)"):
        read_limited(path, 2)
    (tmp_path / "link").symlink_to(path)
    assert read_limited(tmp_path / "link", 3) == b"abc"


def test_a_file_that_claims_no_size_is_read_up_to_its_limit() -> None:
    assert read_limited(Path("/proc/self/stat"), 10_000)
    with pytest.raises(ConfigError, match="too many"):
        read_limited(Path("/proc/self/stat"), 10)


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_no_file_of_a_tokenizer_is_passed_over(tmp_path: Path, name: str, kind: str) -> None:
    make, message = IRREGULAR[kind]
    small.words(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
        find_tokenizer(ModelFolder.at(tmp_path))


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_no_template_is_passed_over(tmp_path: Path, name: str, kind: str) -> None:
    make, message = IRREGULAR[kind]
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
        chat_template_of(tmp_path)


@pytest.mark.parametrize("kind", IRREGULAR)
def test_no_additional_template_is_passed_over(tmp_path: Path, kind: str) -> None:
    make, message = IRREGULAR[kind]
    (tmp_path / "chat_template.jinja").write_text("x")
    beside = tmp_path / "additional_chat_templates"
    if kind != "folder":
        make(beside)
        with pytest.raises(ConfigError, match=r"additional_chat_templates: cannot be read"):
            chat_template_of(tmp_path)
        beside.unlink()
    beside.mkdir(exist_ok=True)
    (beside / "notes.txt").write_text("no template")
    assert list(chat_template_of(tmp_path).templates) == ["default"]
    make(beside / "tool_use.jinja")
    with pytest.raises(ConfigError, match=rf"tool_use\.jinja: .*{message}"):
        chat_template_of(tmp_path)


def test_a_file_with_nothing_to_read_yet_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files of the kernel are, which count as regular ones: its log, say."""

    class Nothing(BytesIO):
        def read(self, _: int | None = -1) -> Any:
            return None

        def fileno(self) -> int:
            return descriptor

    with (tmp_path / "empty").open("wb") as file:
        descriptor = file.fileno()
        monkeypatch.setattr("quire.regular_file.open_regular", lambda _: Nothing())
        assert read_limited(tmp_path / "log", 1000) == b""


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda folder: ModelFolder.at(folder).config()),
        ("tokenizer.json", lambda folder: find_tokenizer(ModelFolder.at(folder))),
        ("model.safetensors", lambda folder: ModelFolder.at(folder).tensors()),
        ("model.gguf", lambda folder: GgufFile.open(folder / "model.gguf")),
    ],
)
def test_a_pointer_of_git_lfs_is_told_as_such(name: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(ConfigError, match="hint: it is a pointer of Git LFS to the file: run 'git lfs pull'"):
        read(tmp_path)
