"""Features of a step: the numbers that its cost is linear in. Standard library only.

The cost of every op of a program is a sum of coefficients times a few features of the rows (start, count) of
a step. `quire.roofline.folded` folds a program into those coefficients once; after that, costs need only the
features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add, mul, sub
from typing import Literal, NamedTuple

Kind = Literal[
    "one",
    "rows",
    "tokens",
    "logits",
    "tiles",
    "positions",
    "pairs",
    "chunk_pairs",
    "experts",
    "logit_experts",
    "earlier",
    "latest",
    "since_boundary",
    "past_boundary",
    "boundaries",
    "positions_beyond",
    "pairs_beyond",
]
Rows = Iterable[tuple[int, int]]  # (start, count) of each
_Longer = list[tuple[int, int]]


class Feature(NamedTuple):
    """One feature of a step.

    "one" is 1; "rows", "tokens" and "logits" are counts, the last of positions that need logits. "positions"
    are the cached positions that rows read, their own included, and "pairs" those of a token and a position
    it sees, both within a `window` (0: none); "chunk_pairs" those of a token that sees the positions from the
    last multiple of `window` on. "positions_beyond" are those of rows that end beyond `window` positions, and
    "pairs_beyond" those of tokens that see more. "tiles" are groups of `window` tokens, the last one smaller.

    "experts" is the expected share of `num_experts` experts that at least one token chooses, if each token
    chooses `chosen` of them at random; "logit_experts" the same for positions that need logits.

    Of states (quire.program.ops.state), with `window` for a size: "earlier" are the positions before each
    row, at most `window` a row; "latest" the row's own, at most `window`; "since_boundary" those from the
    last multiple of `window` to each row; "past_boundary" the rows that begin at `window` or later;
    "boundaries" the multiples of `window` that each row reaches, at most two a row.
    """

    kind: Kind
    window: int = 0
    chosen: int = 0
    num_experts: int = 0

    def value(self, rows: Rows, num_logits: int) -> float:
        """Return the feature of a step."""
        return values((self,), rows, num_logits)[0]


# What lists of features begin with, in this order (quire.roofline.folded), and the places of each.
LEADING = (Feature("one"), Feature("rows"), Feature("tokens"), Feature("logits"))
ONE, ROWS, TOKENS, LOGITS = range(len(LEADING))


def values(features: Sequence[Feature], rows: Rows, num_logits: int) -> tuple[float, ...]:
    """Return these features of a step, in one pass over rows for each: most have a count of 1."""
    rows = tuple(rows)
    single = [start for start, count in rows if count == 1]
    longer = [row for row in rows if row[1] != 1] if len(single) < len(rows) else []
    num_tokens = len(single) + sum([count for _, count in longer])
    visible: dict[int, tuple[int, int]] = {}  # positions and pairs by window
    found: list[float] = []
    for kind, window, chosen, num_experts in features:
        match kind:
            case "one":
                value: float = 1
            case "rows":
                value = len(rows)
            case "tokens":
                value = num_tokens
            case "logits":
                value = num_logits
            case "tiles":
                value = -(-num_tokens // window)
            case "positions" | "pairs":
                if window not in visible:
                    visible[window] = _visible(single, longer, window)
                value = visible[window][kind == "pairs"]
            case "chunk_pairs":
                value = sum([_before(start + n, window) - _before(start, window) for start, n in rows])
            case "experts":
                value = 1 - (1 - chosen / num_experts) ** num_tokens
            case "logit_experts":
                value = 1 - (1 - chosen / num_experts) ** num_logits
            case "earlier":
                value = sum([min(start, window) for start, _ in rows])
            case "latest":
                value = sum([min(count, window) for _, count in rows])
            case "since_boundary":
                value = sum([start % window for start, _ in rows])
            case "past_boundary":
                value = sum([start >= window for start, _ in rows])
            case "boundaries":
                value = sum([min(2, (start + n) // window - start // window) for start, n in rows])
            case "positions_beyond":
                value = sum([end for start, count in rows if (end := start + count) > window])
            case "pairs_beyond":
                value = sum([max(0, _up_to(start + n) - _up_to(max(start, window))) for start, n in rows])
        found.append(value)
    return tuple(found)


def plus(
    features: Sequence[Feature], found: Sequence[float], start: int, count: int, num_logits: int
) -> tuple[float, ...]:
    """Return the values of a step that has one more row; `features` begin with LEADING."""
    num_tokens, all_logits = int(found[TOKENS]) + count, int(found[LOGITS]) + num_logits
    total = list(map(add, found, values(features, ((start, count),), num_logits)))
    for index, (kind, window, chosen, num_experts) in enumerate(features):
        if kind == "one":
            total[index] = 1
        elif kind == "tiles":
            total[index] = -(-num_tokens // window)
        elif kind in ("experts", "logit_experts"):
            choosing = num_tokens if kind == "experts" else all_logits
            total[index] = 1 - (1 - chosen / num_experts) ** choosing
    return tuple(total)


def one_more(features: Sequence[Feature], start: int) -> tuple[float, ...]:
    """Return what a second token, with logits, adds to a row of one token at `start` (`extended`)."""
    both, first = values(features, ((start, 2),), 1), values(features, ((start, 1),), 0)
    return tuple(map(sub, both, first))


def extended(
    features: Sequence[Feature], found: Sequence[float], extra: Sequence[float], count: int
) -> tuple[float, ...]:
    """Return the values of a step with `count` more tokens, each of which adds `extra` (`one_more`).

    `features` begin with LEADING.
    """
    total = [value + count * more for value, more in zip(found, extra, strict=True)]
    num_tokens, num_logits = total[TOKENS], total[LOGITS]
    for index, (kind, window, chosen, num_experts) in enumerate(features):
        if kind == "tiles":
            total[index] = -(-num_tokens // window)
        elif kind in ("experts", "logit_experts"):
            choosing = num_tokens if kind == "experts" else num_logits
            total[index] = 1 - (1 - chosen / num_experts) ** choosing
    return tuple(total)


def _up_to(end: int) -> int:
    """Return the pairs of all tokens before a position."""
    return end * (end + 1) // 2


def _before(position: int, chunk: int) -> int:
    """Return the pairs in chunks of all tokens before a position."""
    chunks, rest = divmod(position, chunk)
    return (chunks * chunk * (chunk + 1) + rest * (rest + 1)) // 2


def _visible(single: list[int], longer: _Longer, window: int) -> tuple[int, int]:
    """Return the positions visible to any token of a row, and the pairs of a token and a position it sees.

    `single` are the starts of rows of one token, `longer` the other rows.
    """
    if not window or not single or max(single) < window:
        seen = sum(single) + len(single)
    else:
        partial = [start for start in single if start < window]
        seen = sum(partial) + len(partial) + (len(single) - len(partial)) * window
    if not longer:
        return seen, seen
    positions = sum([start + count for start, count in longer])
    pairs = sum([count * (2 * start + count + 1) for start, count in longer]) // 2
    if window:  # the last token of a row does not see the first `beyond` positions, the first not `before`
        beyond = [excess for start, count in longer if (excess := start + count - window) > 0]
        before = [start + 1 - window for start, _ in longer if start >= window]
        positions -= sum(before)
        pairs -= (sum(map(mul, beyond, beyond)) + sum(beyond)) // 2
        pairs += (sum(map(mul, before, before)) - sum(before)) // 2
    return seen + positions, seen + pairs
