"""Chapter 4: the blocks of the cache, and two requests that share the first of them."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect
from reading import Api, go_to, shown, until_live

LIMIT_MS = 60_000  # for two answers, on a machine that does something else as well
NUM_SHARED = 12  # full blocks of the 200 tokens that both prompts begin with
ROWS = "(rows) => rows.map((row) => [...row.querySelectorAll('.cells i')].map((cell) => cell.innerText))"


@pytest.fixture
def sent(page: Page, api: Api) -> Page:
    """The chapter after its two requests."""
    api.attach(page)
    until_live(page)
    go_to(page, "blocks")
    page.get_by_role("button", name="Send two that begin alike").click()
    expect(page.locator(".versus")).to_be_visible(timeout=LIMIT_MS)
    expect(page.get_by_role("button", name="while both ran")).to_be_visible()
    api.until_answered(page, 2)
    return page


def words(page: Page) -> Locator:
    return page.locator(".memory + .note")


def test_the_second_request_finds_what_the_first_computed(sent: Page, api: Api) -> None:
    last = [one["timings"] for one in api.answers[-2:]]
    first, second = sorted(last, key=lambda one: one["cached_tokens"])
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 16 * NUM_SHARED)
    numbers = shown(sent, ".versus")
    assert len(numbers) == 8
    for timings, column in ((first, numbers[::2]), (second, numbers[1::2])):
        for one in column:
            one.check(timings[one.field.removeprefix("timings.")])
    expect(sent.locator(".figure").last).to_contain_text(f"differs: here {NUM_SHARED}.")


def test_both_tables_begin_with_the_same_blocks(sent: Page) -> None:
    first, second = sent.locator(".tables li").evaluate_all(ROWS)
    assert first[:NUM_SHARED] == second[:NUM_SHARED]
    assert all(cell.endswith("2") for cell in first[:NUM_SHARED])  # references
    assert not set(first[NUM_SHARED:]) & set(second[NUM_SHARED:])
    cells = sent.locator(".tables li").first.locator(".cells i")
    expect(cells.nth(NUM_SHARED - 1)).to_have_class("shared-ink  ")
    expect(cells.nth(NUM_SHARED)).to_have_class("owner-0  ")
    count = int(sent.locator(".tables li .note").first.inner_text().split()[0])  # at whatever moment this is
    expect(cells.last).to_have_class("owner-0 part " if count < 16 * cells.count() else "owner-0  ")
    expect(sent.locator(".tables")).to_contain_text("192 of them found")


def test_a_block_says_who_holds_it(sent: Page) -> None:
    tags = sent.locator(".tables code").all_inner_texts()
    cell = sent.locator(".tables li").first.locator(".cells i").nth(1)
    number = int(cell.inner_text()[:-1])
    cell.click()
    said = f"Block {number}: reference count 2, for tokens 16 to 31 of {tags[0]} and {tags[1]}."
    expect(words(sent)).to_contain_text(f"{said} A prompt can find it.")
    expect(cell).to_have_class("shared-ink  here")
    sent.get_by_role("button", name="now").click()
    expect(words(sent)).to_contain_text(f"Block {number}: reference count 0. A prompt can find it.")
    memory = sent.locator(".memory")
    memory.press("ArrowRight")
    expect(memory).to_have_attribute("aria-valuenow", str(number + 1))
    memory.press("ArrowLeft")
    expect(memory).to_have_attribute("aria-valuenow", str(number))
    memory.click(position={"x": 5, "y": 5})
    expect(memory).to_have_attribute("aria-valuenow", "0")


def test_the_counts_are_those_of_the_engine(sent: Page, api: Api, client: httpx.Client) -> None:
    sent.get_by_role("button", name="now").click()
    expect(sent.locator(".tables")).to_have_count(0)
    numbers = shown(sent, ".stats")
    assert [one.field for one in numbers] == ["cache.num_held", "cache.num_free", "cache.num_findable"]
    api.check(numbers)
    assert [float(one.value) for one in numbers[:2]] == [0, client.get("/load").json()["num_free_blocks"]]
