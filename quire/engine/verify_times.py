"""Predicted times of steps by how many drafted tokens they verify.

A choice of lengths looks at the times of all totals of drafted tokens: more tokens begin a further tile of a
matrix product, so times grow in stairs. They are kept for steps that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.step_law import StepLaw
from quire.program.features import extended, one_more
from quire.types import Row

MAX_TOTAL = 256  # drafted tokens of a step
FEW_ROWS, FEW_TOKENS = 4, 3  # while no law is known: rows of a step that drafts, drafted tokens for each
_BUCKET, _CHUNK_BUCKET = 128, 512  # positions: rows that begin in the same bucket are predicted alike
_MAX_KEPT = 512
# Of the time of a step, while no law is known: that of a drafted token, and of a pass of the draft model.
FURTHER, PASS = 1 / 64, 1 / 8
_HOPED = 0.9  # share of drafted tokens that are right where drafting goes well

_Key = tuple[int, int, tuple[tuple[int, int], ...]]


class TimeCurve:
    """The predicted time of a step by its drafted tokens in total, and of one pass of the draft model."""

    __slots__ = ("_extra", "_found", "_law", "_num_rows", "_pays", "_seconds", "pass_s")

    def __init__(
        self,
        law: StepLaw,
        num_rows: int,
        found: tuple[float, ...],
        extra: tuple[float, ...],
    ) -> None:
        self._law = law
        self._num_rows = num_rows
        self._found, self._extra = found, extra
        self._seconds: list[float] = [law.seconds(found)]
        self._pays: bool | None = None
        self.pass_s = self._seconds[0] * PASS

    def seconds(self, total: int) -> float:
        """Return the time of a step that verifies `total` drafted tokens, at most MAX_TOTAL."""
        known = self._seconds
        while len(known) <= total:
            known.append(
                self._law.seconds(extended(self._law.features, self._found, self._extra, len(known)))
            )
        return known[total]

    @property
    def most(self) -> int:
        """The most drafted tokens that a step may verify."""
        return MAX_TOTAL

    @property
    def may_pay(self) -> bool:
        """False where tokens are not worth their time even if nearly all are right."""
        if self._pays is None:
            plain = self._num_rows / self.seconds(0)
            rates = ((self._num_rows + _HOPED * m) / self.seconds(m) for m in range(1, MAX_TOTAL + 1))
            self._pays = any(rate > plain for rate in rates)
        return self._pays


class AssumedTimes:
    """Times relative to a step without drafts, while no law is known: a few tokens cost few rows little."""

    def __init__(self, num_rows: int) -> None:
        self.most = FEW_TOKENS * num_rows if num_rows <= FEW_ROWS else 0
        self.may_pay = self.most > 0
        self.pass_s = PASS

    def seconds(self, total: int) -> float:
        """See TimeCurve."""
        return 1.0 + total * FURTHER


class VerifyTimes:
    """Keeps the curves of steps, by what their rows have in common."""

    def __init__(self) -> None:
        self.law: StepLaw | None = None
        self.draft_law: StepLaw | None = None
        self._kept: dict[_Key, TimeCurve] = {}

    def calibrate(self, law: StepLaw, draft_law: StepLaw | None) -> None:
        """Predict by these laws from now on, of steps and of one pass of the draft model.

        A law by which steps take no time says nothing.
        """
        takes_time = law.seconds(law.values([(0, 1)], 1)) > 0.0
        self.law, self.draft_law = law if takes_time else None, draft_law
        self._kept.clear()

    def of(self, rows: Sequence[Row]) -> TimeCurve | AssumedTimes:
        """Return the times of a step with these rows, by the drafted tokens that it verifies."""
        law = self.law
        if law is None:
            return AssumedTimes(len(rows))
        chunks = [row for row in rows if row[2] > 1 or not row[4]]
        num_rows = len(rows) - len(chunks)
        positions = sum([row[1] for row in rows]) - sum([row[1] for row in chunks])
        bucket = positions // (num_rows * _BUCKET) if num_rows else 0
        key = num_rows, bucket, tuple([(row[1] // _CHUNK_BUCKET, row[2]) for row in chunks])
        curve = self._kept.get(key)
        if curve is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            curve = self._kept[key] = self._curve(law, key, len(rows))
        return curve

    def _curve(self, law: StepLaw, key: _Key, num_all: int) -> TimeCurve:
        num_rows, bucket, chunks = key
        middle = bucket * _BUCKET + _BUCKET // 2
        single = [(middle, 1)] * num_rows
        longer = [(start * _CHUNK_BUCKET + _CHUNK_BUCKET // 2, count) for start, count in chunks]
        found = law.values([*single, *longer], num_all)
        curve = TimeCurve(law, num_all, found, one_more(law.features, middle))
        if self.draft_law is not None:
            curve.pass_s = self.draft_law.seconds(self.draft_law.values(single, num_rows))
        return curve

    def lag_s(self, rows: Sequence[tuple[int, int]]) -> float:
        """Return how long the draft model takes for tokens that it lacks, (start, count) of each sequence."""
        law = self.draft_law
        return 0.0 if law is None or not rows else law.seconds(law.values(rows, 0))
