"""Chapter 3: the timeline of steps, a step in full, and what a static batch would have wasted."""

from __future__ import annotations

import json

import httpx
import pytest
from browsing import Opener
from playwright.sync_api import Locator, Page, expect
from reading import Api, go_to, shown, until_live
from server import Server

NUM_SENT = 16


@pytest.fixture
def sent(page: Page) -> Page:
    """The chapter after 16 requests."""
    until_live(page)
    go_to(page, "batching")
    page.get_by_role("button", name="Send at once").click()
    expect(page.get_by_role("button", name="Computing")).to_be_visible()
    expect(page.get_by_role("button", name="Send at once")).to_be_visible()
    return page


def timeline(page: Page) -> Locator:
    return page.get_by_role("slider", name="Step of the timeline")


def index_of(page: Page, name: str = "valuenow") -> int:
    value = timeline(page).get_attribute(f"aria-{name}")
    assert value is not None
    return int(value)


def test_requests_share_steps_and_leave_one_by_one(sent: Page) -> None:
    sent.get_by_role("slider", name="shown").focus()
    sent.keyboard.press("End")  # all steps: those of short answers may be over when others begin
    assert sent.locator(".timeline text").count() >= NUM_SENT / 4  # a lane for each of a connection
    expect(sent.locator(".timeline .wasted")).to_have_count(NUM_SENT)
    ends = sent.locator(".timeline .wasted").evaluate_all("(all) => all.map((one) => one.getBBox().x)")
    assert len({round(end) for end in ends}) >= 4
    # Answers of 30, 150, 110 and 70 tokens: 240 of 600 rows would be empty.
    expect(sent.locator(".stat", has_text="static batch").locator(".value")).to_have_text("40 %")


def test_a_step_says_what_the_api_says(sent: Page, client: httpx.Client) -> None:
    timeline(sent).focus()
    for _ in range(5):
        sent.keyboard.press("ArrowLeft")
    Api(client).check(numbers := shown(sent, ".facts"))
    values = {one.field.rpartition(".")[2]: one.value for one in numbers}
    assert int(values["index"]) == index_of(sent)
    assert {"device_s", "predicted_s", "roof_share", "bound", "idle_s", "core_wait_s"} <= values.keys()
    counts = sent.locator(".rows td:nth-child(4)").all_inner_texts()
    assert len(counts) == int(values["num_rows"])
    assert sum(map(int, counts)) == int(values["num_tokens"])


@pytest.mark.parametrize("width", ["steps", "time"])
def test_a_step_is_opened_where_it_is_clicked(sent: Page, width: str) -> None:
    sent.get_by_role("button", name=width, exact=True).click()
    sent.get_by_role("button", name="Pause").click()
    box = timeline(sent).bounding_box()
    assert box is not None
    expect(sent.locator(".timeline .unit")).to_have_count(1 if width == "time" else 0)
    found = []
    for share in (0.2, 0.5, 0.9):
        timeline(sent).click(position={"x": share * box["width"], "y": 40})
        place = "(one) => [one.getBBox().x, one.getBBox().width]"
        x, wide = sent.locator(".timeline .chosen").evaluate(place)
        assert x - 1 <= share * box["width"] <= x + wide + 10  # a pause may follow it
        found.append(index_of(sent))
    assert found == sorted(set(found))


def test_steps_are_walked_by_keyboard_and_held(sent: Page, client: httpx.Client) -> None:
    timeline(sent).focus()
    sent.keyboard.press("End")
    last = index_of(sent)
    assert last == index_of(sent, "valuemax")
    sent.keyboard.press("ArrowLeft")
    assert index_of(sent) < last
    sent.keyboard.press("Home")
    assert index_of(sent) == index_of(sent, "valuemin")
    client.post("/v1/completions", json={"prompt": "More", "max_tokens": 4}).raise_for_status()
    sent.wait_for_timeout(300)
    assert index_of(sent, "valuemax") == last
    sent.get_by_role("button", name="Resume").click()
    expect(timeline(sent)).not_to_have_attribute("aria-valuemax", str(last))


def test_without_steps_it_says_what_to_do(open_page: Opener) -> None:
    page = open_page.blank()
    page.route("**/page/events", lambda route: route.fulfill(body='{"t": 0, "steps": []}\n'))
    page.goto(f"{open_page.url}/#/batching")
    expect(page.locator(".empty")).to_have_text(
        "No steps yet. Send some requests, or say something in the chat."
    )


@pytest.mark.parametrize(("drafted", "dots"), [(3, 1), (0, 0)])
def test_steps_that_verify_drafts_only_decode(
    open_page: Opener, server: Server, drafted: int, dots: int
) -> None:
    """Four tokens in one row are three drafts beside the next token of an answer, or a piece of a prompt."""
    with server.client() as client, client.stream("GET", "/page/events") as reply:
        frame = json.loads(next(reply.iter_lines()))
    frame["steps"] = [
        {"index": 0, "num_rows": 1, "num_tokens": 4, "num_drafted": drafted, "num_accepted": drafted}
        | {"device_s": 0.004, "began_s": 0.0, "ended_s": 0.004, "rows": [[0, 9, 4, 9, 1, 0, 0, "00000000"]]}
    ]
    page = open_page.blank()
    page.route("**/page/events", lambda route: route.fulfill(body=json.dumps(frame) + "\n"))
    page.goto(f"{open_page.url}/#/batching")
    plot = page.locator(".figure", has_text="The more rows").locator(".plot")
    expect(plot.locator("path[stroke-dasharray]")).to_have_count(1)
    expect(plot.locator("circle")).to_have_count(dots)
    if dots:
        plot.locator("svg").focus()
        page.keyboard.press("ArrowRight")
        expect(plot.locator(".note")).to_contain_text("measured 1 ms")  # each of four tokens
