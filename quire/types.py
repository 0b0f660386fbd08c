"""Types shared between the parts of Quire. Standard library only.

A *request* has known tokens (prompt and emitted) and computed tokens (their keys and values are in the
cache). A *step* is the plan of one forward pass: its *rows* say which known tokens to compute for which
*slot*. The device answers a Step with a StepResult; the engine turns that into Outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
# What bound a step: reading memory or a cache, arithmetic by type, the time between steps, sampling with the
# masks of grammars, waiting for a core. "": unknown.
Bound = Literal["", "memory", "cache", "int8", "bf16", "f32", "overhead", "sampling", "waiting"]


class PromptImage(NamedTuple):
    """An image in a prompt, or a part of one: its tokens, `rows` x `columns`, begin at position `first`.

    Between two rows of it are `gap` other tokens.
    `pixels` are `height` x `width` x 3 bytes, as the processor of the model resizes it. Tokens of a `whole`
    one see each other, so a step computes all of them or none. Encoding it takes as many operations as
    computing `work` tokens of a prompt; 0: it is encoded at once in any case.
    """

    first: int
    rows: int
    columns: int
    height: int
    width: int
    pixels: bytes
    whole: bool = False
    work: int = 0
    gap: int = 0

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.first + self.rows * (self.columns + self.gap) - self.gap


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request of one caller, in token ids. `params.n` sequences are generated from one prompt.

    Of these, `params.num_sequences` are computed; if that is one, its outputs are those of all n.

    `eos_token_ids` end a sequence unless `params.ignore_eos`. `cache_salt` separates the prefix caches of
    tenants. `context_variant` selects the rope frequencies for the longest possible context of the request
    (0 unless the model scales rope by length); it also salts the cache. `grammar` is what the output must
    match, in llguidance's format ("": anything); it replaces `params.structured_outputs`, which is None here.

    `adapter` names an addition to the model's weights ("": none); it also salts the cache. `images` are in
    the order of the prompt, where the token ids in their place stand for them. `block_keys`, as (position,
    key), identify whatever besides token ids determines the cache from a position on, such as the digest of
    an image: equal prefixes must have equal keys.
    `predicted_token_ids` are what the caller expects of the output: drafts are taken from them too.
    `report_drafting`: its outputs say what was drafted for them.
    `resumed` continues a request that another engine began: for each computed sequence the tokens that it has
    emitted, or None if it has ended. Outputs then have the tokens after these, with the bits that the other
    engine would have given; prompt logprobs are not given again once a sequence has emitted tokens.
    `pooling` names a pooling method, and asks for a vector instead of tokens: the prompt is then computed in
    one row, which neither uses nor fills the prefix cache, and `params` are ignored.
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
    images: tuple[PromptImage, ...] = ()
    block_keys: tuple[tuple[int, bytes], ...] = ()
    pooling: str = ""
    predicted_token_ids: tuple[int, ...] = ()
    report_drafting: bool = False
    resumed: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """The assignment of a slot on the device to a sequence, at first or again after a preemption.

    `num_prompt_tokens` separates prompt tokens from emitted ones in its first row.
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
    images: tuple[PromptImage, ...] = ()
    pooling: str = ""


# Where drafted tokens come from: the text of the sequence itself, earlier answers, what its grammar leaves no
# choice about, the draft model.
DraftSource = Literal["text", "store", "grammar", "model"]


class Draft(NamedTuple):
    """Guesses at the next tokens of a sequence, in order.

    `match` says how much speaks for them, by which their acceptance is estimated: of texts, how many of the
    last known tokens stand before the continuation that was found; of grammars, 16 if the first is the only
    token allowed; otherwise 0.
    """

    token_ids: tuple[int, ...]
    source: DraftSource
    match: int = 0


# Why a row verifies no draft: none was proposed, verifying would take longer than it saves, the request's
# drafts did not pay so far, or no positions were left in the step, the blocks or the sequence.
WhyNone = Literal["nothing proposed", "slower", "off", "no room"]


