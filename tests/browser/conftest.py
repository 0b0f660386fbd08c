"""Fixtures of tests that drive the server's page in Chromium.

`make browser` runs them, in an environment of its own. A test fails when one of its pages reports an error,
violates the content security policy, opens a dialog or asks any other server.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from browsing import PATIENCE_MS, Opener, Watch, chromium
from playwright.sync_api import Browser, Page, expect, sync_playwright
from reading import Api
from server import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server with default flags for all tests. Leave it as it was."""
    with running() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """A client of that server."""
    with server.client() as client:
        yield client


@pytest.fixture
def api(client: httpx.Client) -> Api:
    """What the API says of the requests of a page."""
    return Api(client)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, one process for all tests."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright, chromium(playwright) as browser:
        yield browser


@pytest.fixture
def watch(server: Server) -> Iterator[Watch]:
    """What the pages of a test did that no page may do: nothing, at its end."""
    watch = Watch(server.url)
    yield watch
    assert watch.problems == []


@pytest.fixture
def open_page(browser: Browser, server: Server, watch: Watch) -> Iterator[Opener]:
    """A function that opens the server's page: open_page("/", dark=True, narrow=True, still=True)."""
    opener = Opener(browser, server.url, watch)
    yield opener
    opener.close()


@pytest.fixture
def page(open_page: Opener) -> Page:
    """The server's page, wide and light."""
    return open_page()
