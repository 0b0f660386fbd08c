"""Lark grammars without recursion as regular expressions."""

from __future__ import annotations

import re

import pytest

from quire.grammar.lark_regex import MAX_SOURCE, NotRegular, as_regex

PATCH = r"""
start: begin change+ end
begin: "*** Begin" LF
end: "*** End" LF?          // the last line may lack its end

change: added | removed | moved
added: "+" /(.*)/ LF -> line
removed: "-" /(.*)/ LF
moved: "@@" [" " name] LF
!name.2: /[a-z]+\/?/i

%import common.LF
"""


def matches(source: str, text: str) -> bool:
    return re.fullmatch(as_regex(source), text) is not None


def test_rules_are_expanded() -> None:
    assert matches(PATCH, "*** Begin\n+a\n-b+\n@@\n@@ Src/\n*** End\n")
    assert matches(PATCH, "*** Begin\n+\n*** End")
    assert not matches(PATCH, "*** Begin\n*** End")
    assert not matches(PATCH, "*** Begin\na\n*** End")
    assert not matches(PATCH, "*** Begin\n@@ 1\n*** End")


@pytest.mark.parametrize(
    ("source", "accepted", "refused"),
    [
        ('start: "a.b" "*"', "a.b*", "axb*"),
        ('start: "a"i B\nB: "\\n" | "\\u0041" "\\x42"', "AAB", "aab"),
        ('start: "x"~3 "y"~1..2', "xxxyy", "xxy"),
        ('start: ("a" | "b" "c")+', "abca", "ac"),
        ('start: "a".."f" "-".."0"', "c/", "g/"),
        ("start: /a#b/ /\\/\\*/s", "a#b/*", "a"),
        ("%import common (INT, WS_INLINE)\nstart: INT WS_INLINE INT", "12 \t3", "12\n3"),
        ("%import common.CNAME -> NAME\nstart: NAME", "_a1", "1a"),
        ('?start: a?\n?a: "x"', "", "xx"),
        ('start: "a"\n | "b"\n\n | ', "b", "ab"),
        ('start: "//" COMMENT // not this\nCOMMENT: /[^\\n]/', "//x", "//"),
    ],
)
def test_the_supported_syntax(source: str, accepted: str, refused: str) -> None:
    assert matches(source, accepted)
    assert not matches(source, refused)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('start: a\na: "(" start ")" | "x"', "'start' is recursive"),
        ('start: "a" other', "'other' is not defined"),
        ('first: "a"', "no rule start"),
        ('start: "a"\nstart: "b"', "defined twice"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("%import python.NAME\nstart: NAME", "%import"),
        ("%import common.SQL\nstart: SQL", "common.SQL"),
        ('%declare A\nstart: "a"', "%declare"),
        ('start: ("a"', "not closed"),
        ('start: "a")', "out of place"),
        ('"a"\nstart: "a"', "out of place"),
        ("start: %json {}", "not understood"),
        ('start: "a', "not understood"),
        ('start: "ab".."c"', "cannot be the end of a range"),
        ('start: "a"~b', "not a number"),
        ('start: "a" ->', "breaks off"),
        ("start: " + "(" * 100, "deep"),
        ('start: "a"\n' + "x" * MAX_SOURCE, "characters"),
        ("\n".join(["start: r20", 'r0: "abc"', *(f"r{n + 1}: r{n} r{n}" for n in range(20))]), "expanded"),
        (
            "\n".join([f"start: {'r12 ' * 9000}", 'r0: "abc"', *(f"r{n + 1}: r{n} r{n}" for n in range(12))]),
            "expanded",
        ),
        (
            "\n".join(
                [f"start: {'| r12+ ' * 9000}", 'r0: "a"', *(f"r{n + 1}: r{n} r{n}" for n in range(12))]
            ),
            "expanded",
        ),
        ("\n".join(["start: r0", 'r99: "x"', *(f"r{n}: r{n + 1}" for n in range(99))]), "deep"),
    ],
)
def test_what_cannot_be_expanded_is_refused(source: str, problem: str) -> None:
    with pytest.raises(NotRegular, match=problem):
        as_regex(source)
