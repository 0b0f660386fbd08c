"""Sampling on an accelerator: launches for all rows of a step, and their results on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, Argument, Constant, DeviceArray, HostCopy, Launch
from quire.backends.cuda.device_slots import DeviceSlot
from quire.backends.cuda.draws import MOST_DRAWS, DrawGroup, Draws, RowDraws, edits, parameters
from quire.backends.cuda.kernels.variants import LIST_BLOCK, MOST_LISTED, SAMPLING_BLOCK, SURVEYED_PARTS
from quire.backends.cuda.launch_list import Grid
from quire.backends.cuda.memory import ReusedMemory
from quire.program.caches import MAX_DRAFTED
from quire.quantize.groups import ceil_div
from quire.sampling.faults import FAULTS
from quire.types import PositionLogprobs, Row, RowResult, TokenLogprob

_INT, _FLOAT, _DOUBLE = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.float64)
# Bytes by number of the vocabulary: of a draw, edited logits and two arrays of candidates; of a slot, what it
# has seen, and how often.
_DRAW_BYTES, _SLOT_BYTES = 3 * 4, 1 + 4
_PART_BYTES = 4 * 4 + 8  # of a draw, by block of logits: the greatest two, a token, a count, a sum
_UPLOADED_BYTES = 128  # of a draw: its parameters, without what it lists
_LISTED_BYTES = 4 * (3 + 2 * MOST_LISTED) + 16  # results and scratch of a position

Arrays = Mapping[str, DeviceArray]


class _Surveyed(NamedTuple):
    """Scratch memory for rows of logits: [rows, vocab], then what there is of each block of them."""

    kept: DeviceArray
    kept_ids: DeviceArray
    tops: DeviceArray  # the greatest logit
    firsts: DeviceArray  # its first token
    sums: DeviceArray


def sampling_bytes(vocab_size: int, num_logits: int) -> int:
    """Return the bytes of sampling from so many rows of logits, without what slots take."""
    uploaded = 2 * (vocab_size // 8 + _UPLOADED_BYTES)  # with as much to spare
    drawn = _DRAW_BYTES * vocab_size + _PART_BYTES * ceil_div(vocab_size, SAMPLING_BLOCK)
    return min(num_logits, MOST_DRAWS) * drawn + num_logits * (_LISTED_BYTES + uploaded)


def penalty_bytes(vocab_size: int) -> int:
    """Return the bytes of the counts of tokens that a slot with penalties takes."""
    return _SLOT_BYTES * vocab_size


def _sections(draws: Draws) -> dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]]:
    """Return the parts of a step's results by name: the first of its numbers, shape and type."""
    tokens, listed, top = draws.num_tokens, draws.num_listed, MOST_LISTED if draws.most_listed else 0
    shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
        "tokens": ((tokens,), _INT),
        "faults": ((tokens,), _INT),
        "logprobs": ((listed,), _FLOAT),
        "ranks": ((listed,), _INT),
        "listed_faults": ((listed,), _INT),
        "top_logprobs": ((listed, top), _FLOAT),
        "top_tokens": ((listed, top), _INT),
    }
    found, end = {}, 0
    for name, (shape, kind) in shapes.items():
        found[name] = end, shape, kind
        end += prod(shape)
    return found


def _found(draws: Draws, copied: np.ndarray) -> dict[str, list[Any]]:
    """Return the results of draws by name."""
    return {
        name: copied[first : first + prod(shape)].view(kind).reshape(shape).tolist()
        for name, (first, shape, kind) in _sections(draws).items()
    }


def drawn_tokens(draws: Draws, copied: np.ndarray) -> list[int | None]:
    """Return the token at each place of the results of draws; None where none could be drawn."""
    found = _found(draws, copied)
    both = zip(found["tokens"], found["faults"], strict=True)
    return [None if fault else token for token, fault in both]


