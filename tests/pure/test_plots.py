"""Charts and pages: well-formed, escaped, with points where the axes say."""

import math
import re
from xml.etree import ElementTree

import pytest

from quire.plots import HEIGHT, WIDTH, Axis, Chart, Rule, Series, page, preformatted, svg

SVG = "{http://www.w3.org/2000/svg}"
RISING = Series("TTFT", [(1, 10), (10, 100), (100, 1000)])
NASTY = "<script>alert('&\"')</script>\x1b[31m\u202e"


def draw(
    *series: Series, x: Axis | None = None, y: Axis | None = None, rules: tuple[Rule, ...] = ()
) -> ElementTree.Element:
    chart = Chart("a title", x or Axis("rate", "requests/s"), y or Axis("latency", "ms"), series, rules)
    return ElementTree.fromstring(svg(chart))


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [one for one in root.iter() if name in one.get("class", "").split()]


def texts(root: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in root.iter(f"{SVG}text")]


def corners(path: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.get("d", ""))
    return [(float(x), float(y)) for x, y in pairs]


def test_a_chart_says_what_it_shows() -> None:
    shown = texts(draw(RISING, Series("ITL", [(1, 5)])))
    assert {"a title", "rate (requests/s)", "latency (ms)", "TTFT", "ITL"} <= set(shown)


def test_equal_ratios_are_equally_far_apart_on_logarithmic_axes() -> None:
    root = draw(RISING, x=Axis("rate", log=True), y=Axis("latency", log=True))
    (x0, y0), (x1, y1), (x2, y2) = corners(of_class(root, "line")[0])
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert {"1", "10", "100", "1,000"} <= set(texts(root))


@pytest.mark.parametrize(("low", "high"), [(210, 280), (21, 48), (3, 9), (0.0201, 0.0204), (9100, 9900)])
def test_a_logarithmic_axis_has_ticks_however_near_its_values_are(low: float, high: float) -> None:
    root = draw(Series("a", [(1, low), (2, high)]), y=Axis("latency", log=True))
    ticks = [
        float((one.text or "").replace(",", ""))
        for one in root.iter(f"{SVG}text")
        if one.get("text-anchor") == "end"
    ]
    assert len(ticks) > 1
    assert low <= ticks[0] < ticks[-1] <= high


def test_points_lie_between_the_ticks_around_them() -> None:
    root = draw(Series("a", [(0, 0), (2.5, 30), (10, 100)]))
    ticks = {
        one.text: float(one.get("x", 0))
        for one in root.iter(f"{SVG}text")
        if one.get("text-anchor") == "middle" and one.get("x")
    }
    x = corners(of_class(root, "line")[0])[1][0]
    assert x == pytest.approx((3 * ticks["0"] + ticks["10"]) / 4, abs=0.2)
    assert ticks["2"] < x < ticks["4"]


def test_values_without_a_place_leave_a_gap() -> None:
    root = draw(Series("a", [(1, 1), (2, 2), (3, math.nan), (4, 4), (5, 5), (6, math.inf)]))
    assert [len(corners(line)) for line in of_class(root, "line")] == [2, 2]
    assert len(of_class(root, "f0")) == 4
    below = draw(Series("a", [(1, 1), (2, 0), (3, 3)]), y=Axis("y", log=True))
    assert len(of_class(below, "f0")) == 2


def test_a_band_goes_up_one_side_and_down_the_other() -> None:
    root = draw(Series("a", [(1, 2), (2, 4)], band=[(1, 3), (3, 5)], markers=False))
    (band,) = of_class(root, "band")
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = corners(band)
    assert (x0, x1) == (x3, x2)
    assert y0 < y3
    assert y1 < y2


def test_rules_stand_at_their_values() -> None:
    root = draw(RISING, rules=(Rule(500, "the goal"), Rule(50, "the rate", vertical=True)))
    assert {"the goal", "the rate"} <= set(texts(root))
    assert len(of_class(root, "rule")) == 2


def test_everything_stays_within_the_picture() -> None:
    series = [Series(f"series of a long name {n}", [(n, 10**n), (n + 1, 2)]) for n in range(9)]
    root = draw(*series, y=Axis("y", low=10, high=1000), rules=(Rule(1e6, "far off"),))
    height = float(root.get("height", 0))
    assert height > HEIGHT
    for line in of_class(root, "line"):
        assert all(0 <= x <= WIDTH and 0 <= y <= height for x, y in corners(line))
    for one in root.iter(f"{SVG}text"):
        assert float(one.get("x", 0)) <= WIDTH
        assert float(one.get("y", 0)) <= height


@pytest.mark.parametrize(
    "points", [[], [(1, 1)], [(0, 0), (0, 0)], [(math.nan, 1)], [(5, -3), (6, -1)], [(1e-9, 1e12)]]
)
@pytest.mark.parametrize("log", [False, True])
def test_any_values_give_a_chart(points: list[tuple[float, float]], log: bool) -> None:
    root = draw(Series("a", points), x=Axis("x", log=log), y=Axis("y", log=log))
    assert "nan" not in ElementTree.tostring(root, "unicode")


def test_a_logarithmic_axis_begins_above_zero() -> None:
    with pytest.raises(ValueError, match="logarithmic"):
        draw(RISING, y=Axis("y", log=True, low=0))


def test_text_is_escaped() -> None:
    chart = Chart(NASTY, Axis(NASTY), Axis(NASTY), [Series(NASTY, [(1, 1)]), RISING], [Rule(1, NASTY)])
    drawn = svg(chart)
    assert not list(ElementTree.fromstring(drawn).iter(f"{SVG}script"))
    document = page(NASTY, [drawn, preformatted(NASTY)])
    for text in (drawn, document):
        assert "<script" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_a_page_asks_nothing_of_anyone() -> None:
    document = page("a page", [svg(Chart("c", Axis("x"), Axis("y"), [RISING])), preformatted("a  b\nc")])
    assert "default-src 'none'" in document
    assert "<pre>a  b\nc</pre>" in document
    assert not re.search(r"(src|href)=|url\(|@import", document)
