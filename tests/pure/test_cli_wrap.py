"""Lines in a terminal end between words, however the text comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.wrap import WordWrap, cells


def wrapped(pieces: list[str], columns: int) -> str:
    wrap = WordWrap(lambda: columns)
    return "".join(wrap.push(piece) for piece in pieces) + wrap.flush()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three", "one two\nthree"),
        ("exactly ten and", "exactly\nten and"),
        ("1234567890 12345 6789", "1234567890\n12345 6789"),
        ("one  two\n\n  three four", "one  two\n\n  three\nfour"),
        ("a well-known thing", "a\nwell-known\nthing"),
        ("so unbelievably long", "so\nunbelievab\nly long"),
        ("a\tb c", "a\tb\nc"),
        ("狐狸和灯笼的故事", "狐狸和灯笼\n的故事"),
        ("e\u0301" * 10, "e\u0301" * 10),
        ("ends here \n", "ends here\n"),
    ],
)
def test_ten_columns(text: str, expected: str) -> None:
    assert wrapped([text], 10) == expected
    assert wrapped([*text], 10) == expected


@given(st.lists(st.text("ab 狐\n-", max_size=9)), st.integers(4, 12))
def test_no_word_is_broken_or_lost(pieces: list[str], columns: int) -> None:
    text = "".join(pieces)
    lines = wrapped(pieces, columns).split("\n")
    assert "\n".join(lines) == wrapped([text], columns)
    assert all(sum(map(cells, line)) <= columns or not line[:columns].strip() for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())
    words = {word for word in text.replace("狐", " ").split() if len(word) <= columns}
    assert words <= {word for line in lines for word in line.replace("狐", " ").split()}


def test_what_is_whole_is_written_at_once() -> None:
    wrap = WordWrap(lambda: 80)
    assert [wrap.push(piece) for piece in ("The", " fox", " ran.", "\n")] == ["", "The", " fox", " ran.\n"]


def test_a_window_that_grows_takes_longer_lines() -> None:
    sizes = [5]
    wrap = WordWrap(lambda: sizes[0])
    written = wrap.push("one two ")
    sizes[0] = 20
    assert written + wrap.push("three four\n") == "one\ntwo three four\n"
