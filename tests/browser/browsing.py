"""Chromium as the tests drive it: pages in each look, and a watch for what no page may do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright, Request

CHROMIUM = os.environ.get("QUIRE_TEST_CHROMIUM", "chromium")
WIDE = {"width": 1440, "height": 900}
NARROW = {"width": 390, "height": 844}
PATIENCE_MS = 30_000  # on a busy machine
# A violation of the content security policy is an error of the console too, but not for every directive.
REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} refuses ${event.blockedURI}`));
"""


@contextmanager
def chromium(playwright: Playwright) -> Iterator[Browser]:
    """Chromium without a window; AssertionError when it is not installed."""
    path = shutil.which(CHROMIUM)
    assert path, f"{CHROMIUM} is missing: make browser installs it"
    browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    try:
        yield browser
    finally:
        browser.close()


@dataclass
class Watch:
    """What the pages of a context did that no page may do. `home` is the only server they may ask."""

    home: str
    problems: list[str] = field(default_factory=list)

    def attach(self, context: BrowserContext) -> None:
        """Begin to watch, before a page is opened."""
        context.add_init_script(REPORT_VIOLATIONS)
        context.on("console", self._console)
        context.on("weberror", lambda error: self.problems.append(f"error: {error.error}"))
        context.on("request", self._request)
        context.on("page", lambda page: page.on("dialog", self._dialog))

    def forget(self, words: str) -> None:
        """Take away the problems that a test expects; AssertionError when there is none with these words."""
        kept = [problem for problem in self.problems if words not in problem]
        assert len(kept) < len(self.problems), (words, self.problems)
        self.problems = kept

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.problems.append(f"console {message.type}: {message.text} ({message.location.get('url')})")

    def _request(self, request: Request) -> None:
        asked, home = urlsplit(request.url), urlsplit(self.home)
        if asked.scheme not in ("data", "blob") and asked[:2] != home[:2]:
            self.problems.append(f"request elsewhere: {request.method} {request.url}")

    def _dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@dataclass
class Opener:
    """Opens pages of a server in looks of one's choice, all under one watch."""

    browser: Browser
    url: str
    watch: Watch
    contexts: list[BrowserContext] = field(default_factory=list)

    def __call__(
        self,
        path: str = "/",
        *,
        dark: bool = False,
        narrow: bool = False,
        still: bool = False,
        **options: Any,
    ) -> Page:
        """Open a page in a context of its own, so with empty storage. `options` are those of a context."""
        page = self.blank(dark=dark, narrow=narrow, still=still, **options)
        page.goto(self.url + path)
        return page

    def blank(self, *, dark: bool = False, narrow: bool = False, still: bool = False, **options: Any) -> Page:
        """An empty page, for a test that has to prepare something first."""
        context = self.browser.new_context(
            viewport=NARROW if narrow else WIDE,
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if still else "no-preference",
            **options,
        )
        context.set_default_timeout(PATIENCE_MS)
        self.contexts.append(context)
        self.watch.attach(context)
        return context.new_page()

    def close(self) -> None:
        """Close every context, with its pages."""
        for context in self.contexts:
            context.close()
