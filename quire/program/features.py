"""Features of a step: the numbers that its cost is linear in. Standard library only.

The cost of every op of a program is a sum of coefficients times a few features of the rows (start, count) of
a step. `quire.roofline.folded` folds a program into those coefficients once; after that, costs need only the
features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Kind = Literal["one", "rows", "tokens", "logits", "positions", "pairs", "experts"]
Rows = Iterable[tuple[int, int]]  # (start, count) of each


class Feature(NamedTuple):
    """One feature of a step.

    "one" is 1; "rows", "tokens" and "logits" are counts, the last of positions that need logits. "positions"
    are the cached positions that rows read, their own included, and "pairs" those of a token and a position
    it sees, both within a `window` (0: none). "experts" is the expected share of `num_experts` experts that
    at least one token chooses, if each token chooses `chosen` of them at random.
    """

    kind: Kind
    window: int = 0
    chosen: int = 0
    num_experts: int = 0

    def value(self, rows: Rows, num_logits: int) -> float:
        """Return the feature of a step."""
        window = self.window
        match self.kind:
            case "one":
                return 1.0
            case "rows":
                return float(sum(1 for _ in rows))
            case "tokens":
                return float(sum(count for _, count in rows))
            case "logits":
                return float(num_logits)
            case "positions":
                return float(sum(_positions(start, count, window) for start, count in rows))
            case "pairs":
                return float(sum(_pairs(start, count, window) for start, count in rows))
            case "experts":
                num_tokens = sum(count for _, count in rows)
                return 1.0 - (1.0 - self.chosen / self.num_experts) ** num_tokens


def _positions(start: int, count: int, window: int) -> int:
    """Return the positions visible to any token of a row."""
    return start + count - (max(0, start + 1 - window) if window else 0)


def _pairs(start: int, count: int, window: int) -> int:
    """Return the sum of the positions visible to each token of a row."""
    if not window:
        return count * start + count * (count + 1) // 2
    growing = min(max(window - start, 0), count)  # tokens that see everything before them
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * window
