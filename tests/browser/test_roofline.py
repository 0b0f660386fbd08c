"""Chapter 10: steps under the ceilings of the machine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from browsing import Opener
from playwright.sync_api import Page, expect
from reading import Api, go_to, shown, until_live
from server import Server


@pytest.fixture
def chapter(page: Page) -> Page:
    until_live(page)
    go_to(page, "roofline")
    expect(page.locator(".plot")).to_be_visible()
    return page


def send(page: Page, name: str) -> None:
    button = page.get_by_role("button", name=name, exact=True)
    button.click()
    expect(button).to_be_visible()


def first_frame(server: Server) -> dict[str, Any]:
    with server.client() as client, client.stream("GET", "/page/events") as reply:
        return json.loads(next(reply.iter_lines()))


def test_a_pass_says_what_the_api_says(chapter: Page, client: httpx.Client) -> None:
    send(chapter, "1 answer")
    chapter.locator(".plot svg").focus()
    for _ in range(5):
        chapter.keyboard.press("ArrowRight")
        Api(client).check(numbers := shown(chapter, ".plot .note"))
        fields = {one.field.rpartition(".")[2] for one in numbers}
        assert fields == {"num_tokens", "device_s", "predicted_s", "roof_share"}


def test_ceilings_are_those_of_the_api(chapter: Page, client: httpx.Client) -> None:
    numbers = [one for one in shown(chapter) if one.field.startswith("ceilings.")]
    Api(client).check(numbers)
    assert len(numbers) == len(client.get("/steps").json()["ceilings"])


def test_batches_are_measured(chapter: Page) -> None:
    for number, words in ((1, "1 answer"), (4, "4 answers at once"), (16, "16 answers at once")):
        send(chapter, words)
        expect(chapter.locator(f".batches tr:has(th:text-is('{number}')) td").first).to_contain_text("s")


def test_a_prompt_lies_right_of_decoding(chapter: Page) -> None:
    send(chapter, "1 answer")
    send(chapter, "Send a prompt")
    warm, blue = (
        chapter.locator("circle[fill='var(--prefill)']"),
        chapter.locator("circle[fill='var(--decode)']"),
    )
    expect(warm.last).to_be_visible()
    places = "(all) => all.map((one) => Number(one.getAttribute('cx')))"
    assert max(warm.evaluate_all(places)) > max(blue.evaluate_all(places))


def show_steps(open_page: Opener, server: Server, *steps: dict[str, float]) -> Page:
    """Open the chapter on steps with these numbers."""
    frame = first_frame(server)
    costs = dict.fromkeys(("kv_read_bytes", "kv_write_bytes", "activation_bytes"), 0)
    costs |= {"flops": 1e9, "weight_bytes": 1e9}
    usual = {"num_rows": 1, "num_tokens": 1, "num_drafted": 0, "num_accepted": 0, "roof_share": 0.9}
    usual |= {"device_s": 1e-3, "predicted_s": 1e-3, "bound": "cache"} | costs
    rows = [[0, 9, 1, 9, 1, 0, 0, "00000000"]]
    frame["steps"] = [usual | {"index": index, "rows": rows} | one for index, one in enumerate(steps)]
    page = open_page.blank()
    page.route("**/page/events", lambda route: route.fulfill(body=json.dumps(frame) + "\n"))
    page.goto(f"{open_page.url}/#/roofline")
    expect(page.locator(".plot circle[opacity='1']").first).to_be_visible()
    return page


def test_passes_with_more_answers_lie_further_right(open_page: Opener, server: Server) -> None:
    steps = [{"num_rows": size, "num_tokens": size, "flops": size * 1e9} for size in (1, 4, 16)]
    page = show_steps(open_page, server, *steps)
    dots = page.locator(".plot circle[fill='var(--decode)'][opacity='1']")
    places = dots.evaluate_all("(all) => all.map((one) => Number(one.getAttribute('cx')))")
    assert len(places) == 3
    assert places[0] < places[1] < places[2]


@pytest.mark.parametrize(("share", "count"), [(0.9, 0), (1.2, 1)])
def test_ceilings_that_a_step_exceeds_are_said_to_be_stale(
    open_page: Opener, server: Server, share: float, count: int
) -> None:
    page = show_steps(open_page, server, {"roof_share": share})
    expect(page.locator(".chapter .problem")).to_have_count(count)


@pytest.mark.parametrize(("num_drafted", "tone"), [(3, "decode"), (0, "prefill")])
def test_a_step_that_verifies_drafts_decodes(
    open_page: Opener, server: Server, num_drafted: int, tone: str
) -> None:
    page = show_steps(open_page, server, {"num_tokens": 4, "num_drafted": num_drafted})
    expect(page.locator(f".plot circle[opacity='1'][fill='var(--{tone})']")).to_have_count(1)
