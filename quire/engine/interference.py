"""Interference: what the requests of a step add to each other's time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Series

from quire.engine.request import ScheduledRequest, Sequence
from quire.engine.step_law import StepLaw
from quire.types import Row, Step

_BUCKET = 16  # positions: rows of one token that begin in the same bucket are predicted alike
Shares = tuple[float, float]  # of a step: what prompts of others take, and what their decoding takes


class Interference:
    """Divides the time of steps among requests, in their receipts.

    A step lasts from the end of the step before, or the admission of the sequence, to its own end. With p the
    prediction of the step's law, the rows of other requests take 1 - p(own rows) / p(all rows) of it: their
    prompts what the step would be shorter without them, their decoding the rest. All of a step in which a
    running request has no row is interference. Without a law nothing is divided.

    The time that a sequence is preempted is no interference: the receipt has it apart.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk  # tokens of a prompt that a step computes
        self._law: StepLaw | None = None
        self._last_s = -math.inf  # the end of the last step
        self._decoding: dict[int, tuple[float, float]] = {}  # `_decode_s` and the time at the roof

    def calibrate(self, law: StepLaw) -> None:
        """Divide by this law from now on."""
        self._law = law
        self._decoding.clear()

    def admit(self, sequence: Sequence, now: float) -> None:
        """Note the first admission of a sequence, and what its cached tokens save."""
        receipt, num_cached, law = sequence.receipt, sequence.num_cached_tokens, self._law
        receipt.admitted_s = now
        receipt.num_counted = max(receipt.num_counted, num_cached)
        if law is not None:
            starts = range(0, num_cached, self._chunk)
            steps = (law.values([(start, min(self._chunk, num_cached - start))], 0) for start in starts)
            receipt.cached_saved_s = sum(law.seconds(values) + law.host_s for values in steps)

    def count(
        self, step: Step, sequences: Series[Sequence], running: Iterable[Sequence], mask_s: float, now: float
    ) -> None:
        """Enter a step that ends now into the receipts. `sequences` are those of its rows.

        `running` are the sequences with a slot, `mask_s` is how long it waited for the masks of grammars.
        """
        last_s, self._last_s = self._last_s, now
        for sequence in sequences if mask_s else ():
            if sequence.request.new.grammar:
                sequence.receipt.grammar_s += mask_s
        if self._law is None:
            return
        for sequence, row in zip(sequences, step.rows, strict=True):
            sequence.receipt.ideal_s += self._ideal_s(sequence, row, self._law)
        delayed = [*running, *(one for one in sequences if one.slot < 0 and not one.finished)]
        first = sequences[0].request
        if all(one.request is first for one in (*delayed, *sequences)):
            return
        without_row, shares = self._divide(step.rows, sequences)
        for sequence in delayed:
            receipt = sequence.receipt
            if receipt.preempted_since_s is None or (sequence.slot < 0 and not receipt.preempted_again):
                prefill, decode = shares.get(sequence.request, without_row)
                lasted_s = now - max(last_s, now if receipt.admitted_s is None else receipt.admitted_s)
                receipt.prefill_interference_s += prefill * lasted_s
                receipt.decode_interference_s += decode * lasted_s

    def _divide(
        self, rows: Series[Row], sequences: Iterable[Sequence]
    ) -> tuple[Shares, dict[ScheduledRequest, Shares]]:
        """Return the shares of a step that rows of others take: of a request without rows, and by request."""
        own: dict[ScheduledRequest, list[Row]] = {}
        for sequence, row in zip(sequences, rows, strict=True):
            own.setdefault(sequence.request, []).append(row)
        decoding = [row for row in rows if not _is_prefill(row)]
        whole_s, decoding_s = self._predict(rows), self._predict(decoding)
        shares = {}
        for request, alone in own.items():
            prompts = [row for row in alone if _is_prefill(row)]
            kept_s = decoding_s
            if prompts:
                kept_s = self._predict([*decoding, *prompts])
            shares[request] = _shares(whole_s, kept_s, self._predict(alone))
        return _shares(whole_s, decoding_s, 0.0), shares

    def _predict(self, rows: Series[Row]) -> float:
        """Return the predicted time of a step with these rows and of what precedes it; 0 without rows."""
        law = self._law
        if law is None or not rows:
            return 0.0
        if len(rows) == 1 and _is_single(rows[0]):
            return self._decode_s(rows[0].start, law)[0]
        num_logits = sum([row.num_logits for row in rows])
        return law.seconds(law.values([(row.start, row.count) for row in rows], num_logits)) + law.host_s

    def _decode_s(self, start: int, law: StepLaw) -> tuple[float, float]:
        """Return the time of a step with one row of one token, predicted and at the roof.

        Nearly every row is such a one, so the times are kept.
        """
        bucket = start // _BUCKET
        times = self._decoding.get(bucket)
        if times is None:
            values = law.values([(bucket * _BUCKET + _BUCKET // 2, 1)], 1)
            times = self._decoding[bucket] = law.seconds(values) + law.host_s, law.roof_s(values)
        return times

    def _ideal_s(self, sequence: Sequence, row: Row, law: StepLaw) -> float:
        """Return the time at the roof of what a row computes for the first time."""
        receipt, end = sequence.receipt, row.start + row.count
        start = max(row.start, receipt.num_counted)
        receipt.num_counted = max(receipt.num_counted, end - len(row.drafted))
        if start >= end:
            return 0.0
        if _is_single(row):
            return self._decode_s(start, law)[1]
        return law.roof_s(law.values([(start, end - start)], row.num_logits))


def _is_prefill(row: Row) -> bool:
    """Return True unless the row computes the last known token, and its draft."""
    return not row.sample or row.count > 1 + len(row.drafted)


def _is_single(row: Row) -> bool:
    return row.count == 1 and row.sample


def _shares(whole_s: float, kept_s: float, alone_s: float) -> Shares:
    """Return the shares of a step: `kept_s` without the prompts of others, `alone_s` without others."""
    if whole_s <= 0:
        return 0.0, 0.0
    kept = min(1.0, kept_s / whole_s)
    return 1.0 - kept, max(0.0, kept - alone_s / whole_s)
