"""The chat while it is read and driven: keys, what is in view, waiting, and how texts are laid out."""

from __future__ import annotations

import json

import pytest
from browsing import Opener, Watch
from chatting import STORY, Chat, Model, pieces, stream
from playwright.sync_api import Page, expect
from reading import until_live

TEXT = """# A title

A line with *one*, **two** and `three`,
and a [place](https://example.org/a).

- first
  - inner
1. second

| a | b |
|---|---|
| 1 | 2 |

```python
x = "<b>"
```
"""
LONG = "\n\n".join(f"Paragraph {number} of a long answer." for number in range(60))
# Texts that are cut into lines, as is done to lay one out.
WATCH_LAYOUT = """() => {
  const split = String.prototype.split;
  window.laidOut = new Set();
  String.prototype.split = function (mark, ...rest) {
    if (mark === "\\n") window.laidOut.add(String(this));
    return split.call(this, mark, ...rest);
  };
}"""
# As soon as an answer begins; a key pressed from outside may come when it is over.
PRESS_ESCAPE = """() => {
  const observer = new MutationObserver(() => {
    if (!document.querySelector(".message.assistant .text")) return;
    observer.disconnect();
    const event = new KeyboardEvent("keydown", {key: "Escape", bubbles: true});
    document.querySelector(".composer textarea").dispatchEvent(event);
  });
  observer.observe(document.querySelector(".chat"), {childList: true, subtree: true});
}"""
FROM_END = "(list) => list.scrollHeight - list.scrollTop - list.clientHeight"


@pytest.fixture
def chat(page: Page) -> Chat:
    until_live(page)
    return Chat(page)


@pytest.fixture
def model(page: Page) -> Model:
    model = Model(page)
    model.body = stream([{"content": "Yes."}])
    return model


def test_an_example_begins_a_conversation(chat: Chat, model: Model) -> None:
    chat.root.locator(".greeting").get_by_role("button").first.click()
    assert chat.text(chat.until_done()) == "Yes."
    assert model.asked[0]["messages"] == [{"role": "user", "content": STORY}]
    expect(chat.root.get_by_label("Name of this conversation")).to_have_value(STORY)


def test_enter_sends_and_shift_enter_breaks_the_line(chat: Chat, model: Model) -> None:
    chat.message.press_sequentially("One")
    chat.message.press("Shift+Enter")
    chat.message.press_sequentially("two")
    assert model.asked == []
    chat.message.press("Enter")
    chat.until_done()
    assert model.asked[0]["messages"][0]["content"] == "One\ntwo"
    expect(chat.message).to_have_value("")
    expect(chat.message).to_be_focused()


def test_escape_stops(chat: Chat) -> None:
    schema = {"type": "array", "items": {"const": 7}, "minItems": 300, "maxItems": 300}
    chat.set(JSON__schema=json.dumps(schema))
    chat.page.evaluate(PRESS_ESCAPE)
    chat.send("Count.")
    answer = chat.until_done()
    expect(answer.locator(".receipt")).to_contain_text("stopped")
    assert chat.text(answer).count("7") < 300


def test_escape_leaves_a_message_as_it_was(chat: Chat, model: Model) -> None:
    chat.ask("Go on.")
    own = chat.root.locator(".message.user")
    own.get_by_role("button", name="Edit").click()
    expect(own.get_by_label("Message")).to_be_focused()
    own.get_by_label("Message").fill("Stop.")
    own.get_by_label("Message").press("Escape")
    expect(own.locator(".text")).to_have_text("Go on.")
    expect(chat.root.get_by_label("Messages")).to_be_focused()
    assert len(model.asked) == 1


def test_a_text_is_laid_out_and_kept_as_it_is(chat: Chat, model: Model) -> None:
    model.body = stream([{"content": piece} for piece in pieces(TEXT)])
    answer = chat.ask("Go on.").locator(".text")
    for found, text in {
        "h3": "A title",
        "em": "one",
        "strong": "two",
        "p code >> nth=0": "three",
        "p code >> nth=1": "https://example.org/a",
        "li >> nth=0": "first",
        "th >> nth=1": "b",
        "td >> nth=1": "2",
        "pre": 'x = "<b>"',
    }.items():
        expect(answer.locator(found)).to_have_text(text)
    expect(answer.locator("a, img, b")).to_have_count(0)
    assert chat.text(chat.answers.last) == TEXT


