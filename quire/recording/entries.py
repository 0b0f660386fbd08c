"""Entries of a recording: the calls of a scheduler in order, with what it decided and what it was given.

A recording with contents has the requests and tokens themselves. In a redacted one, an Outline stands for a
request: lengths, and one HMAC for each full block, which covers all tokens up to its end.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from quire.engine.epoch_state import Epoch, EpochSequence
from quire.engine.step_law import StepLaw
from quire.types import Draft, Grant, NewRequest, Snapshot, Step

Blocks = tuple[bytes, ...]  # one HMAC for each full block, in order
NUM_MAC_BYTES = 16


class OutlinedTokens(NamedTuple):
    """Tokens that another engine emitted. `blocks` are those after the full blocks of the prompt."""

    num_tokens: int
    blocks: Blocks


class OutlinedImage(NamedTuple):
    """An image without its pixels, as in PromptImage."""

    first: int
    end: int
    whole: bool
    work: int


class Outline(NamedTuple):
    """A request without its contents: what scheduling depends on. `blocks` are those of the prompt.

    `resumed` has those of its sequences that had not ended, as in NewRequest.
    """

    request: int
    num_tokens: int
    blocks: Blocks
    arrival_s: float
    num_sequences: int
    max_tokens: int | None
    priority: int
    tenant: str
    grammar: bool
    pooling: bool
    prompt_logprobs: bool
    resumed: tuple[OutlinedTokens | None, ...] = ()
    images: tuple[OutlinedImage, ...] = ()


class OutlinedSequence(NamedTuple):
    """An open sequence without its tokens. `blocks` are those after the full blocks of the prompt."""

    sequence: EpochSequence
    num_emitted: int
    blocks: Blocks


class OutlinedRequest(NamedTuple):
    """An open request without its contents."""

    outline: Outline
    sequences: tuple[OutlinedSequence, ...]
    owes_prompt_logprobs: bool


class RowShape(NamedTuple):
    """A row of a step without its tokens."""

    slot: int
    start: int
    count: int  # type: ignore[assignment]  # the method of tuples by this name is not missed
    sample: bool
    num_logits: int
    num_drafted: int


class Admitted(NamedTuple):
    """A slot given to a sequence of a request, by the number of the request."""

    slot: int
    request: int
    sequence: int


class EncodedSlice(NamedTuple):
    """A part of the encoding of the image at position `first` of a request, by the number of the request."""

    request: int
    first: int
    begin: int
    end: int


class Composition(NamedTuple):
    """All of a step but tokens and parameters. `number` is its index."""

    number: int
    rows: tuple[RowShape, ...]
    admitted: tuple[Admitted, ...] = ()
    granted: tuple[Grant, ...] = ()
    released: tuple[int, ...] = ()
    restored: tuple[Snapshot, ...] = ()
    saved: tuple[Snapshot, ...] = ()
    num_proposed: int = 0
    image_slice: EncodedSlice | None = None

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class Entry(msgspec.Struct, array_like=True, gc=False):
    """Base class of all entries: arrays that begin with the number of their type."""


class Began(Entry, tag=0):
    """An epoch began. In a redacted recording `outlines` stand for `epoch.requests`, which is empty."""

    now_s: float
    epoch: Epoch
    outlines: tuple[OutlinedRequest, ...] = ()


class Added(Entry, tag=1):
    """A request was added. Its names are numbers and HMACs."""

    request: NewRequest


class Outlined(Entry, tag=2):
    """A request was added, of which only the outline is recorded."""

    outline: Outline


class Aborted(Entry, tag=3):
    """A request, or one sequence of it, was aborted."""

    now_s: float
    request: int
    sequence: int | None


class Drafted(Entry, tag=4):
    """Drafts were offered for a sequence; in a redacted recording all their tokens are zeros."""

    request: int
    sequence: int
    drafts: tuple[Draft, ...]


class Calibrated(Entry, tag=5):
    """The scheduler was given laws, of steps and of the passes of the draft model."""

    law: StepLaw
    draft_law: StepLaw | None = None


class Planned(Entry, tag=6):
    """A step was asked for; None: there was none, or the scheduler failed."""

    now_s: float
    composition: Composition | None


class DeviceTimes(NamedTuple):
    """The times of a StepResult."""

    began_s: float
    ended_s: float
    mask_s: float
    sampling_s: float
    core_wait_s: float
    draft_s: float = 0.0
    image_s: float = 0.0


class Committed(Entry, tag=7):
    """The results of a step: tokens by row, rows that failed, and digests of what else rows returned."""

    now_s: float
    times: DeviceTimes
    token_ids: tuple[tuple[int, ...], ...]
    failed: tuple[int, ...]
    digests: tuple[tuple[int, bytes], ...]  # (row, digest of log-probabilities and vector)


class CommittedOutline(Entry, tag=8):
    """The results of a step without tokens.

    `num_tokens` by row, where drafted tokens were verified: otherwise a row that samples gives one. `stopped`
    are the rows whose sequence a token ended; `blocks`, by row, those that its tokens completed.
    """

    now_s: float
    times: DeviceTimes
    num_tokens: tuple[int, ...]
    failed: tuple[int, ...]
    stopped: tuple[int, ...]
    blocks: tuple[tuple[int, Blocks], ...]


class Loaded(Entry, tag=9):
    """Contents of full blocks `first`, ... of a text were offered, `groups` by block. They are not recorded.

    `request` has all known tokens of a request as its prompt.
    """

    request: NewRequest
    first: int
    groups: tuple[tuple[int, ...], ...]


class LoadedOutline(Entry, tag=10):
    """The same, of which only the outline is recorded."""

    outline: Outline
    first: int
    groups: tuple[tuple[int, ...], ...]


AnyEntry = (
    Began
    | Added
    | Outlined
    | Aborted
    | Drafted
    | Calibrated
    | Planned
    | Committed
    | CommittedOutline
    | Loaded
    | LoadedOutline
)


def composition_of(step: Step, number_of: dict[str, int]) -> Composition:
    """Return the composition of a step. Inlined, since it runs for every step that is recorded."""
    make, rows = tuple.__new__, step.rows
    shapes = [make(RowShape, (row[0], row[1], row[2], row[4], row[5], len(row[6]))) for row in rows]
    admitted = [Admitted(one.slot, number_of[one.request_id], one.sequence) for one in step.admitted]
    encoded = None
    if (part := step.image_slice) is not None:
        encoded = EncodedSlice(number_of[part.request_id], part.image.first, part.begin, part.end)
    return Composition(
        step.index,
        tuple(shapes),
        tuple(admitted),
        step.granted,
        step.released,
        step.restored,
        step.saved,
        step.num_proposed,
        encoded,
    )
