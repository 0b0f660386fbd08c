"""Line charts as SVG, and pages around them: no library, no script, no request to anywhere.

Charts follow the reader's light or dark scheme. Series differ in colour, marker and dash, so they can be told
apart without colour. All text is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.errors import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 720, 420  # of a chart in pixels, without its legend
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 16, 40, 48
_TEXT_WIDTH = 6.6  # of a character of 12 px, about
_MARKER = 3.5
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_MAX_TICKS = 7
# The colours of Okabe and Ito, darkened or lightened to be read on either background.
_LIGHT = ("#fff", "#222", "#ddd", "#0072b2", "#c14a00", "#007a5a", "#a8528a", "#8a6d00", "#5b6770")
_DARK = ("#16181c", "#ddd", "#3a3d44", "#56b4e9", "#ff9d5c", "#3fd0a4", "#e29bc8", "#f0e442", "#b8c4cc")
_COLOURS = len(_LIGHT) - 3


def _colours(paper: str, ink: str, faint: str, *series: str) -> str:
    """Return the rules of one scheme. Without variables: many viewers of SVG do not know them."""
    rules = [
        f".quire-plot .paper {{ fill: {paper} }}",
        f".quire-plot text {{ fill: {ink} }}",
        f".quire-plot .frame, .quire-plot .rule {{ stroke: {ink} }}",
        f".quire-plot .grid {{ stroke: {faint} }}",
    ]
    for index, colour in enumerate(series):
        rules.append(
            f".quire-plot .s{index} {{ stroke: {colour} }} .quire-plot .f{index} {{ fill: {colour} }}"
        )
    return "\n".join(rules)


_STYLE = f"""
.quire-plot {{ font: 12px system-ui, sans-serif }}
.quire-plot .title {{ font-size: 15px; font-weight: 600 }}
.quire-plot .frame {{ fill: none }}
.quire-plot .rule {{ fill: none; stroke-dasharray: 4 3 }}
.quire-plot .line {{ fill: none; stroke-width: 2; stroke-linejoin: round }}
.quire-plot .band {{ fill-opacity: .18 }}
{_colours(*_LIGHT)}
@media (prefers-color-scheme: dark) {{
{_colours(*_DARK)}
}}
"""
_PAGE_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
svg { max-width: 100%; height: auto; }
pre { overflow-x: auto; font-size: 13px; }
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. Without `low` and `high` it ends where the values do; `ticks` replace the chosen ones."""

    label: str
    unit: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: Sequence[float] = ()

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Series:
    """Points joined by a line, points alone, or a line without points.

    `band` has the lower and upper bound at each point. Points that are not finite leave a gap.
    """

    label: str
    points: Sequence[Point]
    band: Sequence[Point] = ()
    line: bool = True
    markers: bool = True


@dataclass(frozen=True, slots=True)
class Rule:
    """A dashed line across the chart at a value of the y axis, or of the x axis (`vertical`)."""

    value: float
    label: str
    vertical: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything that a chart shows."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series] = ()
    rules: Sequence[Rule] = field(default=())


def svg(chart: Chart) -> str:
    """Return the chart as one SVG element, which is also a complete SVG file."""
    xs = [x for one in chart.series for x, y in one.points if math.isfinite(x) and math.isfinite(y)]
    ys = [y for one in chart.series for pair in (one.points, one.band) for y in _heights(pair, one)]
    xs += [rule.value for rule in chart.rules if rule.vertical]
    ys += [rule.value for rule in chart.rules if not rule.vertical]
    across = _Scale.over(chart.x, xs, _LEFT, WIDTH - _RIGHT)
    up = _Scale.over(chart.y, ys, HEIGHT - _BOTTOM, _TOP)
    legend, legend_height = _legend(chart.series)
    height = HEIGHT + legend_height
    title = _text(chart.title)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="quire-plot" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{title}">',
        f"<style>{_STYLE}</style><title>{title}</title>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="24">{title}</text>',
        *_axes(chart, across, up),
    ]
    for index, one in enumerate(chart.series):
        parts += _drawn(one, index, across, up)
    parts += [part for rule in chart.rules for part in _rule(rule, across, up)]
    return "\n".join([*parts, *legend, "</svg>"]) + "\n"


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML page around parts such as `svg` and `preformatted` return."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_PAGE_STYLE}</style>\n<h1>{_text(title)}</h1>\n"
    )
    return head + "\n".join(parts) + "\n</html>\n"


def preformatted(text: str) -> str:
    """Return lines of a terminal as HTML."""
    return "<pre>" + "\n".join(map(_text, text.splitlines())) + "</pre>"


@dataclass(frozen=True, slots=True)
class _Scale:
    """The pixels of values, between two pixels."""

    log: bool
    low: float
    high: float
    begin: float
    end: float
    ticks: Sequence[float]

    @classmethod
    def over(cls, axis: Axis, values: Sequence[float], begin: float, end: float) -> _Scale:
        usable = [value for value in values if not axis.log or value > 0]
        low = min(usable, default=1.0) if axis.low is None else axis.low
        high = max(usable, default=low) if axis.high is None else axis.high
        if axis.log and low <= 0:
            raise ValueError(f"the axis {axis.label!r} is logarithmic and cannot begin at {low:g}")
        if high <= low:  # one value, or none
            low, high = (low / 2, low * 2) if axis.log else (min(low, 0.0), max(high, low + 1.0))
        if not axis.log and axis.low is None and 0 < low < high / 3:
            low = 0.0
        ticks = tuple(axis.ticks) or (_log_ticks(low, high) if axis.log else _ticks(low, high))
        return cls(axis.log, low, high, begin, end, [t for t in ticks if low <= t <= high * (1 + 1e-9)])

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(max(value, 1e-300)), math.log(low), math.log(high)
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return round(self.begin + share * (self.end - self.begin), 1)

    def shows(self, value: float) -> bool:
        """Return True for values that have a place: on a logarithmic axis, those above zero."""
        return math.isfinite(value) and (value > 0 or not self.log)