class DeviceSampler:
    """Samples the rows of steps, and those of the passes of a draft model, in the order of launches.

    `_drawn` [MAX_DRAFTED + 1, slots + 1] are the tokens drawn last for each slot, by a step and by each pass
    after it; others are arbitrary. Counts for penalties are allocated for the first request that has any.
    """

    def __init__(self, accelerator: Accelerator, num_slots: int, vocab_size: int) -> None:
        self._accelerator = accelerator
        self._spare = num_slots  # the row of counts, and the place of tokens, that nobody reads
        self._vocab, self._parts = vocab_size, ceil_div(vocab_size, SAMPLING_BLOCK)
        drawn = (MAX_DRAFTED + 1) * (num_slots + 1)
        self._drawn = accelerator.allocate(4 * drawn).part(0, (drawn,), _INT)
        self._numbers = accelerator.allocate(4 * MOST_DRAWS).part(0, (MOST_DRAWS,), _INT)
        accelerator.write(self._numbers, np.arange(MOST_DRAWS, dtype=_INT))
        self._counts: tuple[DeviceArray, DeviceArray] | None = None
        self._uploads, self._scratch, self._found = (ReusedMemory(accelerator) for _ in range(3))
        self._listing, self._fitting = ReusedMemory(accelerator), ReusedMemory(accelerator)

    def admit(self, number: int, slot: DeviceSlot) -> None:
        """Count the tokens of a new sequence, if it has penalties."""
        if slot.sampling is None or not slot.sampling.penalizes:
            return
        if self._counts is None:
            shape = (self._spare + 1, self._vocab)
            size = shape[0] * shape[1]
            seen = self._accelerator.allocate(size).part(0, shape, np.dtype(np.int8))
            self._counts = seen, self._accelerator.allocate(4 * size).part(0, shape, _INT)
        seen, counts = self._counts
        known = np.zeros(self._vocab, np.int8)
        known[slot.token_ids] = 1
        output = slot.token_ids[slot.admission.num_prompt_tokens :]
        counted = np.bincount(np.array(output, np.intp), minlength=self._vocab).astype(np.int32)
        self._accelerator.write(seen.rows(number, 1), known)
        self._accelerator.write(counts.rows(number, 1), counted)

    def count(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Count tokens of slots with penalties, each of its slot."""
        numbers, tokens = self._uploads.upload([np.array(slots, _INT), np.array(token_ids, _INT)])
        self._count(numbers, tokens, len(slots))

    def _count(self, slots: DeviceArray, tokens: DeviceArray, count: int) -> None:
        seen, counts = self._penalties()
        self._over_list("count_tokens", (seen, counts, slots, tokens, count, self._vocab), count)

    def _penalties(self) -> tuple[DeviceArray, DeviceArray]:
        if self._counts is None:
            raise RuntimeError("no slot with penalties was admitted")
        return self._counts

    def stands_for(self, slot: int, number: int = 0) -> int:
        """Return the negative number that stands for the token drawn last for a slot: by a step, or by the
        pass of this number, from 1 on, after it.
        """
        return -1 - self._place(slot, number)

    def _place(self, slot: int, number: int) -> int:
        return number * (self._spare + 1) + slot

    def feed(self, tokens: DeviceArray) -> None:
        """Replace negative numbers by the tokens that they stand for, in place."""
        count = tokens.shape[0]
        self._over_list("feed_tokens", (tokens, self._drawn, count), count)

    def launch(self, draws: Draws, logits: DeviceArray, number: int = 0) -> HostCopy | None:
        """Launch draws from the logits [L, width] of a step, or of the pass of this number after it.

        Begin to copy their results to the host. Tokens that a narrower model has no logits of are not drawn.
        """
        if not draws.num_tokens + draws.num_listed:
            return None
        if logits.shape[1] != self._vocab:
            logits = self._fit(logits)
        own = [
            parameters(group) | (edits(group, self._spare) if group.edited else {}) for group in draws.groups
        ]
        places = np.full(draws.num_tokens, self._place(self._spare, number), _INT)
        for group in draws.groups:
            own_places = [self._place(draw.slot, number) for draw in group.draws]
            places[group.first : group.first + len(group.draws)] = own_places
        scored = np.array(draws.scored, _INT).reshape(-1, 2)
        whole = [places, scored[:, 0].copy(), scored[:, 1].copy()]
        uploaded = iter(self._uploads.upload([*whole, *(array for each in own for array in each.values())]))
        placed, scored_rows, scored_ids = next(uploaded), next(uploaded), next(uploaded)
        sections = _sections(draws)
        memory = self._found.take(4 * sum(prod(shape) for _, shape, _ in sections.values()))
        results = {
            name: memory.part(4 * first, shape, kind) for name, (first, shape, kind) in sections.items()
        }
        for group, names in zip(draws.groups, own, strict=True):
            self._draw(group, {name: next(uploaded) for name in names}, logits, results)
        args = (self._drawn, placed, results["tokens"], draws.num_tokens)
        self._over_list("place_entries", args, draws.num_tokens)
        for begin in range(0, len(draws.scored), MOST_DRAWS):
            count = min(MOST_DRAWS, len(draws.scored) - begin)
            rows, ids = (one.rows(begin, count) for one in (scored_rows, scored_ids))
            surveyed = _Surveyed(*self._scratch.arrays(self._surveyed(count)))
            self._survey(surveyed, logits, rows)
            self._list(draws.first_scored + begin, rows, ids, logits, results, surveyed)
        return self._accelerator.fetch(memory.part(0, (memory.num_bytes // 4,), _INT))

    def _fit(self, logits: DeviceArray) -> DeviceArray:
        """Launch a copy of logits [L, width] of another model, [L, vocab]."""
        count, width = logits.shape
        (fitting,) = self._fitting.arrays([((count, self._vocab), _FLOAT)])
        grid = (count, ceil_div(self._vocab, SAMPLING_BLOCK), 1)
        self._launch("fit_logits", grid, (fitting, logits, self._vocab, width))
        return fitting

    def _draw(self, group: DrawGroup, own: Arrays, logits: DeviceArray, results: Arrays) -> None:
        """Launch the draws of a group."""
        count, vocab, parts, rows, raw = len(group.draws), self._vocab, self._parts, own["rows"], logits
        shapes = self._surveyed(count)
        more = [shapes[0], shapes[2]] if group.edited else []
        arrays = self._scratch.arrays([*shapes, *more])
        surveyed, edited = _Surveyed(*arrays[: len(shapes)]), arrays[len(shapes) :]
        self._survey(surveyed, logits, rows)
        kept, kept_ids, tops, firsts, sums = surveyed
        if edited:
            changed, tops = edited
            self._edit(group, own, changed, logits)
            logits, rows = changed, self._numbers
            self._survey(surveyed._replace(tops=tops), logits, rows)
        tokens, faults = (results[name].rows(group.first, count) for name in ("tokens", "faults"))
        limits = [own[name] for name in ("temperatures", "top_ks", "top_ps", "min_ps")]
        random = [own[name] for name in ("seeds", "sequences", "positions")]
        how, found = {"PARTS": SURVEYED_PARTS}, (tops, firsts, logits, rows)
        args: tuple[Argument, ...] = (sums, *found, own["temperatures"], own["min_ps"], vocab, parts)
        if any(draw.sampling.params.temperature > 0 for draw in group.draws):
            self._launch("weigh_logits", (count, parts, 1), args, how)
        args = (tokens, faults, surveyed.tops, *found, *limits, *random, sums, kept, kept_ids, vocab, parts)
        self._launch("choose_tokens", (count, 1, 1), args, how)
        if group.edited and any(draw.sampling.penalizes for draw in group.draws):
            self._count(own["counted"], tokens, count)
        if group.listed:
            self._list(group.first_listed, own["rows"], tokens, raw, results, surveyed)

    def _surveyed(self, count: int) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return the shapes and types of scratch memory for so many rows, as _Surveyed has them."""
        whole, parts = (count, self._vocab), (count, self._parts)
        return [(whole, _FLOAT), (whole, _INT), (parts, _FLOAT), (parts, _INT), (parts, _DOUBLE)]

    def _survey(self, to: _Surveyed, logits: DeviceArray, rows: DeviceArray) -> None:
        """Launch the search for the greatest logits of the first of these rows."""
        args = (to.tops, to.firsts, logits, rows, self._vocab)
        self._launch("survey_logits", (to.tops.shape[0], self._parts, 1), args)

    def _edit(self, group: DrawGroup, own: Arrays, out: DeviceArray, logits: DeviceArray) -> None:
        """Launch steps 2 to 9 of docs/sampling.md for a group, from logits to `out`."""
        grid = (len(group.draws), -(-self._vocab // SAMPLING_BLOCK), 1)
        masks, vocab = own["masks"], self._vocab
        args = (out, logits, own["rows"], masks, own["mask_rows"], vocab, masks.shape[1])
        self._launch("mask_logits", grid, args)
        if count := own["biases"].shape[0]:
            listed = [own[name] for name in ("biased_rows", "biased_tokens", "biases")]
            self._over_list("bias_logits", (out, *listed, count, vocab), count)
        if any(draw.sampling.penalizes for draw in group.draws):
            if any(token < 0 for draw in group.draws for token in draw.following):
                self.feed(own["drafted"])
            how = [own[name] for name in ("drafted", "firsts", "repetitions", "frequencies", "presences")]
            self._launch("penalize_logits", grid, (out, own["slots"], *self._penalties(), *how, vocab))

    def _list(
        self,
        first: int,
        rows: DeviceArray,
        tokens: DeviceArray,
        logits: DeviceArray,
        results: Arrays,
        surveyed: _Surveyed,
    ) -> None:
        """Launch log-probabilities of tokens, and the most likely ones, as results from `first` on.

        `surveyed` are at most MOST_DRAWS rows; only the greatest logits of parts are still needed.
        """
        count, vocab, parts = rows.shape[0], self._vocab, self._parts
        names = ("logprobs", "ranks", "listed_faults", "top_logprobs", "top_tokens")
        logprobs, ranks, faults, top_logprobs, top_tokens = (
            results[name].rows(first, count) for name in names
        )
        kept, kept_ids, tops, firsts, sums = surveyed
        log_sums, before = self._listing.arrays([((count, 2), _DOUBLE), ((count, parts), _INT)])
        found = (sums, before, tops, firsts, tokens, logits, rows, vocab, parts)
        how = {"PARTS": SURVEYED_PARTS}
        self._launch("rank_logits", (count, parts, 1), found, how)
        args: tuple[Argument, ...] = (logprobs, ranks, faults, log_sums, *found)
        self._accelerator.launch(Launch("token_logprobs", (count, 1, 1), args, how))
        if top_tokens.num_bytes:
            args = (top_logprobs, top_tokens, log_sums, tops, logits, rows, kept, kept_ids)
            args += (vocab, parts, min(MOST_LISTED, vocab))
            self._launch("top_logprobs", (count, 1, 1), args, how | {"MOST": MOST_LISTED})

    def _launch(
        self, kernel: str, grid: Grid, args: tuple[Argument, ...], more: Mapping[str, Constant] | None = None
    ) -> None:
        self._accelerator.launch(Launch(kernel, grid, args, {"BLOCK": SAMPLING_BLOCK, **(more or {})}))

    def _over_list(self, kernel: str, args: tuple[Argument, ...], count: int) -> None:
        grid = (-(-count // LIST_BLOCK), 1, 1)
        self._accelerator.launch(Launch(kernel, grid, args, {"BLOCK": LIST_BLOCK}))


class DrawnRows:
    """Turns the copied results of draws into those of rows."""

    def __init__(self, draws: Draws, copied: np.ndarray, vocab_size: int) -> None:
        self._scored = {draws.first_scored + i: token for i, (_, token) in enumerate(draws.scored)}
        self._vocab = vocab_size
        self._found = _found(draws, copied)

    def result(self, row: Row, slot: DeviceSlot, own: RowDraws) -> RowResult:
        """Return the result of a row: its tokens as far as they equal the drafted ones, and one more.

        An error after an accepted token recurs as the first of the next row.
        """
        params, faults = slot.admission.params, self._found["listed_faults"]
        if fault := next((faults[place] for place in own.scored if faults[place]), 0):
            return RowResult(error=FAULTS[fault])
        wanted = params.prompt_logprobs
        scored = tuple([self._position(place, self._scored[place], wanted) for place in own.scored])
        if own.failure is not None:
            return RowResult(error=own.failure)
        token_ids: list[int] = []
        for number, drafted in zip(range(len(own.tokens)), (*row.drafted, None), strict=False):
            place = own.tokens[number]
            if fault := self._found["faults"][place]:
                if not token_ids:
                    return RowResult(error=FAULTS[fault])
                break
            token_ids.append(self._found["tokens"][place])
            if token_ids[-1] != drafted:
                break
        listed = enumerate(token_ids if own.listed else ())
        logprobs = tuple([self._position(own.listed[i], token, params.logprobs) for i, token in listed])
        return RowResult(tuple(token_ids), logprobs, scored)

    def _position(self, place: int, token: int, count: int | None) -> PositionLogprobs:
        """Return the log-probabilities of a position: of its token, and of the `count` most likely ones."""
        found, count = self._found, min(count or 0, self._vocab)
        first = TokenLogprob(token, found["logprobs"][place], found["ranks"][place])
        top = zip(found["top_tokens"][place][:count], found["top_logprobs"][place][:count], strict=True)
        return first, *(TokenLogprob(*pair, rank) for rank, pair in enumerate(top, 1))
