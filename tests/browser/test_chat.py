"""The chat: its answers are those of the API, and stay in the browser."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from browsing import Opener, Watch
from chatting import STORY, Chat
from playwright.sync_api import Page, Request, expect
from reading import Api, shown, until_live

GREEDY = {"temperature": "0"}
VARIED = {"seed": "7", "temperature": "1.3", "top_p": "0.9", "max_tokens": "40"}
LONG = json.dumps({"type": "array", "items": {"const": 7}, "minItems": 200, "maxItems": 200})
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"enum": [3, 4]}},
    "required": ["name", "age"],
}
# Lengths of the last answer, each time that it changes.
WATCH_LENGTHS = """() => {
  window.lengths = [];
  new MutationObserver(() => {
    const texts = document.querySelectorAll(".message.assistant .text");
    if (texts.length) window.lengths.push(texts[texts.length - 1].textContent.length);
  }).observe(document.querySelector(".chat"), {childList: true, characterData: true, subtree: true});
}"""
STOP_AT_THE_FIRST_TEXT = """() => new Promise((resolve) => {
  const observer = new MutationObserver(() => {
    const text = document.querySelector(".message.assistant .text");
    const button = document.querySelector(".chat > .box button.primary");
    if (!text?.textContent || button.textContent !== "Stop") return;
    observer.disconnect();
    button.click();
    resolve();
  });
  observer.observe(document.querySelector(".chat"), {childList: true, characterData: true, subtree: true});
})"""


@pytest.fixture
def asked(page: Page) -> list[dict[str, Any]]:
    """The bodies of the page's requests to the model."""
    bodies: list[dict[str, Any]] = []

    def note(request: Request) -> None:
        if "/v1/" in request.url:
            bodies.append(json.loads(request.post_data or ""))

    page.on("request", note)
    return bodies


@pytest.fixture
def chat(page: Page) -> Chat:
    until_live(page)
    return Chat(page)


