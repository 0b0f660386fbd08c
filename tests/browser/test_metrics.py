"""Chapter 9: the latencies of answers, the goals that they keep, and where their time went."""

from __future__ import annotations

import re
from itertools import pairwise
from statistics import quantiles
from typing import Any

import httpx
import pytest
from browsing import Opener
from playwright.sync_api import Page, Route, expect
from reading import Api, go_to, shown, until_live

NUM_SENT = 12


@pytest.fixture
def loaded(page: Page, api: Api) -> Page:
    """The chapter after its load."""
    api.attach(page)
    until_live(page)
    go_to(page, "metrics")
    expect(page.locator(".chapter .empty")).to_contain_text("No answers yet")
    page.get_by_role("button", name="Send 12 requests").click()
    expect(page.get_by_role("button", name="Sending")).to_be_visible()
    expect(page.get_by_role("button", name="Send 12 requests")).to_be_visible()
    answered = page.locator(".stat", has_text="within both goals").locator(".value")
    expect(answered).to_contain_text(f"of {NUM_SENT}")  # all are drawn
    return page


def kept(page: Page) -> str:
    return page.locator(".stat", has_text="within both goals").locator(".value").inner_text()


def drag(page: Page, name: str, by: float) -> None:
    line = page.get_by_role("slider", name=f"{name} goal").locator("rect").first.bounding_box()
    assert line is not None
    x, y = line["x"] + line["width"] / 3, line["y"] + line["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x, y + by / 2)
    page.mouse.move(x, y + by)
    page.mouse.up()


def test_receipts_are_the_timings_of_the_api(loaded: Page, api: Api) -> None:
    assert len(api.answers) == NUM_SENT
    slider = loaded.get_by_role("slider", name="answer", exact=True)
    seen = set()
    for number in range(1, NUM_SENT + 1):
        slider.fill(str(number))
        numbers = shown(loaded, ".facts")
        total = next(float(one.value) for one in numbers if one.field == "timings.total_ms")
        timings = next(one["timings"] for one in api.answers if one["timings"]["total_ms"] == total)
        for one in numbers:
            one.check(timings[one.field.removeprefix("timings.")])
        assert len(numbers) == 11
        seen.add(total)
    assert seen == {one["timings"]["total_ms"] for one in api.answers}


def test_the_parts_of_the_bar_are_the_whole(loaded: Page) -> None:
    sizes = "(all) => all.map((one) => [one.getBBox().x, one.getBBox().width])"
    bar = loaded.locator(".figure svg[aria-hidden]").last
    boxes = bar.locator("rect[height='32']:not(.saved)").evaluate_all(sizes)
    assert len(boxes) == 4
    for (x, width), (following, _) in pairwise(boxes):
        assert following == pytest.approx(x + width, abs=0.01)
    assert boxes[0][0] == 0
    saved = bar.locator(".saved").evaluate_all(sizes)[0]
    assert boxes[-1][0] + boxes[-1][1] == pytest.approx(saved[0], abs=0.01)


def timed(page: Page) -> tuple[list[Any], list[float]]:
    """Return the answers with their times, and the milliseconds until the first token of each."""
    answers = page.evaluate('async () => (await import("/page/js/api.js")).answers')
    return answers, [1e3 * (one["token_s"][0] - one["sent_s"]) for one in answers]


def goal_ms(page: Page, name: str) -> float:
    return float(page.get_by_role("slider", name=f"{name} goal").get_attribute("aria-valuenow") or 0)


def p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else sum(values)


def test_each_token_has_its_place(loaded: Page) -> None:
    answers, firsts = timed(loaded)
    places = {}
    for tone in ("prefill", "decode"):
        path = loaded.locator(f".latencies > .{tone}-ink > path").first.get_attribute("d") or ""
        places[tone] = [(float(x), float(y)) for x, y in re.findall(r"M(\S+) (\S+?)h", path)]
    assert len(places["decode"]) == sum(len(one["token_s"]) - 1 for one in answers)
    wide = loaded.locator(".latencies").evaluate("(one) => one.clientWidth")
    assert all(-5 <= x <= wide for x, _ in (*places["prefill"], *places["decode"]))
    assert max(x for x, _ in places["decode"]) == pytest.approx(wide, abs=5)
    heights = [-y for _, y in places["prefill"]]
    assert sorted(range(NUM_SENT), key=heights.__getitem__) == sorted(range(NUM_SENT), key=firsts.__getitem__)


def test_goals_are_dragged_and_answers_counted(loaded: Page) -> None:
    answers, firsts = timed(loaded)
    gaps = [p99([1e3 * (b - a) for a, b in pairwise(one["token_s"])]) for one in answers]
    for name, by, expected in (
        ("TTFT", 400, 0),
        ("TTFT", -400, None),
        ("ITL", -400, NUM_SENT),
        ("ITL", 130, None),
        ("ITL", 20, None),
        ("ITL", 400, None),  # not 0 if all of an answer came at once
        ("ITL", -400, NUM_SENT),
    ):
        drag(loaded, name, by)
        limits = goal_ms(loaded, "TTFT"), goal_ms(loaded, "ITL")
        good = sum(first <= limits[0] and gap <= limits[1] for first, gap in zip(firsts, gaps, strict=True))
        assert kept(loaded) == f"{good} of {NUM_SENT}"
        assert expected in (None, good)
    goodput = loaded.locator(".stat", has_text="goodput").locator(".value").get_attribute("data-value")
    span_s = max(one["token_s"][-1] for one in answers) - answers[0]["sent_s"]
    assert float(goodput or -1) == pytest.approx(good / span_s)


def test_goals_are_moved_by_keyboard(loaded: Page) -> None:
    """From above all to below all."""
    drag(loaded, "TTFT", -400)
    drag(loaded, "ITL", -400)
    goal = loaded.get_by_role("slider", name="TTFT goal")
    goal.focus()
    limits, counts = [], []
    for _ in range(125):
        loaded.keyboard.press("ArrowDown")
        limits.append(goal_ms(loaded, "TTFT"))
        counts.append(int(kept(loaded).split()[0]))
    assert limits == sorted(limits, reverse=True)
    assert (counts[0], counts[-1]) == (NUM_SENT, 0)
    _, firsts = timed(loaded)
    assert counts == [sum(first <= limit for first in firsts) for limit in limits]


def test_an_answer_of_the_chat_is_shown_though_the_engine_has_no_news(
    open_page: Opener, client: httpx.Client
) -> None:
    with client.stream("GET", "/page/events") as events:
        frame = next(events.iter_lines())
    frames, page = [frame], open_page.blank()

    def give(route: Route) -> None:
        if frames:
            route.fulfill(body=f"{frames.pop()}\n")  # later ones wait forever

    page.route("**/page/events", give)
    page.goto(f"{open_page.url}/#/metrics")
    expect(page.locator(".pulse")).to_have_text("no connection")
    page.wait_for_timeout(1700)  # until it has tried again
    page.get_by_role("textbox", name="Message").fill("Hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("slider", name="TTFT goal")).to_be_visible()
    assert kept(page) in ("0 of 1", "1 of 1")
