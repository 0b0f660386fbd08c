"""The state of a scheduler at the beginning of an epoch, in plain values that a recording can keep."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.receipts import Receipt
from quire.engine.speculation import SpeculationState
from quire.engine.step_law import StepLaw
from quire.types import NewRequest

SequenceName = tuple[str, int]  # the id of its request, and its index


class EpochSequence(NamedTuple):
    """A sequence without a final output at the beginning of an epoch. `number` is its index."""

    number: int
    emitted: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    receipt: Receipt = Receipt()
    follows: bool = False  # it waits until the first one has computed the prompt
    num_resumed: int = 0  # tokens of `emitted` that another engine emitted


class EpochRequest(NamedTuple):
    """A request with open sequences at the beginning of an epoch; followers are in their order."""

    new: NewRequest
    sequences: tuple[EpochSequence, ...]
    owes_prompt_logprobs: bool = False


class Epoch(NamedTuple):
    """The state of a scheduler at the beginning of an epoch: all that its later plans depend on.

    `first` are the sequences before the queue, `queued` those in it; both in order. `tenants` and
    `last_served` are those of `policy.QueueState`. `released` are the slots that the next step releases.
    """

    num_steps: int
    requests: tuple[EpochRequest, ...] = ()
    first: tuple[SequenceName, ...] = ()
    queued: tuple[SequenceName, ...] = ()
    tenants: tuple[tuple[str, int], ...] = ()
    last_served: int = -1
    released: tuple[int, ...] = ()
    law: StepLaw | None = None
    draft_law: StepLaw | None = None
    speculation: SpeculationState | None = None
