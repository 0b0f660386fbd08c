"""Chapter 6: what speculation would gain, and the drafted tokens of an engine that speculates."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect
from reading import Api, go_to, shown, until_live

# An answer as a stream tells it: of nothing drafted, all right, two of four right, and nothing right.
STEPS = [
    {"tokens": ["Once"], "why_none": "nothing proposed"},
    {
        "tokens": [" upon", " a", " time", ","],
        "drafted": [" upon", " a", " time"],
        "num_accepted": 3,
        "source": "text",
        "match": 7,
        "expected_tokens": 3.2,
        "predicted_ms": 1.5,
        "plain_ms": 1.0,
    },
    {
        "tokens": [" the", "re", " was"],
        "drafted": [" the", "re", " lived", "\n"],
        "num_accepted": 2,
        "source": "model",
    },
    {"tokens": [" a"], "drafted": ["", ""], "source": "store", "match": 3},
    {"tokens": [" fox"], "why_none": "slower"},
]
BREAK = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
ANSWERED = """async (steps) => {
  const { answers } = await import("/page/js/api.js");
  answers.push({ tag: null, sent_s: 1, token_s: [], timings: null, text: "", drafting: steps });
}"""
RECORDS = """async () => {
  const { live } = await import("/page/js/live.js");
  const times = { idle_s: 0.1, device_s: 0.8, mask_s: 0, draft_s: 0.1 };
  live.steps.splice(0, live.steps.length);
  live.steps.push({ index: 1e6, num_drafted: 6, num_accepted: 4, drafting_saved_s: 1.5, ...times });
}"""


@pytest.fixture
def chapter(page: Page) -> Page:
    until_live(page)
    go_to(page, "speculation")
    return page


def slide(page: Page, label: str, value: int) -> None:
    page.get_by_role("slider", name=label).fill(str(value))


def stat(page: Page, label: str) -> float:
    figure = page.locator(".figure", has_text="by draft length")
    value = figure.locator(".stat", has_text=label).locator(".value").get_attribute("data-value")
    assert value is not None
    return float(value)


def test_the_gain_follows_from_the_law(chapter: Page) -> None:
    slide(chapter, "a guess is right", 80)
    slide(chapter, "drafted tokens", 3)
    slide(chapter, "drafting a token takes", 10)
    expect(chapter.locator(".chapter")).to_contain_text("brings 2.95 tokens instead of one")
    slower = stat(chapter, "a step that verifies") / stat(chapter, "a step without drafts")
    assert slower > 1
    assert stat(chapter, "times as fast") == pytest.approx(2.952 / (slower + 3 * 0.1))


def test_the_best_length_is_the_best(chapter: Page) -> None:
    slide(chapter, "drafting a token takes", 0)
    best, gains = int(stat(chapter, "best draft length")), []
    for length in range(1, 13):
        slide(chapter, "drafted tokens", length)
        gains.append(stat(chapter, "times as fast"))
    assert best == (gains.index(max(gains)) + 1 if max(gains) > 1 else 0)


def test_a_large_batch_is_slower_and_says_why(chapter: Page) -> None:
    """Of the large model, whose figures are those of the ceilings: here 16 tokens take no more than one."""
    chapter.get_by_role("button", name="8 billion").click()
    slide(chapter, "a guess is right", 70)
    slide(chapter, "drafted tokens", 4)
    slide(chapter, "sequences in the step", 0)
    assert stat(chapter, "times as fast") == pytest.approx(2.7731 / (1 + 4 * 0.05))
    expect(chapter.locator(".chapter")).to_contain_text("brings 2.77 tokens instead of one")
    slide(chapter, "sequences in the step", 100)
    assert stat(chapter, "times as fast") < 1
    expect(chapter.locator(".chapter")).to_contain_text("1,280 tokens instead of 256: it is a small prefill")


def test_an_answer_is_shown_token_by_token(chapter: Page) -> None:
    chapter.evaluate(ANSWERED, STEPS)
    slide(chapter, "a guess is right", 50)  # draws again
    steps = chapter.locator(".tokens > span")
    assert [steps.nth(at).locator("mark").all_inner_texts() for at in range(5)] == [
        [],
        [" upon", " a", " time"],
        [" the", "re"],
        [],
        [],
    ]
    assert steps.nth(2).locator("del").all_inner_texts() == [" lived", BREAK]
    assert steps.nth(2).locator("b").all_inner_texts() == [" was"]
    assert steps.nth(3).locator("del").all_inner_texts() == ["?", "?"]
    assert steps.nth(2).inner_text() == " there lived was" + BREAK


def test_each_step_says_why(chapter: Page) -> None:
    chapter.evaluate(ANSWERED, STEPS)
    figure = chapter.locator(".figure", has_text="what was drafted for it")
    step = chapter.get_by_role("slider", name="step", exact=True)
    slide(chapter, "a guess is right", 50)
    expect(step).to_have_attribute("aria-valuetext", "3 of 5")  # the longest draft
    expect(figure).to_contain_text("by the draft model")
    step.press("ArrowLeft")
    expect(figure).to_contain_text("from its own text, where its last 7 tokens stood before")
    values = figure.locator(".stats").first.locator(".value")
    assert values.all_inner_texts() == ["3", "3", "3.2", "1.5 ms", "1 ms"]
    step.press("Home")
    expect(figure).to_contain_text("its last words were found nowhere before")
    chapter.locator(".tokens > span").nth(3).click()
    expect(step).to_have_value("3")
    expect(figure).to_contain_text("from an earlier answer")
    step.press("End")
    expect(figure).to_contain_text("verifying would have taken longer")


def test_what_all_requests_gained(chapter: Page) -> None:
    chapter.evaluate(RECORDS)
    slide(chapter, "a guess is right", 50)
    figure = chapter.locator(".figure", has_text="All requests")
    expect(figure.locator(".value")).to_have_text(["6", "4", "2.5"])


@pytest.mark.parametrize("words", ["a story", "the same again", "JSON by a schema"])
def test_what_is_asked_is_shown(chapter: Page, api: Api, words: str) -> None:
    api.attach(chapter)
    chapter.get_by_role("button", name=words, exact=True).click()
    chapter.get_by_role("button", name="Ask", exact=True).click()
    figure = chapter.locator(".figure", has_text="what was drafted for it")
    api.until_answered(chapter, 2 if words == "the same again" else 1)
    drafted = figure.locator("[data-field='timings.drafted_tokens']")
    expect(drafted).to_have_attribute("data-value", str(api.value("timings.drafted_tokens")))
    numbers = shown(figure)
    assert len(numbers) == 2
    api.check(numbers)
