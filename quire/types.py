"""The nouns: every type that crosses from one part of Quire to another. Standard library only.

A *request* has known tokens (prompt and emitted) and computed tokens (their keys and values are in the
cache). A *step* is the plan of one forward pass: its *rows* say which known tokens to compute for which
*slot*. The device answers a Step with a StepResult; the engine turns that into Outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What one caller asked, in token ids. `params.n` sequences are generated from one prompt.

    Of these, `params.num_sequences` are computed; outputs of one that is computed for all stand for all.

    `eos_token_ids` end a sequence unless `params.ignore_eos`. `cache_salt` keeps the prefix cache of one
    tenant apart from another's. `context_variant` names the set of rope frequencies that the request's
    longest possible context asks for (0 unless the model scales rope by length); it too salts the cache.
    `grammar` is what the output must match, in llguidance's form ("": anything); it stands for
    `params.structured_outputs`, which is None here.

    `adapter` names what is added to the model's weights ("": nothing); it salts the cache, too.
    `embeddings` replace those of some prompt tokens, in a form that only the device knows; the token ids
    there are placeholders. `block_keys`, as (position, key), say what besides token ids decides the cache
    from a position on, such as the digest of an image: prefixes are equal where these are.
    `pooling` asks for a vector instead of tokens, by its method: the prompt is then computed in one row,
    which sees no cached prefix and leaves none, and `params` are not looked at.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float = 0.0
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""
    eos_token_ids: tuple[int, ...] = ()
    context_variant: int = 0
    grammar: str = ""
    adapter: str = ""
    embeddings: object | None = field(default=None, compare=False)
    block_keys: tuple[tuple[int, bytes], ...] = ()
    pooling: str = ""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence of a request takes a slot on the device, at first or again after a preemption.

    `num_prompt_tokens` tells prompt from emitted tokens among those its first row carries.
    """

    slot: int
    request_id: str
    sequence: int
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    context_variant: int = 0
    grammar: str = ""
    adapter: str = ""
    embeddings: object | None = field(default=None, compare=False)
    pooling: str = ""


MAX_DRAFTED = 32  # tokens of a row; backends keep what it takes to go back as far


class Row(NamedTuple):
    """One sequence's share of a step: compute positions [start, start + count) of the slot's tokens.

    `token_ids` are the known tokens that the device lacks, from position 0 on: all known tokens on
    admission, nothing afterwards (the device sampled the rest itself). `drafted` are tokens to be verified:
    guesses at what follows the known ones, the last `len(drafted)` of the positions,
    MAX_DRAFTED at most.

    `num_logits` of the last positions need logits. With `sample` the last 1 + len(drafted) of them give
    tokens: each draws its own, as long as those before it were what was drafted. Those inside the prompt
    give the log-probabilities of its tokens. `sample` is False while the end of the known tokens is not
    reached.
    """

    slot: int
    start: int
    count: int  # type: ignore[assignment]  # the method of tuples by this name is not missed
    token_ids: tuple[int, ...] = ()
    sample: bool = True
    num_logits: int = 1
    drafted: tuple[int, ...] = ()


class Grant(NamedTuple):
    """Blocks of a cache group that a slot's table gets, from its entry `first` on."""

    slot: int
    group: int
    first: int
    block_ids: tuple[int, ...]


class Snapshot(NamedTuple):
    """The state that a slot has in a cache group before it computes `position`, kept apart as `snapshot`."""

    slot: int
    group: int
    position: int
    snapshot: int


@dataclass(frozen=True, slots=True)
class Step:
    """The immutable plan of one forward pass, the only thing that passes from scheduler to device.

    Order on the device, when the step begins to compute: vacate the slots `released`, apply `admitted`,
    write `granted` block ids into the slots' block tables, restore the states of `restored`, compute `rows`
    and keep the states of `saved` as the rows pass their positions.
    """

    index: int
    rows: tuple[Row, ...]
    admitted: tuple[Admission, ...] = ()
    granted: tuple[Grant, ...] = ()
    released: tuple[int, ...] = ()  # slots
    restored: tuple[Snapshot, ...] = ()
    saved: tuple[Snapshot, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class TokenLogprob(NamedTuple):
    """A token at one position: natural logarithm of its probability, and its rank (1 = most likely)."""

    token_id: int
    logprob: float
    rank: int


# The chosen token first, then the most likely ones in order (the chosen one again if among them).
PositionLogprobs = tuple[TokenLogprob, ...]


class Failure(NamedTuple):
    """Why a sequence cannot go on. `by_request`: its own parameters are the cause, and would be again."""

    message: str
    by_request: bool = False


class RowResult(NamedTuple):
    """What a row gave. `error` fails this request alone (for example logits that are not numbers).

    After an error the next row of the slot may be in flight. The device computes any token in it: its result
    is dropped, as is that of a row whose request ended with the token before.
    `token_ids` are the drafted tokens that were accepted and the one that follows them.
    `prompt_logprobs` has one entry for each position start + 1 ... start + count that lies in the prompt.
    `vector` is what pooling gave.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    error: Failure | None = None
    vector: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The device's answer to a Step: one RowResult for each row, in the order of `step.rows`.

    `began_s` and `ended_s` say when the device computed, on the clock of `time.monotonic`.
    """

    rows: tuple[RowResult, ...]
    began_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one sequence on the engine's clock, in seconds, and what happened to it."""

    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


class Output(NamedTuple):
    """What a sequence of a request receives after a step.

    `token_ids` are the new tokens; a stop token is among them. Exactly one output of a sequence has a
    `finish_reason`; it is the last one. `stop_reason` is the id of the stop token that was asked for, or
    None when the model ended by itself.
    `prompt_logprobs` come once, with the first output (an empty tuple otherwise). `vector` comes with the
    only output of a request that asked for pooling.
    """

    request_id: str
    sequence: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: Failure | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    vector: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """What a step cost: for the live view, the metrics and the recording of a run.

    `seconds` run from planning the step to its outputs; those of steps in flight together overlap.
    `device_s` are those in which the device computed it, `idle_s` those before in which it computed nothing
    although requests were open: from the end of the step before, or from planning this one if nothing was
    open then, to its beginning. Nothing is counted twice.
    """

    index: int
    num_rows: int
    num_tokens: int
    num_waiting: int
    num_free_blocks: int
    num_cached_tokens: int  # taken from the prefix cache by the requests admitted in this step
    num_preemptions: int
    seconds: float
    device_s: float = 0.0
    idle_s: float = 0.0
