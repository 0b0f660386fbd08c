"""The chapters with experiments: their numbers are those of the lines that the server sends."""

from __future__ import annotations

import re
from math import exp
from typing import Any

import httpx
import pytest
from browsing import Watch
from playwright.sync_api import Page, expect
from reading import Api, Shown, go_to, shown, until_live

BUTTONS = {
    "cache": "Compute it both ways",
    "quantization": "Ask in bf16, int8 and int4",
    "heads": "Measure it",
    "scale": "Simulate it",
}
ROUTERS = {"round-robin": "in turns", "two-choices": "two choices", "prefix": "by prefix"}
SMALL = {"replicas": 2, "load": 4, "num_requests": 60}  # of a fleet
MAX_MS = 65_000  # the server ends an experiment before
EXPERIMENTS = {name: "fleet" if name == "scale" else name for name in BUTTONS}


@pytest.fixture
def api(page: Page, client: httpx.Client) -> Api:
    found = Api(client)
    found.attach(page)
    return found


def run(page: Page, api: Api, name: str) -> list[Any]:
    """Start the experiment of a chapter; return its lines when it is done."""
    until_live(page)
    go_to(page, name)
    button = page.get_by_role("button", name=BUTTONS[name])
    expect(page.locator(".figure .empty")).to_be_visible()
    with page.expect_event("requestfinished", lambda one: "/page/experiments/" in one.url, timeout=MAX_MS):
        button.click()
    expect(page.locator(".spinner")).to_have_count(0)
    expect(page.locator(".figure .empty")).to_have_count(0)
    lines = api.experiments[EXPERIMENTS[name]]
    assert list(lines[-1]) == ["done"]
    return lines


def of_experiments(page: Page) -> list[Shown]:
    return [one for one in shown(page) if one.field.startswith("experiments.")]


@pytest.mark.parametrize(("name", "count"), [("cache", 2), ("quantization", 9), ("heads", 6), ("scale", 7)])
def test_numbers_are_those_of_the_lines(page: Page, api: Api, name: str, count: int) -> None:
    run(page, api, name)
    numbers = shown(page)
    assert len(of_experiments(page)) == count
    api.check(numbers)


def test_the_cache_is_compared_for_the_chosen_lengths(page: Page, api: Api) -> None:
    until_live(page)
    go_to(page, "cache")
    page.get_by_role("slider", name="prompt").fill("0")
    page.get_by_role("slider", name="answer").fill("9")
    lines = run(page, api, "cache")
    done = lines[-1]["done"]
    assert (done["prompt_tokens"], done["num_tokens"]) == (16, 9)
    expect(page.locator(".chapter")).to_contain_text("Both gave the same 9 tokens")


