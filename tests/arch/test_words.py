"""The project's words: nothing left to do in secret, no path of one machine, no number of a ticket."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable

import pytest
from sources import ROOT

TEXT = frozenset({"py", "pyi", "md", "toml", "cpp", "h", "cu", "txt", "yml", "sh", "html", "css", "js"})
NAMED = frozenset({"Makefile", "run", "LICENSE"})
THIS = "tests/arch/test_words.py"  # shows every word it forbids

TICKET = "the number of a ticket"
RULES = {
    "a mark of unfinished work": re.compile(r"\b(TODO|FIXME|XXX|HACK)\b"),
    "a path of one machine": re.compile(r"(?:^|[^\w.])/(?:work|farm|root|home/\w+|Users/\w+)/"),
    TICKET: re.compile(r"(?<![\w&/\"'#])#\d{1,6}\b|\b(?:issue|ticket|PR|GH)[ -]#?\d+\b"),
    "the address of a ticket": re.compile(r"github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+"),
}


def words(path: str, text: str) -> list[str]:
    """Every breach of the rules in one file, with its place. In style sheets # begins a colour."""
    rules = RULES if not path.endswith(".css") else {what: RULES[what] for what in RULES if what != TICKET}
    return [
        f"{path}:{number}: {what}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in rules.items()
        if pattern.search(line)
    ]


def lost_paths(path: str, text: str) -> list[str]:
    """Files of the repository that a document names or links to, and that are not there."""
    named = re.findall(r"`((?:quire|tests|docs|scripts|benchmarks|csrc)/[\w./-]*)`", text)
    folder = (ROOT / path).parent
    linked = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    lost = [name for name in named if not (ROOT / name).exists()]
    lost += [link for link in linked if not (folder / link).exists()]
    return [f"{path}: {name}" for name in lost]


def _tracked() -> Iterable[str]:
    """The text files of the repository, without the data that others wrote."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    for path in listing.stdout.splitlines():
        name = path.rsplit("/", 1)[-1]
        known = name in NAMED or name.rsplit(".", 1)[-1] in TEXT
        if known and path != THIS and not path.startswith("quire/assets/") and (ROOT / path).is_file():
            yield path


def test_the_tree_speaks_of_itself_alone() -> None:
    assert [w for path in _tracked() for w in words(path, (ROOT / path).read_text("utf-8"))] == []


def test_documents_name_what_is_there() -> None:
    documents = [path for path in _tracked() if path.endswith(".md")]
    assert [lost for path in documents for lost in lost_paths(path, (ROOT / path).read_text("utf-8"))] == []


def test_a_lost_path_is_found() -> None:
    text = "`quire/types.py`, `quire/lost.py`, [a](log.md), [b](lost.md), [c](https://example.org/lost)"
    assert lost_paths("docs/glossary.md", text) == [
        "docs/glossary.md: quire/lost.py",
        "docs/glossary.md: lost.md",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "x = 1  # TODO: later",
        "FIXME",
        "see /" + "work/notes.md",  # in two parts, for searches of this very file
        'DATA = "/home/me/models"',
        "mended as of #123",
        "# PR 45 explains",
        "see issue 7",
        "https://github.com/a/b-c/pull/9",
    ],
)
def test_a_wrong_word_is_found(line: str) -> None:
    assert len(words("docs/a.md", f"fine\n{line}")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "# 1. The nouns",
        "color: '#333'",
        "&#39;",
        "https://example.org/work/page",
        "../shared/data",
        "this framework/library",
        "arXiv:2104.09864",
        "a hackathon to do",
    ],
)
def test_a_right_word_passes(line: str) -> None:
    assert words("docs/a.md", line) == []


def test_a_colour_is_no_ticket() -> None:
    assert words("page/style.css", "p { color: #123456; }") == []
    assert len(words("page/style.css", "/* TODO */")) == 1