class Drafting(NamedTuple):
    """The draft that a row verified and the reasons for its length, for those who look at their own request.

    Of `draft`, the tokens that were verified, the first `num_accepted` were accepted: those that the row gave
    but for its last one, which is not counted even where it was drafted and ended the answer. With all drafts
    of the step, this row was expected to give `expected_tokens` and the step to take `predicted_s`; without
    them one and `plain_s`. The predictions are 0 where there is no law.
    """

    draft: Draft | None = None
    num_accepted: int = 0
    expected_tokens: float = 0.0
    predicted_s: float = 0.0
    plain_s: float = 0.0
    why_none: WhyNone | None = None


class Row(NamedTuple):
    """One sequence's share of a step: compute positions [start, start + count) of the slot's tokens.

    `token_ids` are the known tokens that the device lacks, from position 0 on: all known tokens on
    admission, none afterwards (the device sampled the rest itself). `drafted` are tokens to be verified,
    guesses at those after the known ones: they take the last `len(drafted)` positions, at most MAX_DRAFTED.

    The last `num_logits` positions need logits. With `sample` the last 1 + len(drafted) of these give tokens:
    each samples its own, as long as all before it equal the drafted ones. Positions inside the prompt give
    the log-probabilities of its tokens. `sample` is False until the row reaches the end of the known tokens.
    """

    slot: int
    start: int
    count: int  # type: ignore[assignment]  # the method of tuples by this name is not missed
    token_ids: tuple[int, ...] = ()
    sample: bool = True
    num_logits: int = 1
    drafted: tuple[int, ...] = ()


class Grant(NamedTuple):
    """Blocks of a cache group granted to a slot: entries of its block table from `first` on."""

    slot: int
    group: int
    first: int
    block_ids: tuple[int, ...]


class Snapshot(NamedTuple):
    """A copy, kept as `snapshot`, of a slot's state in a cache group before it computes `position`."""

    slot: int
    group: int
    position: int
    snapshot: int


class BlockLoad(NamedTuple):
    """A block of a cache group (of states: a snapshot) to be given the content of full block `index`."""

    group: int
    block_id: int
    index: int  # type: ignore[assignment]  # the method of tuples by this name is not missed


class ImageSlice(NamedTuple):
    """A part of the encoding of an image of a request: [begin, end) of the `work` that the image is."""

    request_id: str
    image: PromptImage
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """The immutable plan of one forward pass, all that passes from scheduler to device but BlockLoads.

    Order on the device, when the step begins: free the slots `released`, apply `admitted`, write the
    `granted` block ids into their block tables, restore the states of `restored`, compute `rows`, and save
    the states of `saved` as the rows pass their positions. Then the draft model, if there is one, proposes
    `num_proposed` tokens, at most MAX_DRAFTED, after each row that samples; with 0 it does not run.

    Before it computes the rows, the device encodes `image_slice`, a part of an image that no earlier row
    needed, and whatever is left of images that the rows begin to compute.
    """

    index: int
    rows: tuple[Row, ...]
    admitted: tuple[Admission, ...] = ()
    granted: tuple[Grant, ...] = ()
    released: tuple[int, ...] = ()  # slots
    restored: tuple[Snapshot, ...] = ()
    saved: tuple[Snapshot, ...] = ()
    num_proposed: int = 0
    image_slice: ImageSlice | None = None

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class TokenLogprob(NamedTuple):
    """A token at one position: natural logarithm of its probability, and its rank (1 = most likely)."""

    token_id: int
    logprob: float
    rank: int


# The sampled token first, then the most likely ones in order (the sampled one again if among them).
PositionLogprobs = tuple[TokenLogprob, ...]


class Failure(NamedTuple):
    """The reason a sequence failed. `by_request`: its own parameters caused it, so a retry fails too."""

    message: str
    by_request: bool = False


