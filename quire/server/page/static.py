"""The files of the page: read when the server starts, and served from memory without a key.

Scripts and style sheets are sent without the comments and most of the space that are for their readers: all
scripts as one, and all style sheets as one.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.server.admin import root
from quire.server.errors import NotFound
from quire.server.page.bundle import bundle

FOLDER = Path(__file__).parent / "static"
INDEX, SCRIPT, STYLE = "index.html", "js/main.js", "page.css"
PREFIX = "/page/"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}
# Nothing but the page's own files is loaded, and no text becomes code or markup, whatever a model writes.
DIRECTIVES = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self' data:",
    "base-uri 'none'",
    "form-action 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
HEADERS = {
    "content-security-policy": "; ".join((*DIRECTIVES, "frame-ancestors 'none'")),
    "cross-origin-opener-policy": "same-origin-allow-popups",  # a trace is sent to the tab it opens
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # ask each time whether it has changed
}


# Comments with lines of their own, empty lines, and indentation; in scripts also comments behind code, of
# which none has a quote: then it could be the end of a string. Then the ends of lines behind an opening
# bracket, and before a closing one with the comma there, where no comment is left that would go on; and the
# space around operators and inside braces, which are in no text for people. At last, when no import is left,
# the ends of lines behind a semicolon. In style sheets all space around punctuation.
_FOR_READERS = re.compile(
    rb"^[ \t]*(?:/\*(?:[^*]|\*(?!/))*\*/[ \t]*\n|(?://[^\n]*)?\n)|^[ \t]+", re.MULTILINE
)
_BEHIND_CODE = re.compile(rb"[ \t]+// [^\n\"'`]*$", re.MULTILINE)
_OPENED = re.compile(rb"^((?:(?!//)[^\n])*[\[({])\n", re.MULTILINE)
_CLOSED = re.compile(rb"^((?:(?!//)[^\n])*?),?\n(?=[\])}])", re.MULTILINE)
_OPERATOR = re.compile(rb" (=>|[!=]==|&&|\|\||\?\?) |(?<=\)) (?=\{)|(?<=\{) | (?=\})")
_ENDED = re.compile(rb"^((?:(?!//)[^\n])*;)\n", re.MULTILINE)
_SPACED = re.compile(rb"\s*([{};,]|:(?= ))\s*")
_IMPORTED = re.compile(rb'@import "([^"]+)";')


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent, plain and compressed by gzip."""

    media_type: str
    content: bytes
    compressed: bytes
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> PageFile:
        etag = f'W/"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
        return cls(MEDIA_TYPES[Path(name).suffix], content, gzip.compress(content, 9, mtime=0), etag)

    def reply(self, request: Request) -> Response:
        """Return the file, compressed where the client accepts that, or 304 if the client has it."""
        headers = HEADERS | {"etag": self.etag, "vary": "Accept, Accept-Encoding"}
        known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
        if self.etag in known or self.etag.removeprefix("W/") in known or "*" in known:
            return Response(None, 304, headers)
        content = self.content
        if accepts(request.headers.get("accept-encoding", ""), "gzip"):
            content, headers["content-encoding"] = self.compressed, "gzip"
        return Response(content, 200, headers, self.media_type)


def contents(folder: Path = FOLDER) -> dict[str, bytes]:
    """Return what is sent of the files below a folder, by name; SCRIPT and STYLE contain others."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in MEDIA_TYPES and path.is_file()]
    found = {path.relative_to(folder).as_posix(): sent(path) for path in paths}
    found[STYLE] = _IMPORTED.sub(lambda match: found[match[1].decode()], found[STYLE])
    scripts = {name: content.decode() for name, content in found.items() if name.endswith(".js")}
    bundled = bundle(scripts, SCRIPT).items()
    return found | {name: _ENDED.sub(rb"\1", script.encode()) for name, script in bundled}


def is_loaded(name: str) -> bool:
    """Return True unless this is part of SCRIPT or STYLE, which is what a browser loads."""
    return name in (SCRIPT, STYLE) or not name.endswith((".js", ".css"))


def sent(path: Path) -> bytes:
    """Return what is sent of a file; what others have published is sent as it is."""
    content = path.read_bytes()
    if path.suffix not in (".js", ".css") or path.parent.name == "vendor":
        return content
    found = _FOR_READERS.sub(b"", content)
    if path.suffix == ".css":
        return _SPACED.sub(rb"\1", found)
    found = _CLOSED.sub(rb"\1", _OPENED.sub(rb"\1", _BEHIND_CODE.sub(b"", found)))
    return _OPERATOR.sub(rb"\1", found)


def accepts(header: str, name: str) -> bool:
    """Return True if an Accept header lists this value itself, no wildcard, and not with a quality of 0."""
    for item in header.lower().split(","):
        value, *parameters = (part.strip() for part in item.split(";"))
        if value == name:
            qualities = [part[2:] for part in parameters if part.startswith("q=")]
            return not any(quality.strip("0.") == "" for quality in qualities)
    return False


class StaticPage:
    """The page's files, and the routes to them. `paths` need no key: nothing in them is anyone's data."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {name: PageFile.of(name, content) for name, content in contents(folder).items()}
        self.paths = frozenset({"/", *(PREFIX + name for name in self._files)})
        self.routes = [
            Route("/", self._index, include_in_schema=False),
            Route(PREFIX + "{file:path}", self._file, include_in_schema=False),
        ]

    async def _index(self, request: Request) -> Response:
        """Return the page to browsers; other clients look whether a server is there."""
        if accepts(request.headers.get("accept", ""), "text/html"):
            return self._files[INDEX].reply(request)
        return await root(request)

    async def _file(self, request: Request) -> Response:
        name = request.path_params["file"]
        if (found := self._files.get(name)) is None:
            raise NotFound(f"the page has no file {name[:200]!r}")
        return found.reply(request)
