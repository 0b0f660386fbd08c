"""Ends of a continuation at line breaks."""

from __future__ import annotations

import math

import pytest

from quire.server.llamacpp.line_ends import LineEnds

BODY = "return x\n    y = 2\n\n\tz\n        w = 3\n  \ndef f():\n    pass"


def read(text: str, indent: int, step: int) -> tuple[str, list[int]]:
    """The text that is kept, if `text` comes in pieces, and what was certain after each."""
    ends, certain = LineEnds(indent, math.inf), []
    for end in range(step, len(text) + step, step):
        ends.look(text[:end], 0.0)
        certain.append(ends.num_certain)
        if ends.reached:
            return text[: ends.num_certain], certain
    return text, certain


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_a_line_of_too_little_indentation_ends_the_text_before_it(step: int) -> None:
    assert read(BODY, 1, step)[0] == BODY[: BODY.index("\n  \ndef")]
    assert read(BODY, 4, step)[0] == BODY[: BODY.index("\n\n\tz")]
    assert read(BODY, 5, step)[0] == "return x"
    assert read("    a\n    b", 4, step)[0] == "    a\n    b"
    assert read(BODY, 0, step)[0] == BODY


@pytest.mark.parametrize("indent", [1, 4, 5])
def test_what_is_certain_is_never_taken_back(indent: int) -> None:
    kept, certain = read(BODY, indent, 1)
    assert certain == sorted(certain)
    assert max(certain) <= len(kept)
    assert certain[:8] == [*range(1, 9)]  # a line is certain as it comes


def test_blank_lines_wait_for_the_line_after_them() -> None:
    ends = LineEnds(2, math.inf)
    ends.look("a\n\n  ", 0.0)
    assert (ends.num_certain, ends.reached) == (1, False)
    ends.look("a\n\n  b", 0.0)
    assert (ends.num_certain, ends.reached) == (6, False)


def test_after_a_time_the_next_line_break_ends_the_text() -> None:
    ends = LineEnds(0, 100.0)
    ends.look("a\nb", 50.0)
    ends.look("a\nb c", 150.0)
    assert not ends.reached
    ends.look("a\nb c\nd", 160.0)
    assert (ends.num_certain, ends.reached) == (6, True)
    ends.look("a\nb c\nd e\nf", 170.0)
    assert ends.num_certain == 6