def again(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the API the same, and return its answer."""
    del body["stream_options"]
    reply = client.post("/v1/chat/completions", json=body | {"stream": False, "logprobs": True})
    reply.raise_for_status()
    found: dict[str, Any] = reply.json()
    return found


def test_answers_are_those_of_the_api(
    chat: Chat, page: Page, client: httpx.Client, asked: list[dict[str, Any]]
) -> None:
    api = Api(client)
    api.attach(page)
    for number, settings in enumerate(({}, GREEDY, VARIED), 1):
        chat.set(**settings)
        answer = chat.ask(STORY)
        api.until_answered(page, number)
        expected = again(client, asked[-1])
        choice = expected["choices"][0]
        assert chat.text(answer) == choice["message"]["content"]
        tokens = [one["token"] for one in choice["logprobs"]["content"]]
        ends = choice["finish_reason"] == "stop"  # with a token that is no text
        assert chat.text(answer) == "".join(tokens[:-1] if ends else tokens)
        assert api.answers[-1]["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert asked[-1]["seed"] == 7
    assert [len(body["messages"]) for body in asked] == [1, 3, 5]
    assert asked[-1]["messages"][3]["content"] == chat.text(chat.answers.nth(1))


def test_the_receipt_has_the_fields_of_the_api(chat: Chat, page: Page, client: httpx.Client) -> None:
    api = Api(client)
    api.attach(page)
    answer = chat.ask(STORY)
    api.until_answered(page, 1)
    answer.locator(".receipt summary").click()
    expect(answer.locator("[data-field='timings.queue_ms']")).to_be_visible()
    numbers = shown(page, ".message.assistant")
    names = {one.field for one in numbers}
    parts = {
        "queue_ms",
        "prefill_ms",
        "decode_ms",
        "total_ms",
        "ttft_ms",
        "completion_tokens",
    }
    assert {f"timings.{name}" for name in parts} <= names
    api.check(numbers)


def test_answers_come_piece_by_piece(chat: Chat, page: Page) -> None:
    chat.set(JSON__schema=LONG)
    page.evaluate(WATCH_LENGTHS)
    chat.ask("Count.")
    lengths = page.evaluate("window.lengths")
    assert len(set(lengths)) > 2  # how often a busy machine draws is its own affair
    assert lengths == sorted(lengths)


def test_an_answer_can_be_stopped(chat: Chat, page: Page) -> None:
    chat.set(**GREEDY, JSON__schema=LONG)
    page.evaluate(f"() => {{ window.stopped = ({STOP_AT_THE_FIRST_TEXT})(); }}")
    chat.send("Count.")
    page.evaluate("window.stopped")
    answer = chat.until_done()
    assert chat.text(answer).startswith("[")
    assert chat.text(answer).count("7") < 200
    chat.set(JSON__schema="")
    assert chat.text(chat.ask(STORY))


def test_a_message_is_edited_and_asked_again(chat: Chat, asked: list[dict[str, Any]]) -> None:
    chat.set(**GREEDY)
    first = chat.text(chat.ask("What is 3 + 4?"))
    own = chat.root.locator(".message.user")
    chat.set(temperature="7")
    own.get_by_role("button", name="Edit").click()
    own.locator("textarea").fill("What is 20 + 5?")
    own.get_by_role("button", name="Ask again").click()
    expect(chat.root.get_by_role("alert")).to_contain_text("temperature: must be 0 to 2")
    expect(own.locator("textarea")).to_have_value("What is 20 + 5?")  # it can be sent once that is corrected
    chat.set(**GREEDY)
    own.get_by_role("button", name="Edit").click()
    own.locator("textarea").fill("What is 20 + 5?")
    own.get_by_role("button", name="Ask again").click()
    expect(own).to_contain_text("20 + 5")
    second = chat.text(chat.until_done())
    assert first != second
    assert [body["messages"][0]["content"] for body in asked] == ["What is 3 + 4?", "What is 20 + 5?"]
    own.get_by_role("button", name="Previous version").click()
    expect(own).to_contain_text("3 + 4")
    assert chat.text(chat.answers.last) == first


def test_another_answer_has_another_seed_and_the_first_one_stays(
    chat: Chat, asked: list[dict[str, Any]]
) -> None:
    first = chat.text(chat.ask(STORY))
    chat.answers.last.get_by_role("button", name="Ask again").click()
    expect(chat.answers.last.locator(".actions")).to_contain_text("2 / 2")
    second = chat.text(chat.until_done())
    assert first != second
    assert asked[0]["seed"] != asked[1]["seed"]
    chat.answers.last.get_by_role("button", name="Previous version").click()
    expect(chat.answers.last.locator(".actions")).to_contain_text("1 / 2")
    assert chat.text(chat.answers.last) == first


def test_a_tool_is_called_and_its_result_answered(chat: Chat, asked: list[dict[str, Any]]) -> None:
    chat.set(**GREEDY)
    chat.root.get_by_role("button", name="Settings").click()
    chat.root.get_by_role("button", name="Example").last.click()
    chat.root.get_by_role("button", name="Settings").click()
    answer = chat.ask("What is the weather in Paris?")
    expect(answer.locator(".code")).to_contain_text("Calls get_weather")
    arguments = json.loads(answer.locator(".code pre").text_content() or "")
    assert list(arguments) == ["city"]
    expect(chat.root.get_by_label("Result of get_weather")).to_be_visible()
    chat.ask('{"temperature_c": 21}')
    sent = asked[-1]["messages"]
    assert [one["role"] for one in sent] == ["user", "assistant", "tool"]
    assert sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"]
    assert sent[2]["content"] == '{"temperature_c": 21}'


def test_an_answer_has_its_schema(chat: Chat) -> None:
    chat.set(JSON__schema=json.dumps(PERSON))
    found = json.loads(chat.text(chat.ask("Make up a person.")))
    assert found["name"] in ("Ann", "Bob")
    assert found["age"] in (3, 4)


@pytest.mark.parametrize("wrong", [{"JSON__schema": "{"}, {"temperature": "3"}, {"max_tokens": "0"}])
def test_a_wrong_setting_is_named_and_nothing_is_sent(
    chat: Chat, asked: list[dict[str, Any]], wrong: dict[str, str]
) -> None:
    chat.set(**wrong)
    chat.send(STORY)
    expect(chat.root.get_by_role("alert")).to_be_visible()
    assert asked == []
    assert chat.message.input_value() == STORY


def test_the_servers_refusal_is_shown(chat: Chat, watch: Watch, asked: list[dict[str, Any]]) -> None:
    chat.set(JSON__schema='{"type": "nothing"}')
    answer = chat.ask(STORY)
    watch.forget("400")  # Chromium reports every reply of this kind
    expect(answer.get_by_role("alert")).to_contain_text("nothing is not a JSON type")
    chat.set(JSON__schema="")
    answer.get_by_role("button", name="Try again").click()
    expect(chat.answers.last.locator(".receipt")).to_be_visible()
    assert len(asked) == 2


def test_conversations_stay_in_the_browser(chat: Chat, page: Page, open_page: Opener) -> None:
    chat.set(system__prompt="You are brief.", **GREEDY)
    texts = [chat.text(chat.ask(text)) for text in ("What is 3 + 4?", STORY)]
    sent: list[str] = []
    page.on("request", lambda request: sent.append(f"{request.method} {request.url}"))
    page.reload()
    until_live(page)
    chat.root.get_by_role("button", name="Conversations").click()
    chat.root.locator(".talks .title").first.click()
    expect(chat.answers).to_have_count(2)
    assert [chat.text(chat.answers.nth(index)) for index in range(2)] == texts
    assert not [one for one in sent if one.startswith("POST")]
    other = Chat(open_page())
    other.root.get_by_role("button", name="Conversations").click()
    expect(other.root.locator(".talks .title")).to_have_count(0)
