"""A plan: a model on a machine before either is at hand: what fits, how fast each phase is, what binds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quire.cache_plan import Sizing
from quire.config import EngineConfig
from quire.engine.step_law import StepLaw
from quire.program.features import Rows
from quire.roofline.folded import dot
from quire.roofline.machines import Machine
from quire.roofline.shares import Rate, Span

if TYPE_CHECKING:
    from quire.description import Description

LARGEST_BATCH = 1 << 14  # looked at for B*

Bound = Literal["memory", "cache", "arithmetic", "overhead"]


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory of a plan in bytes: what is available, what is fixed, and the cache by its sizing."""

    available_bytes: float
    weight_bytes: int
    activation_bytes: int
    sizing: Sizing
    longest: int  # tokens of the longest sequence that the model or the configuration allows

    @property
    def free_bytes(self) -> float:
        """Bytes for the cache; negative if not even the weights fit."""
        return self.available_bytes - self.weight_bytes - self.activation_bytes

    @property
    def fits(self) -> bool:
        return self.batch(1) > 0

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds, in sequences of the full length at most."""
        return _most(lambda count: self._bytes(1, count) <= self.free_bytes, 1 << 40)

    def batch(self, num_tokens: int) -> int:
        """Return the sequences of so many tokens that fit together."""
        return _most(lambda count: self._bytes(count, num_tokens) <= self.free_bytes, 1 << 20)

    def cards(self, machine: Machine) -> int:
        """Return how many such machines hold the weights, the values of a step and one sequence in full."""
        needed = self.weight_bytes + self.activation_bytes + self._bytes(1, self.longest)
        return int(-(-needed // machine.memory_bytes))

    def _bytes(self, count: int, num_tokens: int) -> int:
        states = count * sum(group.slot_bytes for group in self.sizing.groups)
        return states + self.sizing.nbytes(self.sizing.blocks(count, num_tokens))


@dataclass(frozen=True, slots=True)
class Phase:
    """A step, or the steps of a prompt: the time, the tokens it is for, and what binds most of it."""

    seconds: Span
    tokens: int
    bound: Bound

    @property
    def rate(self) -> Rate:
        return self.seconds.rate(self.tokens)


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """A model on `cards` equal machines. `law` gives the time of any step, `fit` the memory."""

    description: Description
    machine: Machine
    cards: int
    law: StepLaw
    fit: Fit

    @property
    def config(self) -> EngineConfig:
        return self.description.config

    def step(self, rows: Rows, num_logits: int) -> Phase:
        """Return a step of rows (start, count)."""
        found = self.law.values(rows, num_logits)
        limits = self.law.limits(found)
        largest = max(limits, key=lambda limit: limits[limit])
        bound: Bound = largest if largest in ("memory", "cache", "overhead") else "arithmetic"
        return Phase(Span(self.law.roof_s(found), self.law.seconds(found)), num_logits, bound)

    def decode(self, batch: int, context: int) -> Phase:
        """Return a step in which `batch` sequences have `context` tokens and get one more each."""
        return self.step(((max(context - 1, 0), 1),) * batch, batch)

    def verifying(self, batch: int, context: int, num_drafted: int) -> float:
        """Return how many times as long `decode` takes if each sequence verifies some drafted tokens."""
        rows = ((max(context - 1, 0), 1 + num_drafted),) * batch
        verifying = self.step(rows, batch * (1 + num_drafted))
        return verifying.seconds.typical / self.decode(batch, context).seconds.typical

    def prefill(self, num_tokens: int, step_tokens: int | None = None, cached: int = 0) -> Phase:
        """Return all steps of one prompt, alone, in chunks of `step_tokens` (max_num_batched_tokens).

        `cached` tokens before it have been computed already.
        """
        chunk = step_tokens or self.config.max_num_batched_tokens
        total = Span(0.0, 0.0)
        bounds: dict[Bound, float] = {}
        for start in range(0, num_tokens, chunk):
            count = min(chunk, num_tokens - start)
            one = self.step(((cached + start, count),), int(start + count == num_tokens))
            total = total.plus(one.seconds)
            bounds[one.bound] = bounds.get(one.bound, 0.0) + one.seconds.typical
        return Phase(total, num_tokens, max(bounds, key=lambda bound: bounds[bound]))

    def turning_batch(self) -> int | None:
        """Return B*: the smallest batch whose products with weights take more arithmetic than memory.

        Before it, another sequence costs only its own cache; None if there is none up to LARGEST_BATCH.
        """
        products = [stage for stage in self.law.roof if stage.name == "products"]

        def bound(batch: int) -> bool:
            found = self.law.values(((0, 1),) * batch, batch)
            terms = [(dot(stage.memory, found), dot(stage.arithmetic, found)) for stage in products]
            return sum(memory for memory, _ in terms) > sum(arithmetic for _, arithmetic in terms)

        batch = _most(bound, LARGEST_BATCH) + 1
        return batch if batch <= LARGEST_BATCH else None


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 0 to `limit` that fits; `fits` is monotonic, and 0 always fits."""
    high = 1
    while high < limit and fits(high):
        high *= 2
    low, high = high // 2 if high > 1 else 0, min(high, limit)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
