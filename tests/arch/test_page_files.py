"""The files that a browser loads: small, from here alone, and with nothing that runs text as code."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from sources import ROOT

from quire.server.page.static import contents, is_loaded

PAGE = ROOT / "quire/server/page/static"
VENDOR = PAGE / "vendor"
LOADED = (".html", ".css", ".js", ".svg")  # by a browser; licences and READMEs are not
LOADED_BYTES = 62_000  # of all that a browser loads, compressed by gzip
FILE_LINES, LINE_LENGTH = 400, 110

DANGERS = {
    "an address of another host": re.compile(
        r"(?:https?:)?//(?!www\.w3\.org/)[a-z0-9-]+(?:\.[a-z0-9-]+)+", re.I
    ),
    "text as code": re.compile(
        r"\beval\b|\bnew Function\b|\bset(?:Timeout|Interval)\(\s*[\"'`]|javascript:"
        r"|\bimport\((?!\"\./chapters/[a-z]+\.js\"\))"
    ),
    "text as markup": re.compile(
        r"\b(?:inner|outer)HTML\b|dangerouslySetInnerHTML|insertAdjacentHTML|document\.write|DOMParser"
        r"|createContextualFragment|srcdoc"
    ),
    "code or style in markup": re.compile(r"<style\b|<script(?![^>]*\bsrc=)|[\s\"']style=[\"']|\scssText\b"),
    "a handler in markup": re.compile(r"\son[a-z]+=[\"']", re.I),
    "a key where others see it": re.compile(r"[?&](?:api_?)?key=", re.I),
}
# The one place that opens another page, when its button is pressed (docs/serving.md).
ELSEWHERE = {"js/trace.js": re.compile(r"https://ui\.perfetto\.dev")}


def dangers(name: str, text: str) -> list[str]:
    """Find what the page must not contain, by file and line."""
    allowed = ELSEWHERE.get(name)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        line = allowed.sub("", line) if allowed is not None else line
        found += [f"{name}:{number}: {what}" for what, pattern in DANGERS.items() if pattern.search(line)]
    return found


def large(name: str, text: str) -> Iterator[str]:
    """Files and lines that are too long."""
    lines = text.splitlines()
    if len(lines) > FILE_LINES:
        yield f"{name}: {len(lines)} lines"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_LENGTH:
            yield f"{name}:{number}: {len(line)} characters"


def lost(files: Iterable[tuple[str, str]]) -> list[str]:
    """Files that another one imports or links to, and that are not there."""
    found = []
    for name, text in files:
        folder = (PAGE / name).parent
        for given in re.findall(r"(?:\bfrom|\bimport)\s+[\"'](\.{1,2}/[^\"']+)[\"']", text):
            if not (folder / given).is_file():
                found.append(f"{name}: {given}")
        for given in re.findall(r"(?:href|src)=\"/?page/([^\"]+)\"", text):
            if not (PAGE / given).is_file():
                found.append(f"{name}: {given}")
    return found


def own_files() -> list[tuple[str, str]]:
    return [
        (path.relative_to(PAGE).as_posix(), path.read_text("utf-8"))
        for path in sorted(PAGE.rglob("*"))
        if path.suffix in LOADED and VENDOR not in path.parents
    ]


def test_the_page_is_small() -> None:
    found = {
        name: content
        for name, content in contents().items()
        if is_loaded(name) and Path(name).suffix in LOADED
    }
    sizes = {name: len(gzip.compress(content, 9)) for name, content in found.items()}
    assert sum(sizes.values()) <= LOADED_BYTES, sizes


def test_files_and_lines_are_short() -> None:
    assert [what for name, text in own_files() for what in large(name, text)] == []


def test_nothing_in_the_page_is_dangerous() -> None:
    assert [what for name, text in own_files() for what in dangers(name, text)] == []


def test_files_name_those_that_are_there() -> None:
    assert lost(own_files()) == []


def test_what_is_vendored_is_as_published() -> None:
    """The checksums and a licence of each file are in the README beside them."""
    readme = (VENDOR / "README.md").read_text("utf-8")
    stated = {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", readme, re.M)}
    found = {path.name: path.read_bytes() for path in VENDOR.iterdir() if path.name != "README.md"}
    assert {name: hashlib.sha256(content).hexdigest() for name, content in found.items()} == stated
    for library in ("htm", "preact"):
        assert len(found[f"{library}-LICENSE.txt"]) > 1000


@pytest.mark.parametrize(
    "line",
    [
        '<script src="https://cdn.example.org/a.js"></script>',
        "fetch('//cdn.example.org/a')",
        "@import url(http://fonts.example.org/a.css)",
        "eval(text)",
        "new Function(text)",
        'setTimeout("f()", 1)',
        "import(name)",
        'href="javascript:f()"',
        "node.innerHTML = text",
        "dangerouslySetInnerHTML=${{ __html: text }}",
        "new DOMParser()",
        "<script>f()</script>",
        '<p style="color: red">',
        "<style>p {}</style>",
        '<button onclick="f()">',
        "fetch(`/steps?key=${key}`)",
    ],
)
def test_a_danger_is_found(line: str) -> None:
    assert len(dangers("js/a.js", f"fine();\n{line}")) == 1


@pytest.mark.parametrize(
    "line",
    [
        '<script type="module" src="page/js/main.js"></script>',
        "html`<button onClick=${stop} style=${{ width }}>`",
        'document.createElementNS("http://www.w3.org/2000/svg", "svg")',
        "// a comment // with two",
        "const evaluated = evaluate(x)",
        'import { html } from "../vendor/preact.js"',
        "setTimeout(tick, 50)",
        'import("./chapters/prefill.js")',
        "node.textContent = text",
    ],
)
def test_what_is_harmless_passes(line: str) -> None:
    assert dangers("js/a.js", line) == []


def test_only_the_trace_is_opened_elsewhere() -> None:
    line = 'window.open("https://ui.perfetto.dev")'
    assert dangers("js/trace.js", line) == []
    assert len(dangers("js/main.js", line)) == 1
    assert len(dangers("js/trace.js", 'fetch("https://perfetto.dev.example.org")')) == 1


def test_lost_and_long_files_are_found() -> None:
    text = 'import a from "./lost.js";\nimport b from "../vendor/preact.js";\n<link href="page/lost.css">\n'
    assert lost([("js/a.js", text)]) == ["js/a.js: ./lost.js", "js/a.js: lost.css"]
    assert list(large("a.js", "x\n" * FILE_LINES + "y" * (LINE_LENGTH + 1))) == [
        "a.js: 401 lines",
        "a.js:401: 111 characters",
    ]
