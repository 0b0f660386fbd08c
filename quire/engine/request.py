"""Scheduling state: of a request (ScheduledRequest), and of each of its sequences (Sequence)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from quire.engine.blocks import BlockPool, chain_hash, root_hash
from quire.engine.draft_worth import DraftHistory
from quire.engine.receipts import Receipt
from quire.types import (
    Admission,
    Draft,
    Drafting,
    Failure,
    FinishReason,
    NewRequest,
    Output,
    PositionLogprobs,
    PromptImage,
    RequestMetrics,
    Row,
    RowResult,
)


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """State shared by the sequences of one request, from its arrival to its last final output.

    While the first sequence computes the prompt, the others are `followers`: they wait, to share its blocks
    instead of computing them again.
    """

    new: NewRequest
    root: bytes
    max_known: int  # a sequence ends at this many known tokens, prompt included
    eos_token_ids: frozenset[int]
    end_token_ids: frozenset[int]  # eos and stop tokens
    min_known: int  # stop tokens end a sequence only beyond this many known tokens
    num_open: int
    sequences: tuple[Sequence, ...] = ()
    followers: dict[Sequence, None] = field(default_factory=dict)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    lacks_prompt_logprobs: bool = False
    owes_prompt_logprobs: bool = False
    keys: dict[int, bytes] = field(default_factory=dict)  # `block_keys`, by block
    whole: tuple[tuple[int, int], ...] = ()  # (first, end) of images that are computed whole

    @classmethod
    def of(cls, new: NewRequest, max_model_len: int, block_size: int, private: bool) -> ScheduledRequest:
        """Create the state of a new request. The blocks of a `private` one match no other request's."""
        params, num_prompt = new.params, len(new.prompt_token_ids)
        longest = max_model_len if params.max_tokens is None else num_prompt + params.max_tokens
        if new.pooling:
            longest = num_prompt
        salt = f"shared:{new.context_variant}:{len(new.adapter)}:{new.adapter}:{new.cache_salt}"
        if private:
            salt = f"private:{new.request_id}"
        scored = params.prompt_logprobs is not None and num_prompt > 1 and not new.pooling
        scored = scored and not any(new.resumed)  # they were given with the first tokens
        eos_token_ids = frozenset(() if params.ignore_eos else new.eos_token_ids)
        request = cls(
            new=new,
            root=root_hash(salt),
            max_known=min(longest, max_model_len),
            eos_token_ids=eos_token_ids,
            end_token_ids=eos_token_ids.union(params.stop_token_ids),
            # With a grammar the device gives an end token early only if nothing else can follow.
            min_known=num_prompt + (0 if new.grammar else params.min_tokens),
            num_open=0,
            lacks_prompt_logprobs=scored,
            owes_prompt_logprobs=scored,
            whole=tuple((image.first, image.end) for image in new.images if image.whole),
        )
        for position, key in sorted(new.block_keys):
            block = position // block_size
            packed = struct.pack("<QI", position, len(key)) + key
            request.keys[block] = request.keys.get(block, b"") + packed
        emitted = new.resumed or ((),) * params.num_sequences
        request.sequences = tuple(Sequence.of(request, index, ids) for index, ids in enumerate(emitted))
        opened = [one for one in request.sequences if not one.finished]
        request.followers = dict.fromkeys(opened[1:])
        request.num_open = len(opened)
        return request

    @property
    def leader(self) -> Sequence:
        """The first sequence that has not ended: the others may follow it."""
        return next(one for one in self.sequences if not one.finished)

    def whole_at(self, position: int) -> tuple[int, int] | None:
        """Return (first, end) of the whole image that a row from or up to `position` would divide, if any."""
        return next((one for one in self.whole if one[0] < position < one[1]), None)

    def ends_with(self, token_id: int, num_known: int) -> tuple[FinishReason | None, int | None]:
        """Return (finish reason, stop reason) after known token number `num_known`."""
        if num_known > self.min_known and token_id in self.end_token_ids:
            return "stop", None if token_id in self.eos_token_ids else token_id
        return ("length" if num_known >= self.max_known else None), None

    def collect_prompt_logprobs(self, start: int, end: int, got: tuple[PositionLogprobs, ...]) -> bool:
        """Store the prompt logprobs from positions [start, end); return False if some are missing.

        A resumed sequence may recompute positions whose logprobs are known: those are dropped.
        """
        num_wanted = len(self.new.prompt_token_ids) - 1
        if len(got) != max(0, min(end, num_wanted) - start):
            return False
        self.prompt_logprobs.extend(got[len(self.prompt_logprobs) - start :])
        self.lacks_prompt_logprobs = len(self.prompt_logprobs) < num_wanted
        return True

    def failure(self, row: Row, got: RowResult) -> Failure | None:
        """Return what is wrong with the result of a row, if anything, and store its prompt logprobs."""
        if got.error is not None:
            return got.error
        end = row.start + row.count
        if self.lacks_prompt_logprobs and not self.collect_prompt_logprobs(
            row.start, end, got.prompt_logprobs
        ):
            return Failure("the device returned too few prompt logprobs")
        if row.sample and not 0 < len(got.token_ids) <= 1 + len(row.drafted):
            return Failure("the device returned no token, or too many")
        return None

    def take_prompt_logprobs(self) -> tuple[PositionLogprobs, ...]:
        """Return the prompt's logprobs once, when they are complete; otherwise nothing."""
        if self.lacks_prompt_logprobs or not self.owes_prompt_logprobs:
            return ()
        self.owes_prompt_logprobs = False
        return tuple(self.prompt_logprobs)


