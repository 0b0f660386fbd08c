"""A server with a key: the page needs none, its data do, and the key stays in its tab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import Opener, Watch
from playwright.sync_api import Browser, Page, Request, expect
from reading import until_live
from server import Server, running

KEY = "a-key-of-this-test/+="
STATUSES = """(asked) => Promise.all(asked.map((one) => {
  const [method, path] = one.split(" ");
  return fetch(path, {method}).then((reply) => reply.status);
}))"""


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with running(QUIRE_API_KEY=KEY) as server:
        yield server


@pytest.fixture
def opener(browser: Browser, keyed: Server) -> Iterator[Opener]:
    watch = Watch(keyed.url)
    opener = Opener(browser, keyed.url, watch)
    yield opener
    opener.close()
    assert watch.problems == []


def give(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")


def test_the_key_is_asked_for_and_kept_in_the_tab_alone(opener: Opener) -> None:
    page, requests = opener.blank(), []

    def note(request: Request) -> None:
        requests.append((request.url, request.headers.get("authorization")))

    page.on("request", note)
    page.goto(opener.url)
    expect(page.get_by_role("heading", name="This server asks for a key")).to_be_visible()
    opener.watch.forget("401")  # Chromium reports every reply of this kind
    requests.clear()
    give(page, KEY)
    until_live(page)
    expect(page.locator(".chapter h2")).to_be_visible()
    assert [(url.removeprefix(opener.url), key) for url, key in requests if key] == [
        ("/v1/models", f"Bearer {KEY}"),
        ("/page/events", f"Bearer {KEY}"),
    ]
    assert not [url for url, _ in requests if "a-key-of" in url]
    assert KEY in page.evaluate("JSON.stringify(Object.values(sessionStorage))")
    assert page.evaluate("[localStorage.length, document.cookie, location.href.includes('a-key')]") == [
        0,
        "",
        False,
    ]
    page.reload()
    until_live(page)  # the same tab knows it
    other = page.context.new_page()
    other.goto(opener.url)
    expect(other.get_by_label("API key")).to_be_visible()  # another one does not
    opener.watch.forget("401")


def test_a_wrong_key_is_asked_for_again(opener: Opener) -> None:
    page = opener()
    give(page, "wrong")
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_visible()
    give(page, KEY)
    until_live(page)
    opener.watch.forget("401")


def test_nothing_is_known_without_a_key(opener: Opener) -> None:
    page = opener()
    expect(page.get_by_label("API key")).to_be_visible()
    opener.watch.forget("401")
    assert page.locator("[data-value]").count() == 0
    statuses = page.evaluate(
        STATUSES, ["GET page/events", "GET steps", "GET trace", "POST page/experiments/cache"]
    )
    assert statuses == [401] * 4
    opener.watch.forget("401")
