"""The page as a whole: its weight, its looks, its use by keyboard, and axe-core's judgement of all of it."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import NARROW, Opener
from playwright.sync_api import Locator, Page, Response, expect
from reading import CHAPTERS, go_to, until_live

MOST_BYTES = 62_000
NARROWEST = 320  # pixels, of phones, and of a wide screen at 400 %
LOOKS = {"wide light": {}, "narrow dark": {"narrow": True, "dark": True}}
FOCUSABLE = (
    "a[href], button:enabled, input:enabled, select:enabled, textarea:enabled, summary, [tabindex='0']"
)
# Each visible control that Tab should reach gets a number; `seen` collects those that had the focus.
NUMBER_CONTROLS = """(selector) => {
  const visible = (one) => one.checkVisibility({visibilityProperty: true}) && one.tabIndex >= 0;
  const found = [...document.querySelectorAll(selector)].filter(visible);
  found.forEach((one, index) => { one.dataset.control = index; });
  return found.map((one) => `${one.tagName} ${one.className} ${one.innerText || one.ariaLabel || one.name}`);
}"""
FOCUSED = """() => {
  const one = document.activeElement, style = getComputedStyle(one);
  const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  return {control: one.dataset.control ?? null, isVisible: outlined || style.boxShadow !== "none"};
}"""
RUNNING = """() => document.getAnimations().filter((one) => one.playState === "running").map((one) =>
  `${one.animationName ?? one.transitionProperty} of ${one.effect.target.className}`)"""


def test_each_chapter_has_its_title_and_place(page: Page) -> None:
    until_live(page)
    for number, (name, title) in enumerate(CHAPTERS.items()):
        step = page.locator(".stepper a").nth(number)
        expect(step).to_contain_text(title)
        step.click()
        expect(page).to_have_title(f"{title} · Quire")
        expect(page).to_have_url(f"{page.url.partition('#')[0]}#/{name}")
        expect(page.locator(".stepper [aria-current=page]")).to_contain_text(title)
        expect(page.locator(".chapter")).to_contain_text("In short.")
        assert len(page.locator(".chapter h2").inner_text()) > 5


def test_chapters_are_turned_like_pages(page: Page) -> None:
    for title in list(CHAPTERS.values())[1:]:
        page.locator(".turn a[rel=next]").click()
        expect(page).to_have_title(f"{title} · Quire")
    page.locator(".turn a[rel=prev]").click()
    expect(page).to_have_title(f"{list(CHAPTERS.values())[-2]} · Quire")
    page.go_back()
    expect(page).to_have_title(f"{list(CHAPTERS.values())[-1]} · Quire")


def test_all_that_is_transferred_is_small(open_page: Opener) -> None:
    page, sizes = open_page.blank(), {}

    def count(response: Response) -> None:
        if not response.url.endswith("/events"):
            sizes[response.url] = response.request.sizes()["responseBodySize"]

    page.on("requestfinished", lambda request: count(request.response()))
    page.goto(open_page.url)
    until_live(page)
    for name in CHAPTERS:
        go_to(page, name)
    page.wait_for_timeout(200)
    scripts = sum(size for url, size in sizes.items() if url.endswith(".js"))
    assert 30_000 < scripts < sum(sizes.values()) <= MOST_BYTES, sizes


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_no_violation(open_page: Opener, look: str) -> None:
    page = open_page(**LOOKS[look], still=True, bypass_csp=True)  # axe-core writes styles
    until_live(page)
    for name in CHAPTERS:
        go_to(page, name)
        _fill(page)
        _assert_accessible(page, name)
    if "narrow" in look:
        page.get_by_role("button", name="Chat").click()
    _assert_accessible(page, "chat")


def _fill(page: Page) -> None:
    """Press what starts something in a chapter, and wait until it is done."""
    buttons = page.locator(".chapter .action button.primary:enabled")
    for index in range(buttons.count()):
        page.wait_for_timeout(400)  # experiments are refused while the engine is busy
        buttons.nth(index).click()
        page.wait_for_timeout(100)  # until it turns
        expect(page.locator(".chapter .spinner")).to_have_count(0)


def _assert_accessible(page: Page, place: str) -> None:
    found: dict[str, Any] = Axe().run(page).response
    said = [
        f"{one['id']}: {node['html']}: {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]
    assert not said, (place, said)


def test_a_narrow_page_is_not_wider_than_the_screen(open_page: Opener) -> None:
    page = open_page(narrow=True)
    until_live(page)
    for name in CHAPTERS:
        go_to(page, name)
        _fill(page)
        for width in (NARROWEST, NARROW["width"]):
            page.set_viewport_size({**NARROW, "width": width})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    page.get_by_role("button", name="Chat").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


def test_nothing_moves_where_that_is_preferred(open_page: Opener) -> None:
    page = open_page(still=True)
    until_live(page)
    for name in CHAPTERS:
        go_to(page, name)
        assert page.evaluate(RUNNING) == [], name
    page.get_by_role("button", name="Simulate it").click()
    expect(page.locator(".spinner")).to_be_visible()
    assert page.evaluate(RUNNING) == []
    page.get_by_role("button", name="stop").click()


def test_the_spinner_turns_otherwise(page: Page) -> None:
    until_live(page)
    go_to(page, "scale")
    page.get_by_role("button", name="Simulate it").click()
    expect(page.locator(".spinner")).to_be_visible()
    assert page.evaluate(RUNNING) != []
    page.get_by_role("button", name="stop").click()


@pytest.mark.parametrize("name", CHAPTERS)
def test_every_control_is_reached_by_tab_and_shows_its_focus(open_page: Opener, name: str) -> None:
    page = open_page(f"/#/{name}", still=True)
    until_live(page)
    go_to(page, name)
    names = page.evaluate(NUMBER_CONTROLS, FOCUSABLE)
    assert len(names) > len(CHAPTERS)
    page.locator("body").focus()
    reached: set[str] = set()
    for _ in range(len(names) + 5):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        if focused["control"] is not None:
            reached.add(focused["control"])
            assert focused["isVisible"], f"no focus is seen on {names[int(focused['control'])]}"
    missed = [one for index, one in enumerate(names) if str(index) not in reached]
    assert not missed


def tab_to(page: Page, control: Locator) -> None:
    """Press Tab until a control has the focus."""
    for _ in range(60):
        if control.evaluate("(one) => one === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError("Tab does not reach it")


def test_the_keyboard_is_enough(page: Page) -> None:
    until_live(page)
    tab_to(page, page.get_by_label("Message", exact=True))
    page.keyboard.type("What is 3 + 4?")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .receipt")).to_be_visible()
    tab_to(page, page.locator(".message.assistant summary"))
    page.keyboard.press("Enter")
    expect(page.locator("[data-field='timings.queue_ms']")).to_be_visible()
    slider = page.locator(".chapter input[type=range]")
    before = slider.get_attribute("aria-valuetext")
    tab_to(page, slider)
    page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuetext") != before
    tab_to(page, page.get_by_role("button", name="Send it"))
    page.keyboard.press("Space")
    expect(page.locator(".chapter .spinner")).to_have_count(0)
    expect(page.locator(".chapter [data-value]").first).to_be_visible()
    tab_to(page, page.locator(".turn a[rel=next]"))
    page.keyboard.press("Enter")
    expect(page.locator(".chapter h2")).to_be_focused()
    expect(page).to_have_title(f"{CHAPTERS['cache']} · Quire")
