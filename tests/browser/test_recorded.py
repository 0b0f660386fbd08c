"""The page as `quire page` writes it, from a plain server of files: a recording, without an engine."""

from __future__ import annotations

import functools
import http.server
import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Opener
from playwright.sync_api import Page, expect
from server import PYTHON, cache_folder

ROOT = Path(__file__).parents[2]
# Without pauses, and with the experiment of the last chapter.
WRITE = """
import sys
from pathlib import Path
from quire.server.page import export, visit
visit.PAUSE_S, visit.PARAMETERS = 0.0, {"fleet": visit.PARAMETERS["fleet"]}
export.export(Path(sys.argv[1]), "", print)
"""
CHAPTERS = sorted(path.stem for path in (ROOT / "quire/server/page/static/js/chapters").glob("*.js"))


class Files(http.server.SimpleHTTPRequestHandler):
    """A server of files that says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a site, which has the page in a folder."""
    root = tmp_path_factory.mktemp("site")
    command = [PYTHON, "-c", WRITE, str(root / "demo")]
    subprocess.run(command, check=True, env={"PATH": "", "QUIRE_CACHE_DIR": cache_folder()})
    handler = functools.partial(Files, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/demo"
        server.shutdown()


@pytest.fixture
def page(open_page: Opener, site: str) -> Page:
    open_page.watch.home = site
    page = open_page.blank()
    page.goto(f"{site}/")
    return page


def test_it_says_that_it_is_a_recording(page: Page) -> None:
    expect(page.get_by_role("status").first).to_have_text("recorded")
    assert "recording of the demo model" in page.locator(".banner").inner_text()
    assert "What is 3 + 4?" in page.get_by_label("Chat").inner_text()


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_chapter_opens(page: Page, site: str, name: str) -> None:
    page.goto(f"{site}/#/{name}")
    page.locator(".chapter h2").wait_for()
    assert len(page.locator(".chapter").inner_text()) > 200


def test_a_prompt_is_answered_from_the_recording(page: Page, site: str) -> None:
    page.goto(f"{site}/#/prefill")
    page.get_by_role("button", name="Send it").click()
    expect(page.get_by_role("button", name="Send it")).to_be_visible(timeout=60_000)  # as long as it took
    assert page.locator(".problem").count() == 0
    expect(page.locator("td.measured[data-value]").first).to_be_visible()


def test_two_prompts_that_begin_alike_were_recorded(page: Page, site: str) -> None:
    page.goto(f"{site}/#/blocks")
    page.get_by_role("button", name="Send two that begin alike").click()
    found = page.locator(".versus [data-field='timings.cached_tokens']")
    expect(found.last).to_have_text("192")
    expect(found.first).to_have_text("0")


def test_what_was_drafted_for_the_conversation_was_recorded(page: Page, site: str) -> None:
    page.goto(f"{site}/#/speculation")
    with urllib.request.urlopen(f"{site}/page/recorded.json") as reply:
        answers = [answer for answer in json.load(reply)["answers"] if answer["kind"] == "chat"]
    assert answers[0]["timings"]["accepted_tokens"] > 0
    accepted = page.locator(".tokens mark").all_inner_texts()
    assert len(accepted) == answers[-1]["timings"]["accepted_tokens"]
    assert page.locator(".tokens > span").count() == len(answers[-1]["drafting"])
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_disabled()


def test_its_trace_is_there(page: Page) -> None:
    page.get_by_role("button", name="Trace", exact=True).click()
    page.get_by_role("button", name="Make the trace").click()
    page.get_by_text("The trace has").wait_for()
