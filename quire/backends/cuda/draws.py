"""The tokens to be drawn in a step, in groups of one launch each, and their parameters as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from quire.backends.cuda.device_slots import DeviceSlot
from quire.backends.cuda.slot_sampling import SlotSampling
from quire.backends.slots import scored_tokens
from quire.sampling.pipeline import Mask
from quire.types import Failure, Row, Step

MOST_DRAWS = 64  # of a group, which bounds the scratch memory for it
_EVEN = 4  # numbers of results begin at multiples of 16 bytes


class Draw(NamedTuple):
    """A token to be drawn for `position` of a sequence, after `following` drafted ones, by row `logits`.

    Drafted ones may be numbers that stand for tokens (DeviceSampler.stands_for). `listed`: with its
    log-probabilities.
    """

    sampling: SlotSampling
    slot: int
    logits: int
    position: int
    following: tuple[int, ...]
    mask: Mask | None
    alone: bool = False  # of its row
    listed: bool = False

    @property
    def counts(self) -> bool:
        """True if the token, once drawn, is counted for penalties. The host says which of several are."""
        return self.alone and self.sampling.penalizes


@dataclass(slots=True)
class DrawGroup:
    """Draws of one kind: `edited` ones change logits, `listed` ones give log-probabilities.

    Their results are tokens `first`, first + 1, ... of the step, and from `first_listed` on of those with
    log-probabilities.
    """

    edited: bool
    listed: bool
    first: int
    first_listed: int
    draws: list[Draw] = field(default_factory=list)


@dataclass(slots=True)
class RowDraws:
    """Places of the results of a row: of its tokens, of their log-probabilities, and of its prompt's."""

    tokens: dict[int, int] = field(default_factory=dict)  # by number of the draw
    listed: dict[int, int] = field(default_factory=dict)
    scored: list[int] = field(default_factory=list)
    failure: Failure | None = None


class Draws:
    """Tokens to be drawn from the logits of a pass, in groups of one launch each.

    Each has a number among those of its row. There are `num_tokens` places for tokens and `num_listed` for
    log-probabilities, those between groups included.
    """

    def __init__(self, draws: Iterable[tuple[RowDraws, int, Draw]]) -> None:
        self.scored: list[tuple[int, int]] = []  # rows of logits, and the tokens that follow
        self.groups: list[DrawGroup] = []
        self.num_tokens = self.num_listed = self.first_scored = 0
        self.most_listed = 0  # of the most likely tokens
        kinds: dict[tuple[bool, bool], list[tuple[RowDraws, int, Draw]]] = {}
        for own, number, draw in draws:
            edited = draw.sampling.edits(draw.position, draw.mask)
            kinds.setdefault((edited, draw.listed), []).append((own, number, draw))
        for (edited, listed), found in sorted(kinds.items(), key=lambda kind: kind[0]):
            for begin in range(0, len(found), MOST_DRAWS):
                self._group(edited, listed, found[begin : begin + MOST_DRAWS])

    def _group(self, edited: bool, listed: bool, found: list[tuple[RowDraws, int, Draw]]) -> None:
        group = DrawGroup(edited, listed, self.num_tokens, self.num_listed, [draw for *_, draw in found])
        self.groups.append(group)
        for place, (own, number, draw) in enumerate(found):
            own.tokens[number] = group.first + place
            if listed:
                own.listed[number] = group.first_listed + place
                self.most_listed = max(self.most_listed, draw.sampling.params.logprobs or 0)
        self.num_tokens += _even(len(found))
        self.num_listed += _even(len(found)) if listed else 0