def _heights(pairs: Sequence[Point], one: Series) -> Iterable[float]:
    both = pairs is one.band
    return [y for pair in pairs for y in (pair if both else pair[1:]) if math.isfinite(y)]


def _ticks(low: float, high: float) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, with their double and fivefold where that leaves few; or linear ticks."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors]
        found = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(found) <= _MAX_TICKS + 2:
            break
    if len(found) < 2:  # all within a small factor of each other
        return _ticks(low, high)
    return found[:: math.ceil(len(found) / (_MAX_TICKS + 2)) or 1]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.6g}"


def _axes(chart: Chart, across: _Scale, up: _Scale) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for tick in across.ticks:
        x = across(tick)
        parts.append(f'<path class="grid" d="M{x} {_TOP}V{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{_number(tick)}</text>')
    for tick in up.ticks:
        y = up(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_number(tick)}</text>')
    parts.append(f'<path class="frame" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(f'<text x="{middle_x}" y="{bottom + 36}" text-anchor="middle">{_text(chart.x.title)}</text>')
    turned = f'transform="translate(16 {middle_y}) rotate(-90)" text-anchor="middle"'
    return [*parts, f"<text {turned}>{_text(chart.y.title)}</text>"]


def _drawn(one: Series, index: int, across: _Scale, up: _Scale) -> list[str]:
    colour = index % _COLOURS
    runs: list[list[Point]] = [[]]
    for x, y in one.points:
        if across.shows(x) and up.shows(y):
            runs[-1].append((x, y))
        else:
            runs.append([])
    parts = []
    if one.band:
        edge = [(x, *bounds) for (x, _), bounds in zip(one.points, one.band, strict=True)]
        edge = [(x, low, high) for x, low, high in edge if all(map(math.isfinite, (x, low, high)))]
        corners = [(x, high) for x, _, high in edge] + [(x, low) for x, low, _ in reversed(edge)]
        parts.append(f'<path class="band f{colour}" d="{_path(corners, across, up)}Z"/>' if edge else "")
    if one.line:
        dash = _DASHES[index % len(_DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        parts += [
            f'<path class="line s{colour}"{dashed} d="{_path(run, across, up)}"/>' for run in runs if run[1:]
        ]
    if one.markers:
        for x, y in (point for run in runs for point in run):
            told = f"<title>{_text(one.label)}: {_number(x)}, {_number(y)}</title>"
            parts.append(_marker(index, across(x), up(y), told))
    return [part for part in parts if part]


def _path(points: Sequence[Point], across: _Scale, up: _Scale) -> str:
    return "M" + "L".join(f"{across(x)} {up(y)}" for x, y in points)


def _marker(index: int, x: float, y: float, told: str = "") -> str:
    r = _MARKER
    shapes = (
        f"M{x - r} {y}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z",
        f"M{x - r} {y - r}h{2 * r}v{2 * r}h{-2 * r}Z",
        f"M{x} {y - r - 1}L{x + r + 1} {y + r}H{x - r - 1}Z",
        f"M{x} {y - r - 1}L{x + r + 1} {y}L{x} {y + r + 1}L{x - r - 1} {y}Z",
    )
    shape = shapes[index % len(shapes)]
    return f'<path class="f{index % _COLOURS}" d="{shape}">{told}</path>'


def _rule(rule: Rule, across: _Scale, up: _Scale) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    label = _text(rule.label)
    if rule.vertical:
        x = across(rule.value)
        at = f'x="{x - 4}" y="{_TOP + 12}" text-anchor="end"'
        if x < (_LEFT + right) / 2:
            at = f'x="{x + 4}" y="{_TOP + 12}"'
        return [f'<path class="rule" d="M{x} {_TOP}V{bottom}"/>', f"<text {at}>{label}</text>"]
    y = up(rule.value)
    at = f'x="{_LEFT + 4}" y="{y - 4}"'  # at the left: what rises does so at the right
    return [f'<path class="rule" d="M{_LEFT} {y}H{right}"/>', f"<text {at}>{label}</text>"]


def _legend(series: Sequence[Series]) -> tuple[list[str], int]:
    """Return the parts of the legend under the chart and its height. A chart of one series needs none."""
    if len(series) < 2:
        return [], 0
    parts, x, y = [], float(_LEFT), HEIGHT + 8
    for index, one in enumerate(series):
        width = 36 + _TEXT_WIDTH * len(one.label) + 18
        if x + width > WIDTH and x > _LEFT:
            x, y = float(_LEFT), y + 18
        dash = _DASHES[index % len(_DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        if one.line:
            parts.append(f'<path class="line s{index % _COLOURS}"{dashed} d="M{x} {y - 4}h26"/>')
        if one.markers:
            parts.append(_marker(index, x + 13, y - 4))
        parts.append(f'<text x="{x + 32}" y="{y}">{_text(one.label)}</text>')
        x = round(x + width, 1)
    return parts, y - HEIGHT + 12


def _text(text: str) -> str:
    return html.escape(escape(text))