class RowResult(NamedTuple):
    """The result of a row. `error` fails this request alone (for example logits that are NaN).

    The next row of the slot may be in flight when a row fails. The device computes it with an arbitrary
    token, and its result is dropped, as is that of a row whose request ended with the token before.
    `token_ids` are the accepted drafted tokens and the one after them. `prompt_logprobs` has one entry for
    each position start + 1 ... start + count inside the prompt. `vector` is the result of pooling.
    `drafts` are guesses at the tokens after these, by the grammar and by the draft model.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    error: Failure | None = None
    vector: tuple[float, ...] = ()
    drafts: tuple[Draft, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The device's answer to a Step: one RowResult for each row, in the order of `step.rows`.

    `began_s` and `ended_s` are the times when the device began and ended it, on the clock of
    `time.monotonic`. Between them it waited `mask_s` for the masks of grammars, sampled for `sampling_s`, and
    one of its threads waited `core_wait_s` for a core, the one that waited longest. Encoding images took
    `image_s`, at the beginning of that time, and the draft model `draft_s`, at the end of it.
    """

    rows: tuple[RowResult, ...]
    began_s: float = 0.0
    ended_s: float = 0.0
    mask_s: float = 0.0
    sampling_s: float = 0.0
    core_wait_s: float = 0.0
    draft_s: float = 0.0
    image_s: float = 0.0

    @property
    def device_s(self) -> float:
        """The time of the step itself, as in its Record."""
        return self.ended_s - self.began_s - self.mask_s - self.draft_s - self.image_s


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one sequence on the engine's clock, in seconds, its preemptions, and its receipt.

    `queue_s`, `prefill_s`, `decode_s` and `preempted_s` are the time from arrival to end. A preemption lasts
    until the next token; `prefill_preempted_s` is the part of it before the first token.

    Within prefill and decode, `prefill_interference_s` and `decode_interference_s` are what prompts and
    decoding of other requests added. Of sequences that share a prompt, each has those of computing it.
    `grammar_s`: waiting for the masks of its grammar. `cached_saved_s`: what computing the cached part of its
    prompt would have taken. `ideal_s`: its own steps, alone, at the roof. All but `grammar_s` are predictions
    of the engine's StepLaw, for interference scaled to the measured time; they are 0 without one.

    Of `num_drafted` tokens that steps verified, `num_accepted` were right. `drafting_saved_s` is how much
    longer its tokens would have taken without drafts, by the same predictions; less than 0 if not worth it.
    `fetch_s`, a part of `queue_s`, is how long its request waited for blocks from a store.

    `num_continuations` engines went on with it after another one; the time until each gave a token counts as
    preempted. Of one that died, interference, drafts and the like since the first token are not known.
    """

    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    preempted_s: float = 0.0
    prefill_preempted_s: float = 0.0
    prefill_interference_s: float = 0.0
    decode_interference_s: float = 0.0
    grammar_s: float = 0.0
    cached_saved_s: float = 0.0
    ideal_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    drafting_saved_s: float = 0.0
    num_continuations: int = 0
    fetch_s: float = 0.0

    @property
    def queue_s(self) -> float:
        """The time from arrival to admission, or to the end if there was none."""
        until_s = self.finished_s if self.admitted_s is None else self.admitted_s
        return until_s - self.arrival_s if until_s is not None else 0.0

    @property
    def prefill_s(self) -> float:
        """The time from admission to the first token, or to the end, without preemptions."""
        until_s = self.finished_s if self.first_token_s is None else self.first_token_s
        if until_s is None or self.admitted_s is None:
            return 0.0
        return until_s - self.admitted_s - self.prefill_preempted_s

    @property
    def decode_s(self) -> float:
        """The time from the first token to the end, without preemptions."""
        if self.first_token_s is None or self.finished_s is None:
            return 0.0
        return self.finished_s - self.first_token_s - (self.preempted_s - self.prefill_preempted_s)

    @property
    def drafting_gain(self) -> float:
        """The speed of its tokens after the first, in multiples of that without drafts."""
        return (self.decode_s + self.drafting_saved_s) / self.decode_s if self.decode_s > 0 else 1.0


class Output(NamedTuple):
    """The output of one sequence after a step.

    `token_ids` are the new tokens, including a stop token. Exactly one output of a sequence has a
    `finish_reason`: the last. `stop_reason` is the id of the requested stop token that ended it, or None if
    the model ended it. `prompt_logprobs` are in the first output (an empty tuple otherwise), `vector` in the
    only output of a pooling request, `metrics` in the first one of an engine and in the last, `drafting` in
    each that has tokens, of requests with `report_drafting`.
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
    drafting: Drafting | None = None


class DenseModule(NamedTuple):
    """A layer after pooling (sentence-transformers), of linear.weight and linear.bias in its folder."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str | None
