"""Images in the chat of a model that sees: chosen, pasted, made smaller, sent and kept."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import Opener
from chatting import Chat, Model, stream
from playwright.sync_api import Browser, Locator, Page, Route, expect
from reading import until_live
from server import PYTHON, Server, running
from test_models import opened

TESTS = Path(__file__).parents[1]
WRITE = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from tiny_vision import picture, write_qwen3_vl
folder = Path(sys.argv[1])
write_qwen3_vl(folder / "seeing")
(folder / "small.png").write_bytes(picture(1, 64, 48))
(folder / "large.png").write_bytes(picture(2, 1600, 400))
"""
PASTE = """([name, data]) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], name, {type: "image/png"}));
  const event = new ClipboardEvent("paste", {clipboardData: files, bubbles: true, cancelable: true});
  document.querySelector(".composer textarea").dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that sees, and two pictures."""
    folder = tmp_path_factory.mktemp("images")
    paths = [str(TESTS / name) for name in ("model", "pure")]
    subprocess.run([PYTHON, "-c", WRITE, str(folder), *paths], check=True)
    return folder


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[Server]:
    with running(model=str(folder / "seeing")) as server:
        yield server


@pytest.fixture
def page(browser: Browser, seeing: Server) -> Iterator[Page]:
    for opener in opened(browser, seeing):
        page = opener()
        until_live(page)
        yield page


def shown(place: Locator) -> Locator:
    return place.locator(".images img")


def sent(body: dict[str, Any]) -> list[str]:
    """The images of the last message of a request."""
    parts = body["messages"][-1]["content"]
    assert parts[-1]["type"] == "text"
    return [part["image_url"]["url"] for part in parts[:-1]]


def test_an_image_is_sent_answered_and_kept(page: Page, folder: Path) -> None:
    chat = Chat(page)
    composer = chat.root.locator(".composer")
    composer.locator("input[type=file]").set_input_files([folder / "small.png", folder / "large.png"])
    expect(shown(composer)).to_have_count(2)
    composer.get_by_label("Remove image 2").click()
    expect(shown(composer)).to_have_count(1)
    chat.set(max_tokens="3")
    with page.expect_request("**/v1/chat/completions") as asked:
        answer = chat.ask("What is it?")
    (url,) = sent(json.loads(asked.value.post_data or ""))
    assert url == "data:image/png;base64," + base64.b64encode((folder / "small.png").read_bytes()).decode()
    expect(answer.locator("summary")).to_contain_text("tokens")
    expect(shown(composer)).to_have_count(0)
    page.wait_for_timeout(1200)  # until it is kept
    page.reload()
    until_live(page)
    own = chat.root.locator(".message.user")
    expect(shown(own)).to_have_attribute("src", url)
    own.get_by_role("button", name="Edit").click()
    own.get_by_label("Message").fill("And now?")
    with page.expect_request("**/v1/chat/completions") as asked:
        own.get_by_label("Message").press("Enter")
    assert sent(json.loads(asked.value.post_data or "")) == [url]
    chat.until_done()


def test_a_large_one_is_pasted_and_made_smaller(page: Page, folder: Path) -> None:
    model, chat = Model(page), Chat(page)
    model.body = stream([{"content": "Yes."}])
    page.evaluate(PASTE, ["large.png", base64.b64encode((folder / "large.png").read_bytes()).decode()])
    image = shown(chat.root.locator(".composer"))
    expect(image).to_have_count(1)
    assert image.evaluate("(one) => [one.naturalWidth, one.naturalHeight]") == [1280, 320]
    chat.ask("What is it?")
    (url,) = sent(model.asked[0])
    assert url.startswith("data:image/jpeg;base64,")


def test_one_image_twice_of_which_one_is_removed(page: Page, folder: Path) -> None:
    composer = Chat(page).root.locator(".composer")
    for count in (1, 2):
        composer.locator("input[type=file]").set_input_files(folder / "small.png")
        expect(shown(composer)).to_have_count(count)
    composer.get_by_label("Remove image 1").click()
    expect(shown(composer)).to_have_count(1)


def test_an_image_that_was_chosen_before_the_model_called_a_tool(page: Page, folder: Path) -> None:
    """It goes with the result of the tool, which names the call."""
    chat, held = Chat(page), list[Route]()
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    chat.send("What is it?")
    expect(chat.root.get_by_role("button", name="Stop")).to_be_visible()
    page.evaluate(PASTE, ["a.png", base64.b64encode((folder / "small.png").read_bytes()).decode()])
    expect(shown(chat.root.locator(".composer"))).to_have_count(1)
    called = {"index": 0, "id": "one", "function": {"name": "look", "arguments": "{}"}}
    held[0].fulfill(body=stream([{"tool_calls": [called]}], "tool_calls"))
    expect(chat.root.get_by_label("Result of look")).to_be_visible()
    chat.send("A fox")
    expect(chat.root.get_by_role("button", name="Stop")).to_be_visible()
    asked = json.loads(held[1].request.post_data or "")
    assert (asked["messages"][-1]["tool_call_id"], len(sent(asked))) == ("one", 1)
    held[1].fulfill(body=stream([{"content": "Yes."}]))
    chat.until_done()


def test_a_file_that_is_no_image_is_said(page: Page, tmp_path: Path) -> None:
    chat, path = Chat(page), tmp_path / "notes.png"
    path.write_text("no picture")
    chat.root.locator(".composer input[type=file]").set_input_files(path)
    expect(chat.root.get_by_role("alert")).to_have_text("notes.png: this browser cannot read it as an image")
    expect(shown(chat.root)).to_have_count(0)


def test_images_of_a_file_from_elsewhere_load_nothing(page: Page, tmp_path: Path) -> None:
    good = "data:image/png;base64,iVBORw0KGgo="
    bad = ["https://example.org/a.png", "data:image/svg+xml;base64,PHN2Zz4=", "javascript:1", 7, None]
    node = {"id": "a", "parent": "", "role": "user", "content": "Look.", "images": [*bad, good]}
    talk = {"id": "t", "title": "Pictures", "nodes": [node]}
    path = tmp_path / "talks.json"
    path.write_text(json.dumps({"conversations": [talk]}))
    chat = Chat(page)
    chat.root.get_by_role("button", name="Conversations").click()
    chat.root.get_by_label("Import").set_input_files(path)
    expect(shown(chat.root.locator(".message.user"))).to_have_attribute("src", good)


def test_a_model_that_reads_text_is_given_none(open_page: Opener, folder: Path) -> None:
    page = open_page()
    until_live(page)
    chat = Chat(page)
    expect(chat.message).to_be_visible()
    expect(chat.root.locator(".composer input[type=file]")).to_have_count(0)
    page.evaluate(PASTE, ["a.png", base64.b64encode((folder / "small.png").read_bytes()).decode()])
    page.wait_for_timeout(300)
    expect(shown(chat.root)).to_have_count(0)
