"""Outputs and names that try to become more than text: nothing runs, nothing is asked for elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from browsing import Opener
from chatting import Chat, Model, pieces, stream
from hostile import NAMES, OUTPUTS
from playwright.sync_api import Page, expect
from reading import CHAPTERS, go_to, until_live

CANARY = "window.canary = () => { window.ran = (window.ran ?? 0) + 1; }"
# What the page itself never makes within a message.
FOREIGN = (
    ".message :is(script, style, img, svg, iframe, object, embed, link, meta, base, a, video, audio, math)"
)
HANDLERS = """() => [...document.querySelectorAll("*")].flatMap((one) => [...one.attributes].filter(
  (attribute) => attribute.name.startsWith("on") || /^(javascript|vbscript|data):/i.test(attribute.value)))
  .map((attribute) => attribute.name + attribute.value)"""


@pytest.fixture
def quiet_page(open_page: Opener) -> Iterator[Page]:
    """A blank page in which whatever runs leaves a trace, which there is none of at the end."""
    page = open_page.blank()
    page.add_init_script(CANARY)
    yield page
    page.wait_for_timeout(300)  # for what runs late
    assert page.evaluate("window.ran ?? 0") == 0
    assert page.locator(FOREIGN).count() == 0
    assert page.evaluate(HANDLERS) == []
    assert page.url.startswith(open_page.url)


@pytest.fixture
def chat(quiet_page: Page, open_page: Opener) -> Chat:
    quiet_page.goto(open_page.url)
    until_live(quiet_page)
    return Chat(quiet_page)


def test_outputs_are_shown_as_they_are(chat: Chat) -> None:
    model = Model(chat.page)
    for text in OUTPUTS:
        model.body = stream([{"content": piece} for piece in pieces(text)])
        answer = chat.ask("Go on.")
        assert chat.text(answer) == text
        answer.get_by_role("button", name="Plain text").click()  # as Markdown again
    assert chat.page.locator(FOREIGN).count() == 0


def test_reasoning_and_calls_are_shown_as_they_are(chat: Chat) -> None:
    model = Model(chat.page)
    for text in OUTPUTS[::4]:
        call = {"index": 0, "id": text, "type": "function", "function": {"name": text, "arguments": ""}}
        arguments = [{"index": 0, "function": {"arguments": piece}} for piece in pieces(text)]
        deltas = [{"reasoning_content": piece} for piece in pieces(text)]
        deltas += [{"tool_calls": [one]} for one in (call, *arguments)]
        model.body = stream(deltas, "tool_calls")
        chat.begin()
        answer = chat.ask("Go on.")
        assert answer.locator(".code pre").text_content() == text
        answer.locator("details summary").first.click()
        assert answer.locator("details .plain").text_content() == text


def test_messages_of_errors_are_shown_as_they_are(chat: Chat, open_page: Opener) -> None:
    model = Model(chat.page)
    model.status = 400
    for text in NAMES:
        model.body = json.dumps({"error": {"message": text, "hint": text, "code": 400}})
        chat.begin()
        assert text in (chat.ask("Go on.").get_by_role("alert").text_content() or "")
        open_page.watch.forget("400")


def test_texts_survive_a_reload_as_they_are(chat: Chat) -> None:
    text = "\n".join(NAMES)
    Model(chat.page).body = stream([{"content": text}])
    chat.ask(NAMES[0])
    chat.page.reload()
    until_live(chat.page)
    assert chat.text(chat.answers.last) == text
    chat.root.get_by_role("button", name="Conversations").click()
    expect(chat.root.locator(".talks .title").first).to_contain_text(NAMES[0])


def test_names_of_the_engine_are_shown_as_they_are(
    quiet_page: Page, open_page: Opener, client: httpx.Client
) -> None:
    with client.stream("GET", "/page/events") as reply:
        frame = json.loads(next(reply.iter_lines()))
    name = " ".join(NAMES)
    facts = frame["facts"]
    facts |= {"names": [name], "version": name, "fingerprint": name}
    facts["model"] |= {"architecture": name, "quantization": name, "kv_cache_dtype": name}
    quiet_page.route("**/page/events", lambda route: route.fulfill(body=json.dumps(frame) + "\n"))
    quiet_page.goto(open_page.url)
    expect(quiet_page.locator(".greeting h2")).to_contain_text(name)
    expect(quiet_page.locator(".model")).to_contain_text(name)
    for chapter in CHAPTERS:
        go_to(quiet_page, chapter)
