"""The page as files for any static web server, with a recording in place of an engine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quire.bench.server_process import served
from quire.errors import ConfigError
from quire.server.page.static import DIRECTIVES, INDEX, contents, is_loaded
from quire.server.page.visit import RecordedVisit, Say, Visitor, visit

LIVE, RECORDED = '<meta name="quire-data" content="live">', '<meta name="quire-data" content="recorded">'
CHARSET = '<meta charset="utf-8">'
TRACE_S = 60


def export(folder: Path, key: str, say: Say, *, force: bool = False) -> int:
    """Record the demo model and write its page to `folder`; return the bytes written.

    Raises ConfigError, before anything is recorded, for a folder that is not empty, unless `force`.
    """
    if folder.is_dir() and any(folder.iterdir()) and not force:
        hint = "name another one, or give --force to replace the files of an earlier page"
        raise ConfigError(f"{folder} is not empty", hint)
    folder.mkdir(parents=True, exist_ok=True)
    trace = b""

    def keep_trace(visitor: Visitor) -> None:
        nonlocal trace
        trace = visitor.get(f"/trace?last={TRACE_S}s")

    say("starting quire serve demo")
    with served(["demo"], recorded=True) as url:
        recording = visit(url, key, keep_trace, say)
    return write(folder, recording, trace)


def write(folder: Path, recording: RecordedVisit, trace: bytes) -> int:
    """Write the page's files, a recording and a trace; return the bytes written."""
    sent = {name: content for name, content in contents().items() if is_loaded(name)}
    written = {f"page/{name}": content for name, content in sent.items() if name != INDEX}
    written[INDEX] = recorded_index(sent[INDEX].decode()).encode()
    written["page/recorded.json"] = msgspec.json.encode(recording)
    written["page/recorded.pftrace"] = trace
    for name, content in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return sum(map(len, written.values()))


def recorded_index(index: str) -> str:
    """Return index.html for a page with a recording; its policy is in the file, as no server sends one."""
    for line in (CHARSET, LIVE):
        if index.count(line) != 1:
            raise ValueError(f"{INDEX} has no line {line}, or several")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(DIRECTIVES)}">'
    head = f'{CHARSET}\n{policy}\n<meta name="referrer" content="no-referrer">'
    return index.replace(CHARSET, head).replace(LIVE, RECORDED)
