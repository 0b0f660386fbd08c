"""Chapter 1: a request as it was predicted and as it went, in two phases."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import httpx
import pytest
from browsing import Opener
from playwright.sync_api import Locator, Page, expect
from reading import Api, go_to, shown, until_live

NUM_PROMPT, NUM_TOKENS = 256, 32


@pytest.fixture
def chapter(page: Page) -> Page:
    until_live(page)
    go_to(page, "prefill")
    expect(page.locator(".card")).to_have_count(2)
    return page


def send(page: Page) -> None:
    page.get_by_role("button", name="Send it").click()
    expect(page.locator("[data-field='timings.decode_ms']")).to_be_visible()


def number(card: Locator, label: str, kind: str) -> float:
    value = card.get_by_role("row", name=label, exact=False).locator(f"td.{kind}").first
    return float(value.get_attribute("data-value") or "nan")


def all_steps(client: httpx.Client) -> list[dict[str, Any]]:
    return client.get("/steps", params={"last": 4096}).json()["steps"]


def test_both_phases_are_sums_of_the_steps_of_the_api(chapter: Page, client: httpx.Client) -> None:
    api = Api(client)
    api.attach(chapter)
    before = max((step["index"] for step in all_steps(client)), default=-1)
    send(chapter)
    chapter.wait_for_timeout(200)
    api.check(numbers := shown(chapter, ".cards"))
    assert {one.field for one in numbers} == {"timings.prefill_ms", "timings.decode_ms"}
    steps = [step for step in all_steps(client) if step["index"] > before]
    known = list(accumulate(step["num_tokens"] for step in steps))
    first = known.index(NUM_PROMPT) + 1  # of those that only generate
    phases = {"prefill": steps[:first], "decode": steps[first:]}
    # A step may verify drafts as well, of which a few are right now and then.
    assert len(steps) - first + sum(step["num_accepted"] for step in steps) == NUM_TOKENS - 1
    for name, its in phases.items():
        card = chapter.locator(f".card.{name}")
        tokens = sum(step["num_tokens"] for step in its)
        for kind, field in (("measured", "device_s"), ("predicted", "predicted_s")):
            seconds = sum(step[field] for step in its)
            assert number(card, "time a token", kind) == pytest.approx(seconds / tokens)
            assert number(card, "tokens", kind) == tokens
            assert number(card, "steps", kind) == len(its)
        took_ms = next(one for one in numbers if name in one.field).value
        assert sum(step["device_s"] for step in its) * 1e3 <= float(took_ms)


def test_bytes_of_weights_are_shared_by_the_tokens_of_a_prompt(chapter: Page, client: httpx.Client) -> None:
    law = client.get("/steps/law").json()
    cost = dict(
        zip([one["kind"] for one in law["law"]["features"]], law["cost"]["weight_bytes"], strict=True)
    )
    for name, tokens in (("prefill", NUM_PROMPT), ("decode", 1)):
        card = chapter.locator(f".card.{name}")
        expected = cost["one"] / tokens + cost["tokens"]
        assert number(card, "weights read, a token", "predicted") == pytest.approx(expected)


def test_the_length_changes_what_is_predicted_and_forgets_what_was_measured(chapter: Page) -> None:
    prefill = chapter.locator(".card.prefill")
    send(chapter)
    assert number(prefill, "tokens", "measured") == NUM_PROMPT
    slider = chapter.get_by_role("slider", name="prompt")
    slider.focus()
    chapter.keyboard.press("Home")
    assert number(prefill, "tokens", "predicted") == 1
    expect(prefill.locator("td.measured[data-value]")).to_have_count(0)
    alone = number(prefill, "time a token", "predicted")
    chapter.keyboard.press("End")
    assert number(prefill, "time a token", "predicted") < alone
    expect(slider).to_have_attribute("aria-valuetext", "992 tokens")


def test_the_picture_can_be_stopped(chapter: Page) -> None:
    moving = "() => document.getAnimations().filter((one) => one.playState === 'running').length"
    assert chapter.evaluate(moving) > 0
    chapter.get_by_role("button", name="Pause").click()
    assert chapter.evaluate(moving) == 0


def test_a_plot_is_read_by_keyboard(chapter: Page) -> None:
    send(chapter)
    plot = chapter.locator(".plot svg")
    plot.focus()
    said = chapter.locator(".plot .note")
    for _ in range(3):
        chapter.keyboard.press("ArrowRight")
    expect(said).to_contain_text("prefill predicted")
    before = said.inner_text()
    chapter.keyboard.press("ArrowRight")
    expect(said).not_to_have_text(before)


def test_without_ceilings_it_says_what_to_do(open_page: Opener) -> None:
    page = open_page.blank()
    frame = (
        '{"t": 0, "facts": {"names": ["demo"], "ceilings": null, "model": {}}, "law": null, "steps": []}\n'
    )
    page.route("**/page/events", lambda route: route.fulfill(body=frame))
    page.goto(f"{open_page.url}/#/prefill")
    expect(page.locator(".chapter .empty")).to_contain_text("quire probe")
