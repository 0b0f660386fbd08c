"""What strangers wrote, in errors: short, on one line, and unable to steer a terminal."""

from __future__ import annotations

import pytest

from quire.cli.terminal import complain, note
from quire.errors import MAX_MESSAGE, MAX_QUOTED, ConfigError, QuireError, RequestError, did_you_mean, quoted

STEERING = "\x1b[2J\r\n\x07\x9b31m\u202egnp.exe\u2066\u200b\ud800\u2028"


@pytest.mark.parametrize("kind", [QuireError, ConfigError, RequestError])
def test_an_error_steers_no_terminal(kind: type[QuireError]) -> None:
    error = kind(f"file {STEERING}", f"try {STEERING}")
    for text in (error.message, error.hint or "", error.args[0]):
        assert text.isprintable()
        assert "\\u001b[2J\\u000d\\u000a" in text
        assert "\\u202egnp.exe" in text
    assert str(error).count("\n") == 1  # before the hint
    assert kind(error.message).message == error.message
    assert kind("größe 東京 🙂").message == "größe 東京 🙂"


def test_an_error_is_no_longer_than_anyone_reads() -> None:
    error = ConfigError("x" * 10**6, "y" * 10**6)
    assert len(str(error)) < 2 * MAX_MESSAGE + 100


@pytest.mark.parametrize(
    "value", ["x" * 10**6, 10**4000, [["y" * 500] * 50] * 50, {"a" * 500: "b" * 500}, 0.1]
)
def test_what_is_quoted_is_short(value: object) -> None:
    assert 1 < len(quoted(value)) < MAX_QUOTED + 15


def test_what_is_short_is_quoted_whole() -> None:
    assert quoted("NoSuchModel") == "'NoSuchModel'"
    assert quoted([1, None, "a"]) == "[1, None, 'a']"


def test_a_name_of_a_megabyte_is_near_nothing() -> None:
    assert did_you_mean("demo" * 10**6, ["demo"]) is None


def test_what_is_said_in_a_terminal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    complain(f"a{STEERING}b", f"c{STEERING}d")
    note(f"e{STEERING}f")
    lines = capsys.readouterr().err.split("\n")
    assert [line[-1:] for line in lines] == ["b", "d", "f", ""]
    assert all(line.isprintable() for line in lines)