@dataclass(slots=True, eq=False)
class Table:
    """The blocks a sequence holds in a group, from entry `first` on; earlier ones left the window."""

    first: int
    blocks: list[int]

    @property
    def end(self) -> int:
        """The index after the last entry."""
        return self.first + len(self.blocks)


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the n answers to a request. It waits (slot is -1), runs and ends; if preempted, it waits again.

    Its known tokens are the prompt and those it emitted; steps in flight *promise* it more. The first
    `num_computed` of its tokens have keys and values in the blocks of its `tables`, one per cache group; the
    steps in flight compute those from there to `num_planned`. `chain` holds the hashes of its full blocks;
    like its tokens, they survive a preemption.
    """

    request: ScheduledRequest
    index: int
    num_prompt: int
    num_known: int
    num_ahead: int  # known and promised tokens
    num_planned: int = 0
    num_computed: int = 0
    free_after: int = 0  # after a preemption: the number of committed steps to wait for
    slot: int = -1
    finished: bool = False
    emitted: list[int] = field(default_factory=list)
    num_resumed: int = 0  # tokens of them that another engine emitted
    drafts: tuple[Draft, ...] = ()  # offered for the next row that samples
    drafting: Drafting | None = None  # what was chosen of them for the row in flight
    history: DraftHistory = field(default_factory=DraftHistory)
    tables: list[Table] = field(default_factory=list)
    capacity: int = 0  # positions that all tables have blocks for
    num_registered: int = 0  # leading blocks registered in the prefix cache
    saving: list[tuple[int, BlockPool, int]] = field(default_factory=list)  # position, pool, id
    chain: list[bytes] = field(default_factory=list)
    num_wanted: tuple[int, ...] = ()  # of the last attempt at admission: free blocks needed, by group,
    num_found: int = 0  # leading blocks found in the groups without a window,
    num_usable: int = 0  # those of them it could continue from,
    num_revived: int = -1  # and the counters of the pools then
    num_entered: int = -1
    num_cached_tokens: int = 0
    receipt: Receipt = field(default_factory=Receipt)

    @classmethod
    def of(cls, request: ScheduledRequest, index: int, emitted: tuple[int, ...] | None) -> Sequence:
        """Create a sequence that has emitted these tokens, or that has ended if they are None."""
        num_prompt, token_ids = len(request.new.prompt_token_ids), emitted or ()
        num_known = num_prompt + len(token_ids)
        sequence = cls(request, index, num_prompt, num_known, num_known, finished=emitted is None)
        sequence.emitted, sequence.num_resumed = [*token_ids], len(token_ids)
        if token_ids:
            sequence.receipt.num_counted = num_known - 1
        return sequence

    def known_tokens(self) -> tuple[int, ...]:
        """Return the prompt and all emitted tokens."""
        return self.request.new.prompt_token_ids + tuple(self.emitted)

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Return the hash of full block `index`; those of all blocks before it must be known already."""
        if index < len(self.chain):
            return self.chain[index]
        start, end = index * block_size, (index + 1) * block_size
        token_ids = self.request.new.prompt_token_ids[start:end]
        if end > self.num_prompt:
            emitted = self.emitted[max(0, start - self.num_prompt) : end - self.num_prompt]
            token_ids = token_ids + tuple(emitted)
        parent = self.chain[-1] if index else self.request.root
        self.chain.append(chain_hash(parent, token_ids, self.request.keys.get(index, b"")))
        return self.chain[-1]

    def unseen(self, start: int) -> Iterator[PromptImage]:
        """Yield the images that the device has not encoded before the row from `start` on, in order.

        An image is encoded for the first row with a token of it: if the sequence runs, one before `start`.
        """
        runs = self.slot >= 0
        return (one for one in self.request.new.images if (one.first if runs else one.end - 1) >= start)

    def num_reusable(self) -> int:
        """Return the tokens that a prefix match may cover: not the last, whose logits are always needed.

        A prompt with prompt_logprobs needs the logits of every position without logprobs yet; pooling needs
        the whole prompt in one row.
        """
        if self.request.new.pooling:
            return 0
        if self.request.lacks_prompt_logprobs:
            return min(self.num_known - 1, len(self.request.prompt_logprobs))
        return self.num_known - 1

    def take(
        self, token_ids: tuple[int, ...], now: float
    ) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """Append tokens up to the one that ends the sequence, if any; return them and the reasons."""
        request = self.request
        if self.receipt.awaits_token:
            self.receipt.take_token(now, running=self.slot >= 0)
        before, end_token_ids = self.num_known, request.end_token_ids
        for token_id in token_ids:
            self.emitted.append(token_id)
            self.num_known = num_known = self.num_known + 1
            if token_id in end_token_ids or num_known == request.max_known:
                finish_reason, stop_reason = request.ends_with(token_id, num_known)
                if finish_reason is not None:
                    return token_ids[: num_known - before], finish_reason, stop_reason
        return token_ids, None, None

    def admission(self) -> Admission:
        """Return what the device needs to know of the sequence when it takes its slot."""
        new, params = self.request.new, self.request.new.params
        if params.prompt_logprobs is not None and not self.request.lacks_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)
        return Admission(
            self.slot,
            new.request_id,
            self.index,
            params,
            new.eos_token_ids,
            self.num_prompt,
            new.context_variant,
            new.grammar,
            new.adapter,
            new.images,
            new.pooling,
        )

    def output(self, token_ids: tuple[int, ...], logprobs: tuple[PositionLogprobs, ...]) -> Output:
        """Return an output that is not the last. Inlined, since it runs for every token."""
        request, metrics = self.request, None
        if len(self.emitted) == len(token_ids) + self.num_resumed:
            metrics = self._metrics(None)
        prompt_logprobs = request.take_prompt_logprobs() if request.owes_prompt_logprobs else ()
        name, num_cached = request.new.request_id, self.num_cached_tokens
        given = (token_ids, logprobs, prompt_logprobs, None, None, None, num_cached, metrics, (), None)
        return tuple.__new__(Output, (name, self.index, *given))  # takes half the time of Output(...)

    def final_output(
        self,
        now: float,
        finish_reason: FinishReason,
        stop_reason: int | None = None,
        error: Failure | None = None,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[PositionLogprobs, ...] = (),
        vector: tuple[float, ...] = (),
    ) -> Output:
        """Return the last output of the sequence, with its times (seconds on the engine's clock)."""
        self.receipt.end_preemption(now)
        return Output(
            self.request.new.request_id,
            self.index,
            token_ids,
            logprobs,
            self.request.take_prompt_logprobs() if token_ids else (),
            finish_reason,
            stop_reason,
            error,
            self.num_cached_tokens,
            self._metrics(now),
            vector,
        )

    def _metrics(self, finished_s: float | None) -> RequestMetrics:
        receipt = self.receipt
        return RequestMetrics(
            self.request.new.arrival_s,
            receipt.admitted_s,
            receipt.first_token_s,
            finished_s,
            receipt.num_preemptions,
            receipt.preempted_s,
            receipt.prefill_preempted_s,
            receipt.prefill_interference_s,
            receipt.decode_interference_s,
            receipt.grammar_s,
            receipt.cached_saved_s,
            receipt.ideal_s,
            receipt.num_drafted,
            receipt.num_accepted,
            receipt.drafting_saved_s,
        )

    def check(self, block_size: int) -> None:
        """Raise AssertionError unless the counters agree and the hashes are those of the tokens."""
        token_ids, keys = self.known_tokens(), self.request.keys
        assert len(token_ids) == self.num_known <= self.num_ahead <= self.request.max_known
        assert self.num_prompt == len(self.request.new.prompt_token_ids)
        pooled = bool(self.request.new.pooling)
        assert 0 <= self.num_computed < self.num_known
        assert self.num_computed <= self.num_planned < self.num_ahead + pooled
        assert self.num_registered <= len(self.chain)
        parent = self.request.root
        for index, block_hash in enumerate(self.chain):
            own = token_ids[index * block_size : (index + 1) * block_size]
            parent = chain_hash(parent, own, keys.get(index, b""))
            assert block_hash == parent, "a hash is not that of its tokens"


def prompt_hashes(new: NewRequest, block_size: int) -> tuple[bytes, ...]:
    """Return the hashes of those full blocks of a new request that it may find in a cache, in order."""
    request = ScheduledRequest.of(new, len(new.prompt_token_ids), block_size, private=False)
    sequence = next(one for one in request.sequences if not one.finished)
    return tuple(sequence.block_hash(i, block_size) for i in range(sequence.num_reusable() // block_size))


def drafting_of(sequence: Sequence, row: Row, token_ids: tuple[int, ...]) -> Drafting:
    """Return what a row of a sequence verified that gave these tokens, and why."""
    drafting = sequence.drafting or Drafting(None, 0, 1.0, why_none="nothing proposed")
    return drafting._replace(num_accepted=len(token_ids) - 1 if row.drafted else 0)
