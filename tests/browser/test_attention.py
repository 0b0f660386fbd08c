"""Chapter 5: the tiles of real rows, their bytes, and a merge of partitions that is really computed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect
from reading import go_to, until_live
from server import Server, running

NUM_PROMPT, NUM_TOKENS = 384, 16
PARTITION = 64  # quire/program/ops/attention.py


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that drafts nothing: each step after the prompt computes one token."""
    with running("--speculative", "off") as server:
        yield server


@pytest.fixture
def sent(page: Page) -> Page:
    """The chapter after a prompt of 384 tokens and an answer of 16."""
    until_live(page)
    go_to(page, "attention")
    button = page.get_by_role("button", name=f"Send {NUM_PROMPT} tokens")
    button.click()
    expect(button).to_be_visible()
    expect(page.get_by_text(f"{NUM_PROMPT + NUM_TOKENS - 1} scores for")).to_be_visible()
    return page


def value(figure: Locator, label: str) -> float:
    found = figure.locator(".stat", has_text=label).locator(".value").get_attribute("data-value")
    assert found is not None
    return float(found)


def test_bytes_are_those_of_the_positions_that_are_seen(sent: Page, client: httpx.Client) -> None:
    model = client.get("/server_info").json()["model"]
    score = 4 * model["num_layers"] * model["num_heads"]
    last = NUM_PROMPT + NUM_TOKENS - 1
    for tone, count, seen in (("prefill", NUM_PROMPT, NUM_PROMPT), ("decode", 1, last)):
        figure = sent.locator(f".figure:has(.tiles.{tone})")
        assert value(figure, "keys and values read") == seen * model["kv_bytes_per_token"]
        assert value(figure, "not stored") == score * count * seen


def test_a_row_is_divided_into_the_tiles_of_the_engine(sent: Page, client: httpx.Client) -> None:
    model = client.get("/server_info").json()["model"]
    unit = 64 * model["num_kv_heads"] // model["num_heads"]
    ends = range(unit, NUM_PROMPT + unit, unit)
    expected = sum(math.ceil(min(end, NUM_PROMPT) / PARTITION) for end in ends)
    expect(sent.locator(".tiles.prefill rect")).to_have_count(expected)
    expect(sent.locator(".tiles.decode rect")).to_have_count(
        math.ceil((NUM_PROMPT + NUM_TOKENS - 1) / PARTITION)
    )


def test_stored_scores_would_grow_with_the_square(sent: Page) -> None:
    said = sent.locator(".plot .note")
    slider = sent.get_by_role("slider", name="prompt")
    slider.focus()
    sent.keyboard.press("Home")
    expect(said).to_contain_text("64 tokens")
    small = float(re.search(r"([\d.,]+) times", said.inner_text())[1].replace(",", ""))
    sent.keyboard.press("End")
    expect(said).to_contain_text("131,072 tokens")
    large = float(re.search(r"([\d.,]+) times", said.inner_text())[1].replace(",", ""))
    assert large / small == pytest.approx(131_072 / 64, rel=0.01)


def test_partitions_merged_give_the_result_of_one(sent: Page) -> None:
    rows = sent.locator(".sums tbody tr").evaluate_all(
        "(rows) => rows.map((row) => [...row.querySelectorAll('td')].map((one) => Number(one.innerText)))"
    )
    scores, values = ([2.1, 0.3, 3, 1.2], [4, 1, 7, 2])
    for row in rows:
        assert row[2] == row[3]
    weights = [math.exp(one) for one in scores]
    result = sum(weight * one for weight, one in zip(weights, values, strict=True)) / sum(weights)
    assert rows[-1][2] == pytest.approx(result, abs=6e-4)
