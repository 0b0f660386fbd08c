"""Features of steps against their definitions, token by token."""

from __future__ import annotations

import random

import pytest

from quire.program.features import LEADING, Feature, plus, values

EDGES = (0, 1, 5, 6, 7, 8, 9, 15, 16, 17, 40)


def rows_of(rng: random.Random) -> tuple[tuple[int, int], ...]:
    return tuple((rng.choice(EDGES), rng.choice((1, 1, *EDGES[1:]))) for _ in range(rng.randrange(1, 9)))


def visible(position: int, window: int) -> range:
    return range(max(0, position + 1 - window) if window else 0, position + 1)


def defined(feature: Feature, rows: tuple[tuple[int, int], ...], num_logits: int) -> float:
    """The feature by its definition, for every token and position."""
    window, tokens = feature.window, [range(start, start + count) for start, count in rows]
    choosing = num_logits if feature.kind == "logit_experts" else sum(map(len, tokens))
    match feature.kind:
        case "one":
            return 1
        case "rows":
            return len(rows)
        case "tokens":
            return sum(map(len, tokens))
        case "logits":
            return num_logits
        case "tiles":
            return len(range(0, sum(map(len, tokens)), window))
        case "positions":
            return sum(len({p for t in row for p in visible(t, window)}) for row in tokens)
        case "pairs":
            return sum(len(visible(t, window)) for row in tokens for t in row)
        case "chunk_pairs":
            return sum(
                len([p for p in range(t + 1) if p // window == t // window]) for row in tokens for t in row
            )
        case "experts" | "logit_experts":
            missed = 1.0
            for _ in range(choosing):
                missed *= 1 - feature.chosen / feature.num_experts
            return 1 - missed
        case "earlier":
            return sum(len(range(max(0, row.start - window), row.start)) for row in tokens)
        case "latest":
            return sum(len(row[-window:]) for row in tokens)
        case "since_boundary":
            return sum(row.start - max(p for p in range(row.start + 1) if p % window == 0) for row in tokens)
        case "past_boundary":
            return sum(any(p % window == 0 for p in range(1, row.start + 1)) for row in tokens)
        case "boundaries":
            reached = [sum((t + 1) % window == 0 for t in row) for row in tokens]
            return sum(min(2, number) for number in reached)
        case "positions_beyond":
            return sum(row.stop for row in tokens if any(t >= window for t in row))
        case "pairs_beyond":
            return sum(len(range(t + 1)) for row in tokens for t in row if t >= window)


SIZED = (
    "tiles",
    "positions",
    "pairs",
    "chunk_pairs",
    "earlier",
    "latest",
    "since_boundary",
    "past_boundary",
    "boundaries",
    "positions_beyond",
    "pairs_beyond",
)
FEATURES = (
    *LEADING,
    *(Feature(kind, window) for kind in SIZED for window in (1, 7, 8, 16)),
    Feature("positions"),
    Feature("pairs"),
    Feature("experts", 0, 2, 8),
    Feature("logit_experts", 0, 1, 4),
)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: f"{feature.kind}-{feature.window}")
def test_features_are_as_defined(feature: Feature) -> None:
    rng = random.Random(str(feature))
    for _ in range(60):
        rows, num_logits = rows_of(rng), rng.randrange(9)
        assert feature.value(rows, num_logits) == pytest.approx(defined(feature, rows, num_logits))


def test_all_at_once_and_row_by_row() -> None:
    rng = random.Random(0)
    for _ in range(60):
        rows = rows_of(rng)
        logits = [rng.randrange(3) for _ in rows]
        found = values(FEATURES, rows, sum(logits))
        assert found == tuple(feature.value(rows, sum(logits)) for feature in FEATURES)
        grown = values(FEATURES, (), 0)
        for (start, count), more in zip(rows, logits, strict=True):
            grown = plus(FEATURES, grown, start, count, more)
        assert grown == pytest.approx(found)