class StepDraws(Draws):
    """All that the rows of a step sample on the device. Rows that the host samples have nothing.

    `masks` are by row, of those with grammars.
    """

    def __init__(
        self, step: Step, slots: Sequence[DeviceSlot], masks: Mapping[int, Sequence[Any] | Failure]
    ) -> None:
        self.rows = [RowDraws() for _ in step.rows]
        draws, first = list[tuple[RowDraws, int, Draw]](), 0
        for index, (row, slot, own) in enumerate(zip(step.rows, slots, self.rows, strict=True)):
            if slot.sampling is not None:
                each = enumerate(_draws(row, slot.sampling, first, masks.get(index), own))
                draws += [(own, number, draw) for number, draw in each]
            first += row.num_logits
        super().__init__(draws)
        self._score(step, slots)

    def _score(self, step: Step, slots: Sequence[DeviceSlot]) -> None:
        """Add the tokens of prompts whose log-probabilities are wanted, as the last results."""
        self.first_scored, first = self.num_listed, 0
        for row, slot, own in zip(step.rows, slots, self.rows, strict=True):
            if slot.sampling is not None and (following := scored_tokens(row, slot)):
                begin = self.first_scored + len(self.scored)
                own.scored = list(range(begin, begin + len(following)))
                self.scored += [(first + i, token) for i, token in enumerate(following)]
                self.most_listed = max(self.most_listed, slot.admission.params.prompt_logprobs or 0)
            first += row.num_logits
        self.num_listed += _even(len(self.scored))


def _even(count: int) -> int:
    return -(-count // _EVEN) * _EVEN


def _draws(
    row: Row, sampling: SlotSampling, first: int, masks: Sequence[Any] | Failure | None, own: RowDraws
) -> Iterable[Draw]:
    """Yield the draws of a row, whose logits begin at row `first`: at the positions that have masks."""
    if not row.sample:
        return
    if isinstance(masks, Failure):
        own.failure = masks
        return
    count = 1 + len(row.drafted)
    position, logits = row.start + row.count + 1 - count, first + row.num_logits - count
    each = [None] * count if masks is None else masks
    for number, mask in enumerate(each[:count]):
        allowed = sampling.mask(mask)
        at, listed = (logits + number, position + number), sampling.params.logprobs is not None
        yield Draw(sampling, row.slot, *at, row.drafted[:number], allowed, count == 1, listed)


def parameters(group: DrawGroup) -> dict[str, np.ndarray]:
    """Return the arrays by draw that choose_tokens takes."""
    params = [draw.sampling.params for draw in group.draws]
    return {
        "rows": _ints(draw.logits for draw in group.draws),
        "temperatures": np.array([own.temperature for own in params], np.float64),
        "top_ks": _ints(own.top_k for own in params),
        "top_ps": np.array([own.top_p for own in params], np.float64),
        "min_ps": np.array([own.min_p for own in params], np.float64),
        "seeds": np.array([own.seed for own in params], np.int64),
        "sequences": _ints(draw.sampling.sequence for draw in group.draws),
        "positions": _ints(draw.position for draw in group.draws),
    }


def edits(group: DrawGroup, spare: int) -> dict[str, np.ndarray]:
    """Return the arrays that change the logits of a group; without penalties the slot is `spare`."""
    params = [draw.sampling.params for draw in group.draws]
    masks = [draw.mask for draw in group.draws if draw.mask is not None]
    numbers = iter(range(len(masks)))
    entries = [
        (number, token, bias)
        for number, draw in enumerate(group.draws)
        for token, bias in draw.sampling.biases(draw.position).items()
    ]
    following = [draw.following if draw.sampling.penalizes else () for draw in group.draws]
    return {
        "mask_rows": _ints(-1 if draw.mask is None else next(numbers) for draw in group.draws),
        "masks": np.stack(masks) if masks else np.zeros((1, 1), np.uint32),
        "biased_rows": _ints(number for number, _, _ in entries),
        "biased_tokens": _ints(token for _, token, _ in entries),
        "biases": np.array([bias for _, _, bias in entries], np.float32),
        "slots": _ints(draw.slot if draw.sampling.penalizes else spare for draw in group.draws),
        "counted": _ints(draw.slot if draw.counts else spare for draw in group.draws),
        "drafted": _ints(token for tokens in following for token in tokens),
        "firsts": np.cumsum([0, *map(len, following)]).astype(np.int32),
        "repetitions": np.array([own.repetition_penalty for own in params], np.float64),
        "frequencies": np.array([own.frequency_penalty for own in params], np.float32),
        "presences": np.array([own.presence_penalty for own in params], np.float32),
    }


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int32)