def test_the_view_follows_its_end_unless_the_reader_has_left_it(chat: Chat, model: Model) -> None:
    model.body = stream([{"content": piece} for piece in pieces(LONG)])
    chat.ask("Go on.")
    view = chat.root.get_by_label("Messages")
    assert view.evaluate(FROM_END) == pytest.approx(0, abs=2)
    view.evaluate("(list) => { list.scrollTop = 0 }")
    expect(chat.root.get_by_role("button", name="To the end")).to_be_visible()
    chat.answers.last.get_by_role("button", name="Plain text").dispatch_event("click")  # draws again
    chat.page.wait_for_timeout(50)
    assert view.evaluate("(list) => list.scrollTop") == 0
    chat.root.get_by_role("button", name="To the end").click()
    assert view.evaluate(FROM_END) == pytest.approx(0, abs=2)


def test_only_the_message_that_changes_is_drawn(chat: Chat, model: Model) -> None:
    for _ in range(3):
        chat.ask("Go on.")
    chat.page.evaluate(WATCH_LAYOUT)
    model.body = stream([{"content": piece} for piece in pieces(LONG)])
    chat.ask("And then?")
    laid_out = chat.page.evaluate("[...window.laidOut]")
    assert LONG in laid_out
    assert "Yes." not in laid_out


def test_a_server_that_is_busy_is_asked_again_when_it_says(chat: Chat, model: Model, watch: Watch) -> None:
    body, model.body = model.body, json.dumps({"error": {"message": "too many requests wait"}})
    model.status, model.headers = 503, {"Retry-After": "2"}
    answer = chat.ask("Go on.")
    watch.forget("503")  # Chromium reports every reply of this kind
    expect(answer.get_by_role("alert")).to_contain_text("too many requests wait")
    button = answer.get_by_role("button", name="Try again")
    expect(button).to_have_text("Try again in 2 s")
    expect(button).to_be_disabled()
    expect(button).to_have_text("Try again in 1 s")
    model.status, model.body, model.headers = 200, body, {}
    button.click()
    assert chat.text(chat.until_done()) == "Yes."
    expect(chat.answers).to_have_count(1)
    expect(chat.root.locator(".versions")).to_have_count(0)


def test_an_answer_that_breaks_off_is_kept_and_said(chat: Chat, model: Model) -> None:
    model.body = stream([{"content": "Yes"}]).split("data: [DONE]")[0].replace('"stop"', "null")
    answer = chat.ask("Go on.")
    expect(answer.get_by_role("alert")).to_contain_text("broke off")
    assert chat.text(answer) == "Yes"


def test_what_others_added_is_in_the_receipt(chat: Chat, model: Model) -> None:
    parts = {"interference_ms": 3.0, "interference_prefill_ms": 2.0, "interference_decode_ms": 1.0}
    plain, more = '"interference_ms": 0.0, "grammar_ms": 0.0', json.dumps(parts | {"grammar_ms": 0.5})[1:-1]
    for body, count in ((model.body, 0), (model.body.replace(plain, more), 1)):
        model.body = body
        answer = chat.ask("Go on.")
        answer.locator(".receipt summary").click()
        for field in ("interference_prefill_ms", "interference_decode_ms", "grammar_ms"):
            expect(answer.locator(f"[data-field='timings.{field}']")).to_have_count(count)


def test_code_is_copied(open_page: Opener) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    until_live(page)
    chat = Chat(page)
    Model(page).body = stream([{"content": TEXT}])
    chat.ask("Go on.").locator(".code").get_by_role("button", name="Copy").click()
    button = chat.answers.locator(".code").get_by_role("button")
    expect(button).to_have_text("Copied")
    expect(button).to_be_focused()
    assert page.evaluate("navigator.clipboard.readText()") == 'x = "<b>"'
