"""Conversations as the browser keeps them: files of them, other tabs, and a storage that is full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chatting import Chat, Model, stream
from playwright.sync_api import Page, expect
from reading import until_live

KEPT_MS = 1500  # a change is kept within a second
FILL = """() => {
  for (let size = 1 << 20; size >= 1; ) {
    try { localStorage[`filler ${Math.random()}`] = "x".repeat(size); } catch { size >>= 1; }
  }
}"""
FREE = """() => {
  for (const key of Object.keys(localStorage)) if (key.startsWith("filler")) localStorage.removeItem(key);
}"""

COUNT_FILES = """() => {
  const { createObjectURL, revokeObjectURL } = URL, later = window.setTimeout;
  URL.createObjectURL = (file) => { window.files = (window.files ?? 0) + 1; return createObjectURL(file); };
  URL.revokeObjectURL = (url) => { window.files -= 1; revokeObjectURL(url); };
  window.setTimeout = (work, ms, ...given) => later(work, Math.min(ms, 500), ...given);
}"""


@pytest.fixture
def chat(page: Page) -> Chat:
    until_live(page)
    Model(page).body = stream([{"content": "Yes."}])
    return Chat(page)


def titles(chat: Chat) -> list[str]:
    """Open the list of conversations and return their names."""
    button = chat.root.get_by_role("button", name="Conversations")
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    return chat.root.locator(".talks .title").all_inner_texts()


def take(chat: Chat, path: Path, content: Any) -> None:
    """Import a file with this content."""
    path.write_text(json.dumps(content))
    titles(chat)
    chat.root.locator("input[type=file]").set_input_files(path)


def test_conversations_are_exported_and_imported(chat: Chat, tmp_path: Path) -> None:
    chat.set(system="Be brief.", temperature="0")
    chat.ask("First?")
    chat.answers.last.get_by_role("button", name="Ask again").click()
    expect(chat.root.locator(".versions")).to_contain_text("2 / 2")
    chat.begin()
    chat.ask("Second?")
    assert titles(chat) == ["Second?", "First?"]
    with chat.page.expect_download() as download:
        chat.root.get_by_role("button", name="Export all").click()
    content = json.loads(Path(download.value.path()).read_text())
    for _ in range(2):
        delete = chat.root.get_by_role("button", name="Delete").first
        delete.click()
        expect(delete).to_have_text("Really?")
        delete.click()
    expect(chat.root.locator(".talks .title")).to_have_count(0)
    assert not [key for key in chat.page.evaluate("Object.keys(localStorage)") if "chat" in key]
    take(chat, tmp_path / "talks.json", content)
    expect(chat.answers).to_have_count(1)
    assert sorted(titles(chat)) == ["First?", "Second?"]
    chat.root.get_by_role("button", name="First?", exact=True).click()
    expect(chat.root.locator(".versions")).to_contain_text("2 / 2")
    expect(chat.root.locator(".about")).to_contain_text("system, temperature")


def test_a_file_that_was_refused_is_chosen_again(chat: Chat, tmp_path: Path) -> None:
    """Which a browser does not report while the choice still has it."""
    take(chat, tmp_path / "talks.json", {"no": "conversations"})
    expect(chat.root.get_by_role("alert")).to_contain_text("no conversations")
    assert chat.root.locator("input[type=file]").evaluate("input => input.files.length") == 0


def test_the_memory_of_an_exported_file_is_released(chat: Chat) -> None:
    chat.page.evaluate(COUNT_FILES)
    chat.ask("First?")
    titles(chat)
    with chat.page.expect_download():
        chat.root.get_by_role("button", name="Export all").click()
    chat.page.wait_for_timeout(1000)
    assert chat.page.evaluate("window.files") == 0


def test_names_and_texts_are_found(chat: Chat) -> None:
    for text in ("About foxes", "About lanterns"):
        chat.begin()
        chat.ask(text)
    chat.root.get_by_label("Name of this conversation").fill("Light")
    titles(chat)
    search = chat.root.get_by_label("Search")
    found = {"LIGHT": ["Light"], "foxes": ["About foxes"], "lanterns": ["Light"], "cats": []}
    for words, names in found.items():
        search.fill(words)
        expect(chat.root.locator(".talks .title")).to_have_text(names)


WRONG: list[Any] = [
    7,
    {"conversations": 7},
    {"conversations": [None, 7, {"nodes": 7}, {"nodes": [7, None]}]},
]


@pytest.mark.parametrize("content", WRONG)
def test_a_file_of_something_else_changes_nothing(chat: Chat, tmp_path: Path, content: Any) -> None:
    chat.ask("First?")
    take(chat, tmp_path / "talks.json", content)
    chat.page.wait_for_timeout(50)
    assert titles(chat) == ["First?"]


def test_a_file_with_wrong_parts_is_read_as_far_as_it_goes(chat: Chat, tmp_path: Path) -> None:
    nodes = [
        {"id": "a", "parent": "", "role": "user", "content": {"__html": "<b>"}, "calls": "none"},
        {"id": "b", "parent": "a", "role": ["x"], "content": "kept", "calls": [7, {"name": {}}], "usage": 7},
        {"id": "b", "parent": "b", "role": "user", "content": "a ring"},
        {"id": "d", "parent": "nobody", "role": "user", "content": "an orphan"},
    ]
    take(chat, tmp_path / "talks.json", {"conversations": [{"title": {}, "setup": [7], "nodes": nodes}]})
    expect(chat.root.locator(".message")).to_have_count(2)
    expect(chat.root.locator(".message").last).to_contain_text("kept")
    assert titles(chat) == ["talks.json"]


def test_a_full_storage_is_said_and_the_chat_goes_on(chat: Chat) -> None:
    chat.page.evaluate(FILL)
    assert chat.text(chat.ask("First?")) == "Yes."
    problem = chat.root.get_by_role("alert")
    expect(problem).to_contain_text("storage of this browser is full")
    chat.page.evaluate(FREE)
    chat.ask("Second?")
    expect(problem).to_have_count(0)
    chat.page.reload()
    expect(chat.answers).to_have_count(2)


def test_a_damaged_conversation_hides_no_other(chat: Chat) -> None:
    chat.ask("First?")
    chat.page.wait_for_timeout(KEPT_MS)
    chat.page.evaluate("localStorage['quire-chat:damaged'] = '{'")
    chat.page.reload()
    expect(chat.answers).to_have_count(1)
    assert titles(chat) == ["First?"]
    expect(chat.root.get_by_role("alert")).to_have_count(0)


def test_what_another_tab_keeps_replaces_nothing_that_is_not_kept_yet(chat: Chat) -> None:
    chat.ask("First?")
    chat.page.wait_for_timeout(KEPT_MS)
    other = chat.page.context.new_page()
    other.goto(chat.page.url)
    chat.set(system="Be brief.")
    other.evaluate("localStorage['quire-chat:another'] = '{}'")
    chat.page.wait_for_timeout(100)
    expect(chat.root.locator(".about")).to_contain_text("system")
    other.evaluate(FILL)
    chat.page.wait_for_timeout(100)
    chat.page.bring_to_front()
    assert chat.text(chat.ask("Second?")) == "Yes."
    chat.page.wait_for_timeout(KEPT_MS)
    other.evaluate("localStorage.removeItem('quire-chat:another')")
    chat.page.wait_for_timeout(100)
    expect(chat.answers).to_have_count(2)


def test_tabs_show_the_same_conversations(chat: Chat) -> None:
    chat.ask("First?")
    chat.page.wait_for_timeout(KEPT_MS)
    other = Chat(chat.page.context.new_page())
    other.page.goto(chat.page.url)
    assert titles(other) == ["First?"]
    other.root.locator(".talks .title").click()
    expect(other.answers).to_have_count(1)
    chat.ask("Second?")
    expect(other.answers).to_have_count(2)
