"""Interference: what the requests of a step add to each other's time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Series

from quire.engine.receipts import Receipt
from quire.engine.request import ScheduledRequest, Sequence
from quire.engine.step_law import StepLaw
from quire.types import Row, Step

_BUCKET = 16  # positions: rows of one token that begin in the same bucket are predicted alike
_MAX_KEPT = 4096  # predictions of steps


class Interference:
    """Divides the time of steps among requests, in their receipts.

    A step lasts from the end of the step before, or the admission of the sequence, to its own end. With p the
    prediction of the step's law, the rows of other requests take 1 - p(own rows) / p(all rows) of it: their
    prompts what the step would be shorter without them, their decoding the rest. All of a step in which a
    running request has no row is interference. The time of encoding images is that of prompts of the requests
    whose images they are, and not divided. Without a law nothing is counted.

    The time that a sequence is preempted is no interference: the receipt has it apart.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk  # tokens of a prompt that a step computes
        self._law: StepLaw | None = None
        self._last_s = -math.inf  # the end of the last step
        self._decoding: dict[tuple[int, int], tuple[float, float]] = {}  # `_decode_s` by bucket and count
        self._together: dict[tuple[int, int], float] = {}  # `_together_s` by number of rows and bucket

    def calibrate(self, law: StepLaw) -> None:
        """Divide by this law from now on."""
        self._law = law
        self._decoding.clear()
        self._together.clear()

    def admit(self, sequence: Sequence, now: float) -> None:
        """Note the first admission of a sequence, and what its cached tokens save."""
        receipt, num_cached, law = sequence.receipt, sequence.num_cached_tokens, self._law
        receipt.admitted_s = now
        receipt.num_counted = max(receipt.num_counted, num_cached)
        if law is not None:
            receipt.cached_saved_s = law.text_s(0, num_cached, self._chunk)

    def count(
        self,
        step: Step,
        sequences: Series[Sequence],
        running: Iterable[Sequence],
        mask_s: float,
        now: float,
        image_s: float = 0.0,
    ) -> None:
        """Enter a step that ends now into the receipts. `sequences` are those of its rows.

        `running` are the sequences with a slot, `mask_s` is how long it waited for the masks of grammars. It
        began with encoding images for `image_s`.
        """
        last_s, self._last_s = self._last_s, now
        for sequence in sequences if mask_s else ():
            if sequence.request.new.grammar:
                sequence.receipt.grammar_s += mask_s
        law = self._law
        if law is None:
            return
        running = tuple(running)
        if image_s:
            self._count_images(step, sequences, running, image_s)
            last_s += image_s
        if len(running) == len(sequences) and all(map(_is_alone, sequences, step.rows)):
            self._count_decoding(step.rows, sequences, law, last_s, now)
            return
        alone, several = self._enter_rows(step.rows, sequences, law)
        delayed = _delayed(running, sequences)
        if len(alone) == 1 and all(one.request in alone for one in delayed):
            return
        decoding = [row for row in step.rows if not _is_prefill(row)] if several else step.rows
        whole_s = decoding_s = self._predict(step.rows, law)
        if len(decoding) < len(step.rows):
            decoding_s = self._predict(decoding, law)
        if whole_s <= 0:
            return
        kept: dict[ScheduledRequest, float] = {}  # the step's time without the prompts of others
        for request, rows in several.items():
            alone[request] = self._predict(rows, law)
            if prompts := [row for row in rows if _is_prefill(row)]:
                kept[request] = self._predict([*decoding, *prompts], law)
        for sequence in delayed:
            receipt = sequence.receipt
            if _counts(sequence):
                since_s = now if receipt.admitted_s is None else receipt.admitted_s
                scale = (now - max(last_s, since_s)) / whole_s
                kept_s = min(whole_s, kept.get(sequence.request, decoding_s))
                own_s = alone.get(sequence.request, 0.0)
                receipt.prefill_interference_s += (whole_s - kept_s) * scale
                if own_s < kept_s:
                    receipt.decode_interference_s += (kept_s - own_s) * scale

    def _count_images(
        self, step: Step, sequences: Series[Sequence], running: Series[Sequence], image_s: float
    ) -> None:
        """Enter the time of encoding images: they are those of the slice and of prompts with a row."""
        rows = zip(sequences, step.rows, strict=True)
        seeing = {
            one.request.new.request_id for one, row in rows if one.request.new.images and _is_prefill(row)
        }
        if step.image_slice is not None:
            seeing.add(step.image_slice.request_id)
        for sequence in _delayed(running, sequences):
            if _counts(sequence) and sequence.request.new.request_id not in seeing:
                sequence.receipt.prefill_interference_s += image_s

    def _count_decoding(
        self, rows: Series[Row], sequences: Iterable[Sequence], law: StepLaw, last_s: float, now: float
    ) -> None:
        """Enter a step in which each running request decodes one token, as in most steps."""
        whole_s = self._together_s(rows, law)
        for sequence, row in zip(sequences, rows, strict=True):
            receipt = sequence.receipt
            alone_s, ideal_s = self._decode_s(row.start, law)
            if row.start >= receipt.num_counted:
                receipt.ideal_s += ideal_s
                receipt.num_counted = row.start + 1
            admitted_s = receipt.admitted_s
            if alone_s < whole_s and admitted_s is not None and receipt.preempted_since_s is None:
                lasted_s = now - (admitted_s if admitted_s > last_s else last_s)
                receipt.decode_interference_s += (1.0 - alone_s / whole_s) * lasted_s

    def _together_s(self, rows: Series[Row], law: StepLaw) -> float:
        """Return the predicted time of a step with these rows of one token, as if all began at their mean."""
        num_rows = len(rows)
        if num_rows == 1:
            return self._decode_s(rows[0].start, law)[0]
        bucket = sum([row[1] for row in rows]) // (num_rows * _BUCKET)
        seconds = self._together.get((num_rows, bucket))
        if seconds is None:
            if len(self._together) >= _MAX_KEPT:
                self._together.clear()
            middle = bucket * _BUCKET + _BUCKET // 2
            values = law.values([(middle, 1)] * num_rows, num_rows)
            seconds = self._together[num_rows, bucket] = law.seconds(values) + law.host_s
        return seconds

    def _enter_rows(
        self, rows: Series[Row], sequences: Iterable[Sequence], law: StepLaw
    ) -> tuple[dict[ScheduledRequest, float], dict[ScheduledRequest, list[Row]]]:
        """Enter what rows ideally take; return the predicted time of each request's rows alone.

        It is still 0 for those of the second result: requests that have more than a row that decodes.
        """
        alone: dict[ScheduledRequest, float] = {}
        several: dict[ScheduledRequest, list[Row]] = {}
        for sequence, row in zip(sequences, rows, strict=True):
            request, receipt, alone_s = sequence.request, sequence.receipt, 0.0
            decodes = not _is_prefill(row)
            if decodes:
                alone_s, ideal_s = self._decode_s(row.start, law, row.count)
                if row.start >= receipt.num_counted:
                    receipt.ideal_s += ideal_s
                    receipt.num_counted = row.start + 1
            else:
                receipt.ideal_s += _ideal_s(receipt, row, law)
            if not decodes or len(request.sequences) > 1:
                several.setdefault(request, []).append(row)
            alone[request] = alone_s
        return alone, several

    def _predict(self, rows: Series[Row], law: StepLaw) -> float:
        """Return the predicted time of a step with these rows and of what precedes it; 0 without rows."""
        if len(rows) < 2 and not any(map(_is_prefill, rows)):
            return self._decode_s(rows[0].start, law, rows[0].count)[0] if rows else 0.0
        num_logits = sum([row.num_logits for row in rows])
        return law.seconds(law.values([(row.start, row.count) for row in rows], num_logits)) + law.host_s

    def _decode_s(self, start: int, law: StepLaw, count: int = 1) -> tuple[float, float]:
        """Return the time of a step with one row of one token, and drafted ones, predicted and at the roof.

        Nearly every row is such a one, so the times are kept.
        """
        key = start // _BUCKET, count
        times = self._decoding.get(key)
        if times is None:
            values = law.values([(start - start % _BUCKET + _BUCKET // 2, count)], count)
            times = self._decoding[key] = law.seconds(values) + law.host_s, law.roof_s(values)
        return times


def _delayed(running: Iterable[Sequence], sequences: Iterable[Sequence]) -> list[Sequence]:
    """Return the sequences that a step delays: those that run, and those of its rows that were preempted."""
    return [*running, *[one for one in sequences if one.slot < 0 and not one.finished]]


def _counts(sequence: Sequence) -> bool:
    """Return True unless the time of the step is one in which the sequence is preempted."""
    receipt = sequence.receipt
    return receipt.preempted_since_s is None or (sequence.slot < 0 and not receipt.preempted_again)


def _is_alone(sequence: Sequence, row: Row) -> bool:
    """Return True if the row is the only one of its request, which runs, and computes one token."""
    return row[2] == 1 and row[4] and sequence.slot >= 0 and len(sequence.request.sequences) == 1


def _ideal_s(receipt: Receipt, row: Row, law: StepLaw) -> float:
    """Return the time at the roof of what a row computes for the first time."""
    end, start = row.start + row.count, max(row.start, receipt.num_counted)
    receipt.num_counted = max(receipt.num_counted, end - len(row.drafted))
    return law.roof_s(law.values([(start, end - start)], row.num_logits)) if start < end else 0.0


def _is_prefill(row: Row) -> bool:
    """Return True unless the row computes the last known token, and its draft."""
    return not row.sample or row.count > 1 + len(row.drafted)
