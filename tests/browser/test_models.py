"""A server of several models: which one the page shows and asks, how it is loaded, and what fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import NARROW, Opener, Watch
from chatting import Chat
from playwright.sync_api import Browser, Locator, Page, Request, expect
from reading import until_live
from server import Server, running

DEMO = Path(__file__).parents[2] / "quire/assets/demo"
KEY = "a-key-of-this-test"
BROKEN = "broken-with-a-name-that-is-longer-than-a-phone-is-wide"  # its weights are gone when it is loaded
SENT = "**/v1/chat/completions?model=*"


def opened(browser: Browser, server: Server) -> Iterator[Opener]:
    watch = Watch(server.url)
    opener = Opener(browser, server.url, watch)
    yield opener
    opener.close()
    assert watch.problems == []


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models") / BROKEN
    shutil.copytree(DEMO, folder)
    with running("demo-draft", str(folder), "--max-loaded-memory", "400M", QUIRE_API_KEY=KEY) as server:
        (folder / "model.safetensors").write_bytes(b"")
        yield server


@pytest.fixture
def opener(browser: Browser, several: Server) -> Iterator[Opener]:
    yield from opened(browser, several)


def enter(opener: Opener, **look: bool) -> Page:
    """Open the page and give the key."""
    page = opener(**look)
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(choice(page)).to_be_visible()
    opener.watch.forget("401")
    return page


def choice(page: Page) -> Locator:
    return page.get_by_role("combobox", name="Model")


def said(page: Page) -> Locator:
    """What the page says of the chosen model."""
    return choice(page).locator("option:checked")


def choose(page: Page, name: str) -> None:
    texts = choice(page).locator("option").all_inner_texts()
    choice(page).select_option(label=next(text for text in texts if text.split(" ")[0].endswith(name)))


def test_the_chosen_model_is_loaded_asked_and_kept(opener: Opener, several: Server) -> None:
    page, asked = enter(opener), []

    def note(request: Request) -> None:
        body = json.loads(request.post_data) if request.post_data else {}
        asked.append((request.url.removeprefix(several.url), body.get("model")))

    choose(page, "demo-draft")
    expect(said(page)).to_have_text("demo-draft · not loaded")
    expect(page.locator(".pulse")).to_have_text("not loaded")
    page.on("request", note)
    page.get_by_role("button", name="Load it").click()
    until_live(page)
    expect(said(page)).to_have_text("demo-draft · loaded")
    chat = Chat(page)
    expect(chat.root.get_by_role("heading", name="Ask demo-draft something")).to_be_visible()
    with page.expect_response(SENT) as answer:
        receipt = chat.ask("What is 3 + 4?").locator("summary")
    expect(receipt).to_contain_text("demo-draft")
    assert '"model":"demo-draft"' in answer.value.text()
    page.get_by_role("button", name="Send it").click()
    expect(page.locator(".chapter .spinner")).to_have_count(0)
    expect(page.locator(".chapter td.measured[data-value]").first).to_be_visible()  # by the rows of its feed
    chat.root.get_by_role("button", name="Settings").click()
    page.wait_for_timeout(200)
    assert {model for url, model in asked if url.startswith("/v1/c")} == {"demo-draft"}
    assert {"/page/events?model=demo-draft", "/props?model=demo-draft"} < {url for url, _ in asked}
    page.reload()
    expect(said(page)).to_have_text("demo-draft · loaded")
    until_live(page)
    expect(chat.answers.locator("summary")).to_contain_text("demo-draft")


def test_a_message_loads_the_chosen_model(opener: Opener) -> None:
    page = enter(opener)
    choose(page, "demo")
    chat = Chat(page)
    chat.ask("What is 3 + 4?")
    expect(chat.answers.locator("summary")).to_contain_text("· demo")
    until_live(page)
    expect(page.get_by_role("button", name="Load it")).to_have_count(0)
    other = chat.page.context.new_page()
    other.goto(page.url)
    other.get_by_label("API key").fill(KEY)
    other.keyboard.press("Enter")
    until_live(other)
    choose(other, "demo-draft")
    expect(other.locator(".chapter")).to_have_count(1)
    other.get_by_label("Message", exact=True).fill("What is 3 + 4?")
    other.keyboard.press("Enter")
    expect(other.locator(".message.assistant summary").last).to_contain_text("demo-draft")
    expect(said(page)).to_have_text("demo · loaded")  # each tab has its own
    expect(choice(page).locator("option", has_text="demo-draft")).to_have_text("demo-draft · loaded")
    other.reload()
    expect(said(other)).to_have_text("demo-draft · loaded")  # and not the first that is loaded
    until_live(other)
    opener.watch.forget("401")


def test_a_model_that_cannot_be_loaded_is_an_error(opener: Opener) -> None:
    page = enter(opener, narrow=True)
    choose(page, BROKEN)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.get_by_role("button", name="Load it").click()
    problem = page.locator("header").get_by_role("alert")
    expect(problem).to_contain_text("could not be loaded")
    expect(page.get_by_role("button", name="Load it")).to_be_enabled()
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.get_by_role("button", name="Chat").click()
    chat = Chat(page)
    chat.send("What is 3 + 4?")
    expect(chat.root.get_by_role("alert")).to_contain_text("could not be loaded")
    expect(said(page)).to_contain_text("· not loaded")
    choose(page, "demo")
    expect(page.locator("header").get_by_role("alert")).to_have_count(0)
    opener.watch.forget("503")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, under two names, and an adapter of it that changes nothing."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "tuned").mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "tuned/adapter_config.json").write_text(json.dumps(config))
    about = json.loads((DEMO / "config.json").read_text())
    width, out = about["hidden_size"], about["num_attention_heads"] * about["head_dim"]
    shapes, tensors, end = {"lora_A": [1, width], "lora_B": [out, 1]}, {}, 0
    for part, shape in shapes.items():
        span = [end, end := end + 4 * shape[0] * shape[1]]
        name = f"base_model.model.model.layers.0.self_attn.q_proj.{part}.weight"
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": span}
    header = json.dumps(tensors).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(end)
    (folder / "tuned/adapter_model.safetensors").write_bytes(content)
    names = ("--served-model-name", "demo", "--served-model-name", "other")
    with running(*names, "--adapter-dir", str(folder)) as server:
        yield server


def test_an_adapter_is_chosen_as_a_model(browser: Browser, adapted: Server) -> None:
    for opener in opened(browser, adapted):
        page = opener()
        until_live(page)
        assert choice(page).locator("option").all_inner_texts() == [
            "demo · loaded",
            "tuned of demo · loaded",
        ]
        choose(page, "tuned")
        chat = Chat(page)
        with page.expect_response(SENT) as answer:
            expect(chat.ask("What is 3 + 4?").locator("summary")).to_contain_text("tuned")
        assert '"model":"tuned"' in answer.value.text()
        until_live(page)


def test_one_model_is_no_choice(open_page: Opener) -> None:
    page, urls = open_page.blank(), []
    page.on("request", lambda request: urls.append(request.url))
    page.goto(open_page.url)
    until_live(page)
    expect(choice(page)).to_have_count(0)
    expect(page.locator(".model")).to_contain_text("demo")
    receipt = Chat(page).ask("What is 3 + 4?").locator("summary")
    assert "demo" not in receipt.inner_text()
    assert not [url for url in urls if "model=" in url]
