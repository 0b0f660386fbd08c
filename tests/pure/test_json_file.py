"""JSON from strangers: read with a limit, one meaning only, and errors that name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.json_file import read_json
from quire.weights import folder


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, {"b": "\u00e9"}]}', encoding="utf-8")
    assert read_json(path) == {"a": [1, {"b": "\u00e9"}]}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"a": {"b": 1, "b": 2}}', "'b' is given twice"),
        ("\xff", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=what) as caught:
        read_json(path)
    assert str(path) in caught.value.message
    assert "fetch it again" in (caught.value.hint or "")


def test_a_missing_or_oversized_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(ConfigError, match="no such file"):
        read_json(path)
    path.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"8 bytes are too many for this file \(limit 7\)"):
        read_json(path, 7)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_json(tmp_path)


def test_a_vocabulary_has_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}" + " " * 100)
    monkeypatch.setattr(folder, "TOKENIZER_LIMIT_BYTES", 100)
    with pytest.raises(ConfigError, match="too many"):
        folder.ModelFolder.at(tmp_path).tokenizer()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": [%s[]]}' % (b"[]," * 600_000), "too many values"),
        (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "not valid JSON"),
        (b'{"a": %s}' % (b"9" * 10**6), "not valid JSON"),
        (b'{"\\u001b[2J": 1, "\\u001b[2J": 2}', r"'\\x1b\[2J' is given twice"),
        (b'{"%s": 1, "%s": 2}' % (b"a" * 10**6, b"a" * 10**6), "aaa.* is given twice"),
    ],
    ids=["mark", "lists", "depth", "digits", "steering", "long"],
)
def test_a_hostile_file_is_one_short_error(tmp_path: Path, text: bytes, what: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=what) as caught:
        read_json(path)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < len(str(path)) + 250
