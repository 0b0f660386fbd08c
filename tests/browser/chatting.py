"""The chat as a user drives it: settings, messages, answers; and a model that says anything."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Locator, Page, Route, expect

STORY = "Tell me a story about a fox and a lantern."
PIECE = 7  # characters of a chunk: markup comes in parts


class Chat:
    """The chat of a page."""

    def __init__(self, page: Page) -> None:
        self.page, self.root = page, page.locator(".chat")
        self.message = self.root.locator("> .box textarea")

    @property
    def answers(self) -> Locator:
        """All that is shown of the model's messages."""
        return self.root.locator(".message.assistant")

    def begin(self) -> None:
        """Begin another conversation."""
        self.root.get_by_role("button", name="New").click()
        expect(self.answers).to_have_count(0)

    def send(self, text: str) -> None:
        """Write a message and send it by the keyboard."""
        self.message.fill(text)
        self.message.press("Enter")

    def ask(self, text: str) -> Locator:
        """Send a message and wait until it is answered."""
        count = self.answers.count()
        self.send(text)
        expect(self.answers).to_have_count(count + 1)
        return self.until_done()

    def until_done(self) -> Locator:
        """Wait for the end of the last answer."""
        expect(self.answers.last.locator(".actions")).to_have_count(1)  # not while it is made
        return self.answers.last

    def text(self, message: Locator) -> str:
        """Return the text of an answer as the model wrote it."""
        plain = message.get_by_role("button", name="Plain text")
        if plain.get_attribute("aria-pressed") == "false":
            plain.click()
        text = message.locator(".text").text_content()
        assert text is not None
        return text

    def set(self, **settings: str) -> None:
        """Write settings, each by the beginning of its label."""
        self.root.get_by_role("button", name="Settings").click()
        for name, value in settings.items():
            self.root.get_by_label(name.replace("__", " ")).first.fill(value)
        self.root.get_by_role("button", name="Settings").click()


def stream(deltas: list[dict[str, Any]], finish: str = "stop") -> str:
    """Return the events of a streamed answer."""
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    choices += [[{"index": 0, "delta": {}, "finish_reason": finish}], []]
    times = [
        "queue",
        "prefill",
        "decode",
        "preempted",
        "total",
        "ttft",
        "mean_itl",
        "max_itl",
        "cached_saved",
        "ideal",
    ]
    timings = {f"{name}_ms": 1.0 for name in times} | {"interference_ms": 0.0, "grammar_ms": 0.0}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    chunks = [{"choices": one, "usage": usage} for one in choices]
    chunks[-1]["timings"] = timings | {"completion_tokens": 4, "prompt_tokens": 3, "cached_tokens": 0}
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def pieces(text: str) -> list[str]:
    """Cut a text into chunks, whole characters each."""
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


class Model:
    """Stands in for the model: answers each chat of a page with `body`, and notes what was asked."""

    def __init__(self, page: Page) -> None:
        self.body, self.status = "", 200
        self.headers: dict[str, str] = {}
        self.asked: list[dict[str, Any]] = []
        page.route("**/v1/chat/completions", self._answer)

    def _answer(self, route: Route) -> None:
        self.asked.append(json.loads(route.request.post_data or ""))
        kind = "text/event-stream" if self.status == 200 else "application/json"
        headers = {"Content-Type": kind, "x-quire-tag": "0" * 8} | self.headers
        route.fulfill(status=self.status, body=self.body, headers=headers)