def test_the_cache_passes_the_weights_where_the_sizes_say(page: Page, client: httpx.Client) -> None:
    until_live(page)
    go_to(page, "cache")
    page.get_by_role("slider", name="sequences").fill("100")
    model = client.get("/server_info").json()["model"]
    crossing = -(-model["weight_bytes"] // (64 * model["kv_bytes_per_token"]))
    expect(page.locator(".chapter")).to_contain_text(f"From {crossing} tokens each on, the cache is larger.")
    page.get_by_role("slider", name="sequences").fill("0")
    expect(page.locator(".chapter")).to_contain_text("the cache stays smaller")


def test_the_first_token_that_differs_is_marked(page: Page, api: Api) -> None:
    lines = run(page, api, "quantization")
    kinds = [line["kind"] for line in lines if "kind" in line]
    cards = page.locator(".card")
    for number, kind in enumerate(kinds):
        text = re.sub(r"\s+", " ", cards.nth(number).locator(".answer").inner_text())
        assert text == re.sub(r"\s+", " ", "".join(kind["pieces"])).strip()
        found = kind["first_difference"]
        if found is None:
            expect(cards.nth(number).locator("mark")).to_have_count(0)
            continue
        assert (
            cards.nth(number).locator("mark").inner_text().strip() == kind["pieces"][found["index"]].strip()
        )
        expect(cards.nth(number)).to_contain_text(f"{exp(found['bf16_gap']):.2f} times as likely")


def test_the_time_that_bytes_alone_would_take_is_outlined(page: Page, api: Api) -> None:
    lines = run(page, api, "quantization")
    sizes = [line["kind"]["weight_read_bytes"] for line in lines if "kind" in line]
    outlines = page.locator(".shares .predicted")
    expect(outlines).to_have_count(len(sizes))
    whole = outlines.first.bounding_box()
    assert whole is not None
    for number, size in enumerate(sizes):
        expect(outlines.nth(number)).to_have_css("border-top-style", "dashed")
        box = outlines.nth(number).bounding_box()
        assert box is not None
        assert box["width"] == pytest.approx(whole["width"] * size / sizes[0], abs=2)


def test_heads_share_and_a_memory_holds_more_of_them(page: Page) -> None:
    until_live(page)
    go_to(page, "heads")
    groups = page.locator(".figure svg g")
    expect(groups).to_have_count(4)
    groups.nth(1).focus()
    expect(page.locator("g.dim")).to_have_count(3)
    batches = page.locator(".bar .value").all_inner_texts()
    assert [int(text) for text in batches] == [32, 64, 256]  # 64 MiB of 512 tokens each
    page.get_by_role("button", name="1", exact=True).click()
    expect(groups).to_have_count(1)
    expect(page.locator(".stat .value")).to_have_text("512 B")


def test_the_fleet_is_simulated_as_chosen(page: Page, api: Api) -> None:
    until_live(page)
    go_to(page, "scale")
    page.get_by_role("slider", name="replicas").fill("3")
    page.get_by_role("slider", name="peak load").fill("40")  # of 100 on its way from 1 to 32
    page.get_by_role("button", name="on", exact=True).click()
    page.get_by_role("button", name="one dies").click()
    setup = run(page, api, "scale")[0]["setup"]
    assert (setup["replicas"], setup["autoscaling"], setup["death"]) == (3, True, True)
    assert setup["peak_requests_per_s"] == pytest.approx(4 * setup["one_requests_per_s"])
    expect(page.locator(".chapter")).to_contain_text(setup["law"])


def test_each_router_has_its_lanes_and_its_line(page: Page, api: Api) -> None:
    page.route("**/page/experiments/*", lambda route: route.continue_(post_data={**SMALL, "death": True}))
    lines = run(page, api, "scale")
    lanes = page.locator(".figure svg[aria-label^='Open requests']")
    for router, words in ROUTERS.items():
        (found,) = [line["router"] for line in lines if line.get("router", {}).get("router") == router]
        page.get_by_role("button", name=words, exact=True).click()
        expect(lanes.locator(".decode-ink")).to_have_count(len(found["replicas"]))
        expect(lanes.locator("text", has_text="died")).to_have_count(1)
        api.check(of_experiments(page))
        values = {one.field.rpartition(".")[2]: one.value for one in of_experiments(page)}
        assert float(values["p99_ttft_ms"]) == found["p99_ttft_ms"]
    plot = page.locator(".plot").first
    plot.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    for words in ROUTERS.values():
        expect(plot.locator(".note")).to_contain_text(words)


def test_moments_of_lanes_and_runs_are_read_by_keyboard(page: Page, api: Api) -> None:
    page.route("**/page/experiments/*", lambda route: route.continue_(post_data=SMALL))
    lines = run(page, api, "scale")
    (prefix,) = [line["router"] for line in lines if line.get("router", {}).get("router") == "prefix"]
    page.locator(".figure svg[aria-label^='Open requests']").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    counts = [one["open"][2] for one in prefix["replicas"]]
    words = ", ".join(f"{one:.2f}".rstrip("0").rstrip(".") for one in counts)
    expect(page.locator(".figure .note", has_text="requests open")).to_contain_text(f": {words} requests")
    costs = page.locator(".plot").last
    costs.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    expect(costs.locator(".note")).to_contain_text("replica-hours an hour")


def test_a_busy_server_refuses_and_the_page_says_so(page: Page, watch: Watch) -> None:
    busy = '{"error": {"message": "the server is busy: experiments run only while no request does"}}'
    page.route("**/page/experiments/*", lambda route: route.fulfill(status=503, body=busy))
    until_live(page)
    go_to(page, "heads")
    page.get_by_role("button", name=BUTTONS["heads"]).click()
    expect(page.get_by_role("alert")).to_contain_text("the server is busy")
    expect(page.get_by_role("button", name=BUTTONS["heads"])).to_be_enabled()
    watch.forget("status of 503")


def test_an_error_after_the_first_lines_is_said(page: Page) -> None:
    lines = '{"progress": 0.5}\n{"error": {"message": "the experiment was stopped after 60 s"}}\n'
    page.route("**/page/experiments/*", lambda route: route.fulfill(body=lines))
    until_live(page)
    go_to(page, "quantization")
    page.get_by_role("button", name=BUTTONS["quantization"]).click()
    expect(page.get_by_role("alert")).to_contain_text("stopped after 60 s")
