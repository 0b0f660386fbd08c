"""The watch itself: it sees each thing that no page may do, on a page that does it."""

from __future__ import annotations

import pytest
from browsing import Opener
from playwright.sync_api import Route

FAULTY = {
    "console error": "<script>console.error('wrong')</script>",
    "error: late": "<script>setTimeout(() => { throw new Error('late') })</script>",
    "error: refused": "<script>Promise.reject(new Error('refused'))</script>",
    "404": "<script>fetch('/nothing-here')</script>",
    "request elsewhere": "<img src='http://127.0.0.1:9/picture.png'>",
    "dialog: hello": "<script>alert('hello')</script>",
    "policy: style-src-attr": "<p style='color: red'>styled</p>",
    "policy: font-src": "<style>@font-face{font-family:f;src:url(/f.woff2)} p{font-family:f}</style><p>text",
}
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src-elem 'unsafe-inline'; connect-src *; img-src *"
)


@pytest.mark.parametrize("words", FAULTY)
def test_seen(open_page: Opener, words: str) -> None:
    page = open_page.blank()

    def give(route: Route) -> None:
        head = {"Content-Type": "text/html", "Content-Security-Policy": POLICY}
        route.fulfill(body=f"<!doctype html><title>faulty</title>{FAULTY[words]}", headers=head)

    page.route("**/faulty", give)
    page.goto(f"{open_page.url}/faulty")
    page.wait_for_timeout(100)
    open_page.watch.forget(words)
    open_page.watch.problems.clear()  # a request that is refused is an error of the console too
