"""Calibration: a law of the time of steps, fitted to records of steps by robust least squares.

The law at the roof says how the time grows with the features of a step; the fit finds the factors by which
memory and arithmetic are slower than the roof, and what each step, row and position with logits adds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from quire.engine.step_law import StepLaw
from quire.program.features import LOGITS, ONE, ROWS, TOKENS

MAX_RECORDS, CLASS_RECORDS = 512, 16  # kept, of all classes and of one
NUM_LATEST = 512  # records of which host_s and tail are taken,
NUM_LONGEST = 64  # of the tail, at least so many of the longest
ROUNDS, MAX_EXCHANGES = 12, 40  # of a fit; usual are one to five exchanges in each round
DISTURBED = 0.02  # of the time of a step: above it, a record counts for less
OVERHEAD = (ONE, ROWS, LOGITS)  # a token adds to arithmetic only
USUAL = 0.02  # relative error of a record that counts fully in any case
SHRINKAGE = 1e-2  # of overhead: what explains a time as well without it, does
# How much slower than the roof memory and arithmetic are assumed to be, until records tell.
_ASSUMED = {"weights": (1.15, 1.4), "attention": (2.0, 1.6), "states": (2.0, 2.0)}
# Of what is assumed: as if so many of a thousand records told nothing else. Without it, the time to read the
# weights could not be told from the overhead of a step, if no step is bound by arithmetic.
_CERTAINTY = (1e-3, 1e-4)

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Calibration:
    """Takes records of steps, and gives the law that fits them best.

    A record belongs to a class: steps that only generate or others, with about as many tokens and as much
    attention. The latest records of each class are kept, so that what a rare prompt has told is not forgotten
    while thousands of like steps follow.
    """

    def __init__(self, roof: StepLaw) -> None:
        self._roof = roof
        self._classes: OrderedDict[tuple[bool, int, int], deque[tuple[float, ...]]] = OrderedDict()
        self.num_records = 0
        self._latest: deque[tuple[float, ...]] = deque(maxlen=NUM_LATEST)

    def add(
        self, found: tuple[float, ...], device_s: float, host_s: float = 0.0, disturbed_s: float = 0.0
    ) -> None:
        """Take the record of a step with these features of the law.

        `host_s` is the time before it in which the device was idle. For `disturbed_s` of `device_s` it waited
        for a core or for masks: that time is left out, and the record counts for less.
        """
        if not 0.0 <= disturbed_s < device_s:
            return
        key = found[TOKENS] == found[ROWS], int(found[TOKENS]).bit_length(), int(max(found)).bit_length()
        records = self._classes.setdefault(key, deque(maxlen=CLASS_RECORDS))
        self._classes.move_to_end(key)
        self.num_records += len(records) < CLASS_RECORDS
        records.append((device_s, disturbed_s, host_s, *found))
        self._latest.append(records[-1])
        if self.num_records > MAX_RECORDS:
            self._forget()

    def _forget(self) -> None:
        """Drop the oldest record of the class that has had none for the longest time."""
        key, records = next(iter(self._classes.items()))
        records.popleft()
        self.num_records -= 1
        if not records:
            del self._classes[key]

    def law(self) -> StepLaw:
        """Return the law that fits the records; without any, the one that is assumed."""
        terms = _Terms.of(self._roof)
        if not self._classes:
            return terms.law(self._roof, terms.assumed)
        kept = np.array([record for records in self._classes.values() for record in records], float)
        trust = self._trust(kept[:, 1] / kept[:, 0])
        law = terms.law(self._roof, _fit(terms, kept[:, 3:], kept[:, 0] - kept[:, 1], trust))
        latest = np.array(self._latest, float)
        host_s = _trimmed_mean(latest[:, 2])
        predicted = _seconds(law, latest[:, 3:]) + host_s
        slower = (latest[:, 0] + latest[:, 2]) / predicted
        return law._replace(host_s=host_s, tail=max(1.0, _tail(slower, predicted)))

    def _trust(self, disturbed: Array) -> Array:
        """Return the weights of the kept records, in the order of their classes.

        Records of which a larger share is `disturbed` count less than others of their class: where every
        short step is disturbed, short steps still count as much as long ones.
        """
        sizes = [len(records) for records in self._classes.values()]
        trust = 1 / (1 + (disturbed / DISTURBED) ** 2)
        best = np.maximum.reduceat(trust, np.cumsum([0, *sizes[:-1]]))
        return np.asarray(trust / np.repeat(best, sizes))


@dataclass(frozen=True, slots=True)
class _Terms:
    """The terms of a law: what each adds to coefficients, by feature, per unit of its number.

    There is a factor for the memory of each group of stages and one for its arithmetic, and there are seconds
    for each tile of tokens, in the arithmetic of products, and of overhead for each step, row and position
    with logits.
    """

    memory: Array  # [terms, stages, features]
    arithmetic: Array
    overhead: Array  # [terms, features]
    assumed: Array  # [terms], what the numbers are without records
    certainty: Array  # of what is assumed

    @classmethod
    def of(cls, roof: StepLaw) -> _Terms:
        """Return the terms of laws with this roof."""
        num_stages, num_features = len(roof.roof), len(roof.features)
        groups: dict[str, list[int]] = {}
        for stage, one in enumerate(roof.roof):
            groups.setdefault(one.name if one.name in _ASSUMED else "weights", []).append(stage)
        tiles = [index for index, feature in enumerate(roof.features) if feature.kind == "tiles"]
        num_terms = 2 * len(groups) + len(tiles) + len(OVERHEAD)
        memory = np.zeros((num_terms, num_stages, num_features))
        arithmetic, overhead = np.zeros_like(memory), np.zeros((num_terms, num_features))
        assumed, certainty = np.zeros((2, num_terms))
        for term, (group, stages) in enumerate(groups.items()):
            other = term + len(groups)
            memory[term, stages] = [roof.roof[stage].memory for stage in stages]
            arithmetic[other, stages] = [roof.roof[stage].arithmetic for stage in stages]
            assumed[[term, other]] = _ASSUMED[group]
            certainty[[term, other]] = _CERTAINTY
        products = [stage for stage, one in enumerate(roof.roof) if one.name == "products"]
        for term, tile in enumerate(tiles, 2 * len(groups)):
            arithmetic[term, products, tile] = 1.0
        overhead[range(-len(OVERHEAD), 0), OVERHEAD] = 1.0
        return cls(memory, arithmetic, overhead, assumed, certainty)

    def law(self, roof: StepLaw, numbers: Array) -> StepLaw:
        """Return the law with these numbers of the terms."""
        memory, arithmetic = (
            np.tensordot(numbers, one, 1).tolist() for one in (self.memory, self.arithmetic)
        )
        stages = tuple(
            stage._replace(memory=tuple(read), arithmetic=tuple(computed))
            for stage, read, computed in zip(roof.roof, memory, arithmetic, strict=True)
        )
        return roof._replace(stages=stages, overhead=tuple((numbers @ self.overhead).tolist()))


def _fit(terms: _Terms, found: Array, seconds: Array, trust: Array) -> Array:
    """Return the numbers of the terms with the least sum of |relative error|, about.

    Each round assigns every stage of every record to memory or arithmetic, whichever takes longer with the
    last numbers, and solves a weighted least squares problem: records far off count for less.
    """
    scaled = found / seconds[:, None]
    memory, arithmetic = (scaled @ one.transpose(1, 2, 0) for one in (terms.memory, terms.arithmetic))
    overhead = scaled @ terms.overhead.T  # [records, terms]; the others are [stages, records, terms]
    numbers, weights = terms.assumed, trust
    for number in range(ROUNDS):
        by_memory = memory @ numbers >= arithmetic @ numbers
        columns = overhead + np.where(by_memory[..., None], memory, arithmetic).sum(axis=0)
        if number > 1:
            errors = np.abs(columns @ numbers - 1)
            usual = max(1.5 * float(np.median(errors)), USUAL)
            weights = trust * np.minimum(1, usual / np.maximum(errors, 1e-12))
        numbers = _least_squares(columns, weights, terms.assumed, terms.certainty)
    return numbers


def _least_squares(columns: Array, weights: Array, assumed: Array, certainty: Array) -> Array:
    """Return the numbers >= 0 with columns @ numbers nearest to 1, in the weighted sum of squares.

    `certainty` pulls numbers to what is assumed of them; the others are pulled to 0, each by a small part of
    what the records say about it.
    """
    weighted = columns * weights[:, None]
    gram, target = weighted.T @ columns, weighted.sum(axis=0)
    pull = np.where(certainty > 0, certainty * weights.sum(), SHRINKAGE * np.diag(gram) + 1e-12)
    gram, target = gram + np.diag(pull), target + pull * assumed
    unit = 1 / np.sqrt(np.diag(gram))
    scaled = gram * unit * unit[:, None] + 1e-9 * np.eye(len(unit))  # definite, whatever is recorded
    return np.asarray(unit * _nonnegative(scaled, target * unit))


def _nonnegative(gram: Array, target: Array) -> Array:
    """Return the x >= 0 that minimizes x gram x / 2 - target x (Murty's method); gram is definite."""
    free = np.ones(len(target), bool)
    found = np.zeros(len(target))
    for _ in range(MAX_EXCHANGES):
        found[:] = 0.0
        found[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
        wrong = np.where(free, found < 0, target - gram @ found > 1e-9)
        if not wrong.any():
            break
        last = np.flatnonzero(wrong)[-1]
        free[last] = not free[last]
    return np.maximum(found, 0.0)


def _seconds(law: StepLaw, found: Array) -> Array:
    """Return the predicted times of steps with these features, [records, features]."""
    total = found @ np.array(law.overhead)
    for stage in law.stages:
        total += np.maximum(found @ np.array(stage.memory), found @ np.array(stage.arithmetic))
    return total


def _tail(slower: Array, predicted: Array) -> float:
    """Return how much slower than predicted long steps are, but for one in a hundred.

    Limits are kept by long steps, those predicted to be at least half as long as the longest: what holds a
    short one up for a moment holds up a long one hardly longer.
    """
    order = np.argsort(-predicted, kind="stable")
    count = min(len(order), max(NUM_LONGEST, int((predicted >= predicted.max() / 2).sum())))
    return float(np.quantile(slower[order[:count]], 0.99))


def _trimmed_mean(times: Array) -> float:
    """Return the mean without the longest 5%."""
    return float(np.sort(times)[: max(1, int(0.95 * len(times)))].mean())
