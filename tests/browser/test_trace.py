"""The button of traces: what it says, the file it saves, and what it gives to a stand-in for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Opener, Watch
from playwright.sync_api import Page, Route
from server import Server, running

VIEWER = "https://ui.perfetto.dev"
# It listens a while after it was opened, as the real one does, and shows what it got.
STAND_IN = """<!doctype html><title>viewer</title><script>
setTimeout(() => addEventListener("message", ({ data, source, origin }) => {
  if (data === "PING") source.postMessage("PONG", origin);
  else document.title = `${data.perfetto.fileName} ${data.perfetto.buffer.byteLength}`;
}), 300);
</script>"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that records."""
    with running("--record", str(tmp_path_factory.mktemp("recording") / "incidents")) as server:
        yield server


@pytest.fixture
def dialog(page: Page, server: Server) -> Page:
    """The page with the button's dialog open and a trace made."""
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 8}).raise_for_status()
    page.get_by_role("button", name="Trace", exact=True).click()
    page.get_by_role("button", name="Make the trace").click()
    page.get_by_text("The trace has").wait_for()
    return page


def test_it_says_what_is_in_a_trace_and_where_it_goes(dialog: Page) -> None:
    words = dialog.get_by_role("dialog").inner_text()
    assert "no prompts, no answers, no names and no keys" in words
    assert "nothing is uploaded" in words
    assert VIEWER.removeprefix("https://") in words


def test_a_trace_is_saved(dialog: Page, tmp_path: Path) -> None:
    with dialog.expect_download() as download:
        dialog.get_by_role("button", name="Save as a file").click()
    assert download.value.suggested_filename == "quire.pftrace"
    download.value.save_as(tmp_path / "trace")
    assert (tmp_path / "trace").read_bytes()[0] == 0x0A  # a packet of Perfetto's format
    assert b"step" in (tmp_path / "trace").read_bytes()


def test_perfetto_gets_the_trace_in_a_new_tab(dialog: Page, watch: Watch) -> None:
    context = dialog.context

    def give(route: Route) -> None:
        route.fulfill(body=STAND_IN, content_type="text/html")

    context.route(f"{VIEWER}/**", give)
    with context.expect_page() as opened:
        dialog.get_by_role("button", name="Open in Perfetto").click()
    opened.value.wait_for_function("document.title.startsWith('quire.pftrace ')")
    assert int(opened.value.title().split()[1]) > 1000
    dialog.get_by_role("button", name="Open in Perfetto").wait_for()  # not "Opening" any more
    watch.forget("request elsewhere: GET https://ui.perfetto.dev/")


def test_the_keyboard_is_enough(page: Page) -> None:
    page.get_by_role("button", name="Trace", exact=True).focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()
    assert page.evaluate("document.activeElement.textContent") == "Trace"


def test_without_a_recording_it_says_how_to_make_one(open_page: Opener) -> None:
    with running() as plain:
        page = open_page.blank()
        open_page.watch.home = plain.url
        page.goto(plain.url)
        page.get_by_role("button", name="Trace", exact=True).click()
        assert "--record" in page.get_by_role("dialog").inner_text()
        page.close()
