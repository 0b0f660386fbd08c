"""Growth and drift over hours, from noisy samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

MOST_POINTS = 400  # of which every pair is looked at


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Of a line through (x, y), by Theil and Sen: the median over all pairs. Outliers do not move it.

    Many points are first put together in order, by their medians. None for fewer than two.
    """
    size = -(-len(points) // MOST_POINTS)
    if size > 1:
        groups = [points[start : start + size] for start in range(0, len(points), size)]
        points = [(median(x for x, _ in group), median(y for _, y in group)) for group in groups]
    slopes = [
        (y2 - y1) / (x2 - x1)
        for index, (x1, y1) in enumerate(points)
        for x2, y2 in points[index + 1 :]
        if x2 != x1
    ]
    return median(slopes) if slopes else None


def fifths(points: Sequence[tuple[float, float]], begin: float, end: float) -> list[float | None]:
    """Medians of y in five equal parts of the time from `begin` to `end`."""
    parts: list[list[float]] = [[] for _ in range(5)]
    for x, y in points:
        if begin <= x < end:
            parts[int(5 * (x - begin) / (end - begin))].append(y)
    return [median(part) if part else None for part in parts]


def drift(parts: Sequence[float | None]) -> float | None:
    """By how much the last part is larger than the first, as a share of it."""
    first, last = parts[0], parts[-1]
    return last / first - 1 if first and last is not None else None


def slope_range(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The range in which the slope of Theil and Sen lies with 95%, if the points are independent.

    By ranks (Sen): as many slopes as chance would turn around are left out at either end. None for fewer
    than four points.
    """
    count = len(points)
    if count < 4:
        return None
    slopes = sorted(
        (y2 - y1) / (x2 - x1)
        for index, (x1, y1) in enumerate(points)
        for x2, y2 in points[index + 1 :]
        if x2 != x1
    )
    spread = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    skipped = max(0, round((len(slopes) - spread) / 2) - 1)
    return slopes[skipped], slopes[-1 - skipped]


def by_minute(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Medians of each minute: neighbouring samples are not independent."""
    minutes: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        minutes.setdefault(int(x // 60), []).append((x, y))
    return [(median(x for x, _ in part), median(y for _, y in part)) for part in minutes.values()]
