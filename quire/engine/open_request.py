"""Open requests on the caller's side, and their continuation by another engine.

A request outlives its engine: what each of its sequences was given is known here, and another engine goes on
after the last token. So its reader gets every output once, whichever engines computed them.

A request may be what an engine died of. Of several that were computed when it died, nobody knows which one:
those that lost SUSPECT_DEATHS engines in a row without a token between are *suspects*, and the next engine
computes each of them alone. One that loses MAX_DEATHS engines while it is alone is ended by its client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from quire.errors import EngineDead, QuireError, RequestError
from quire.types import NewRequest, Output, RequestMetrics

if TYPE_CHECKING:
    from quire.transfer.parcels import AnyParcel

SUSPECT_DEATHS = 2
MAX_DEATHS = 3


class RequestOwner(Protocol):
    """The client that runs a request, as far as its stream calls it."""

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """End a request, or one sequence of it."""

    def abort_later(self, own: OpenRequest) -> None:
        """Abort a request without readers, from any thread that the garbage collector may run in."""


class RequestObserver(Protocol):
    """Whoever routes requests: it learns of the outputs and of the end of each."""

    def delivered(self, own: OpenRequest, output: Output) -> None:
        """Note an output of a request."""

    def ended(self, own: OpenRequest) -> None:
        """Note the end of a request, with its last output or with an error."""


@dataclass(slots=True, eq=False)
class Delivered:
    """All that one sequence was given so far, by any engine.

    Once an engine was lost, `before` has the times up to then, and `lost_s` when that was.
    """

    token_ids: list[int]
    ended: bool = False
    aborted: bool = False  # by the caller: its final output may be on its way
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    before: RequestMetrics | None = None
    lost_s: float = 0.0

    def joined(self, output: Output) -> Output:
        """Return an output of a later engine with the times and cached tokens of the whole sequence."""
        times = output.metrics
        if times is not None and self.before is not None:
            times = _joined(self.before, times, self.lost_s)
        return output._replace(num_cached_tokens=self.num_cached_tokens, metrics=times)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """An open request of an engine, and its outputs that were not fetched yet.

    The buffer is bounded by the request's maximum number of tokens, however slow its reader is.
    """

    request: NewRequest
    owner: RequestOwner
    wake: Callable[[OpenRequest], None] | None = None  # called when there is something to fetch
    outputs: list[Output] = field(default_factory=list)
    error: QuireError | None = None  # that ended it
    sequences: tuple[Delivered, ...] = ()
    num_open: int = 0  # sequences without a final output yet
    sent: bool = False  # to the engine of the owner
    exposed: bool = False  # the engine works on it, and may die of it
    num_deaths: int = 0  # of engines, one after the other, that it was exposed to and that gave it no token
    num_deaths_alone: int = 0  # of these engines, those that no other request was exposed to
    fingerprints: list[str] = field(default_factory=list)  # of the engines that gave it tokens, in order
    replica: int = 0  # the number of the engine that has it, among several
    brought: Sequence[AnyParcel] = ()  # blocks of its prompt, for the engine that it is sent to next
    _scored: bool = False  # the prompt's log-probabilities were given

    def __post_init__(self) -> None:
        resumed = self.request.resumed or ((),) * self.request.params.num_sequences
        self.sequences = tuple(Delivered(list(ids or ()), ended=ids is None) for ids in resumed)
        self.num_open = sum(not one.ended for one in self.sequences)

    @property
    def ended(self) -> bool:
        return not self.num_open or self.error is not None

    @property
    def is_suspect(self) -> bool:
        """It may be what engines die of: it is computed alone until it gets a token."""
        return self.num_deaths >= SUSPECT_DEATHS

    @property
    def kills(self) -> bool:
        """Engines die of it, and of nothing else."""
        return self.num_deaths_alone >= MAX_DEATHS

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its outputs: those of engines that differ are joined by "+"."""
        return "+".join(self.fingerprints)

    def take(self) -> list[Output]:
        """Return the outputs since the last call, possibly none. After the last, raise the error, if any."""
        if not self.outputs:
            if self.error is not None:
                raise self.error
            return []
        outputs, self.outputs = self.outputs, []
        return outputs

    def deliver(self, output: Output) -> None:
        """Take an output of an engine. Runs for every token of it: keep the work small."""
        one = self.sequences[output.sequence]
        if one.before is not None:
            output = one.joined(output)
        if output.token_ids:
            one.token_ids += output.token_ids
            one.num_cached_tokens = output.num_cached_tokens
            self.num_deaths = self.num_deaths_alone = 0
        if output.metrics is not None:
            one.metrics = output.metrics
        if output.prompt_logprobs:
            self._scored = True
        if output.finish_reason is not None:
            one.ended = True
            self.num_open -= 1
        self.outputs.append(output)

    def fail(self, error: QuireError) -> None:
        """End it with an error."""
        self.error = error
        if self.wake is not None:
            self.wake(self)
            self.wake = None

    def release_brought(self) -> None:
        """Release the blocks that came for it, which no engine gets any more."""
        for parcel in self.brought:
            parcel.discard()
        self.brought = ()

    # Continuation

    def note_abort(self, sequence: int | None) -> None:
        """Note that the caller ended it, or one sequence: no other engine goes on with that."""
        for index, one in enumerate(self.sequences):
            one.aborted |= sequence is None or index == sequence

    def take_fingerprint(self, fingerprint: str) -> None:
        """Note that an engine with this fingerprint gets it now."""
        if not any(one.token_ids for one in self.sequences):
            self.fingerprints.clear()
        if fingerprint not in self.fingerprints:
            self.fingerprints.append(fingerprint)

    def lose_engine(self, lost_s: float, died: bool, alone: bool = False) -> None:
        """Note that its engine gives no more outputs since `lost_s` (of time.monotonic).

        `alone`: no other request was exposed to that.
        """
        if died and self.exposed:
            self.num_deaths += 1
            self.num_deaths_alone += alone
        self.sent = self.exposed = False
        for one in self.sequences:
            if (
                one.token_ids and one.metrics is not one.before
            ):  # else it got none since the last one was lost
                one.before, one.lost_s = one.metrics, lost_s

    def aborted_outputs(self, now: float) -> list[Output]:
        """Return the final outputs of sequences that the caller ended and no engine will."""
        request_id, arrival_s = self.request.request_id, self.request.arrival_s
        return [
            Output(
                request_id,
                index,
                finish_reason="abort",
                num_cached_tokens=one.num_cached_tokens,
                metrics=RequestMetrics(arrival_s, finished_s=now),
            )
            for index, one in enumerate(self.sequences)
            if one.aborted and not one.ended
        ]

    def continued(self) -> NewRequest:
        """Return the request for the next engine: what it was given so far is not computed again."""
        request = self.request
        resumed = tuple(None if one.ended else tuple(one.token_ids) for one in self.sequences)
        if not any(one.ended or one.token_ids for one in self.sequences):
            return request
        params = replace(request.params, prompt_logprobs=None) if self._scored else request.params
        return replace(request, params=params, resumed=resumed)


class OpenRequests:
    """All open requests of one engine, by id, in order of arrival.

    Each ends once: by the final output of its last sequence, or by an error. Not thread-safe; wake callbacks
    run in the calling thread.
    """

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}
        self.observer: RequestObserver | None = None

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        """Iterate over a copy: requests may end meanwhile."""
        return iter(list(self._open.values()))

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def open(self, own: OpenRequest) -> OpenRequest:
        """Add a request. Raises RequestError for an id in use."""
        request_id = own.request.request_id
        if request_id in self._open:
            hint = "give every open request its own id"
            raise RequestError(f"request id {request_id!r} is in use", hint, "request_id")
        self._open[request_id] = own
        return own

    def take(self, request_id: str) -> OpenRequest | None:
        """Return a request, and forget it: it goes on elsewhere."""
        return self._open.pop(request_id, None)

    def take_all(self) -> list[OpenRequest]:
        """Return all requests, and forget them: they go on elsewhere."""
        opened, self._open = [*self._open.values()], {}
        return opened

    def take_unsuspected(self) -> list[OpenRequest]:
        """Return all requests that are no suspects, and forget them: they go on elsewhere."""
        opened = self.take_all()
        self._open = {own.request.request_id: own for own in opened if own.is_suspect}
        return [own for own in opened if not own.is_suspect]

    def lose_engine(self, lost_s: float) -> None:
        """Note that the engine has died, and gives no more outputs since `lost_s`; end what was aborted."""
        alone = sum(own.exposed for own in self) == 1
        for own in self:
            own.lose_engine(lost_s, died=True, alone=alone)
            self.deliver(own.aborted_outputs(time.monotonic()))

    @property
    def has_suspect_sent(self) -> bool:
        """The engine computes a suspect: it is sent nothing else meanwhile."""
        return any(own.sent and own.is_suspect for own in self._open.values())

    def sendable(self) -> list[OpenRequest]:
        """Return the requests to send to the engine now: a suspect alone, or all if there is none."""
        if self.has_suspect_sent:
            return []
        waiting = [own for own in self if not own.sent]
        suspects = [own for own in waiting if own.is_suspect]
        return suspects[:1] or waiting

    def deliver(self, outputs: list[Output]) -> None:
        """Distribute outputs to their requests. Runs once a step: keep the work per token small."""
        opened = self._open
        for output in outputs:
            own = opened.get(output.request_id)
            if own is None:
                continue
            own.deliver(output)
            if own.wake is not None:
                own.wake(own)
            if self.observer is not None:
                self.observer.delivered(own, output)
            if not own.num_open:
                del opened[output.request_id]
                own.wake = None  # it may hold the reader, which holds this request
                own.release_brought()
                if self.observer is not None:
                    self.observer.ended(own)

    def fail(self, request_id: str, error: QuireError) -> None:
        """End a request with an error."""
        if (own := self._open.pop(request_id, None)) is not None:
            own.release_brought()
            own.fail(error)
            if self.observer is not None:
                self.observer.ended(own)

    def fail_all(self, error: EngineDead) -> None:
        """End all requests with an error, each with its own exception."""
        for own in self:
            self.fail(own.request.request_id, another(error))


def another(error: EngineDead) -> EngineDead:
    """Copy an error: one exception raised several times would accumulate all tracebacks."""
    one = EngineDead(error.message, error.hint, error.retry)
    one.__cause__ = error.__cause__
    return one


def _joined(before: RequestMetrics, later: RequestMetrics, lost_s: float) -> RequestMetrics:
    """Return the times of a sequence that another engine continued after `lost_s`.

    The time from then to the next token counts as preempted. What the engine before counted since the times
    it told is not known.
    """
    back_s = later.finished_s if later.first_token_s is None else later.first_token_s
    away_s = 0.0 if back_s is None else max(0.0, back_s - lost_s)
    return replace(
        before,
        finished_s=later.finished_s,
        num_preemptions=before.num_preemptions + later.num_preemptions,
        num_continuations=before.num_continuations + 1,
        preempted_s=before.preempted_s + away_s + later.preempted_s - later.prefill_preempted_s,
        decode_interference_s=before.decode_interference_s + later.decode_interference_s,
        grammar_s=before.grammar_s + later.grammar_s,
        ideal_s=before.ideal_s + later.ideal_s,
        num_drafted=before.num_drafted + later.num_drafted,
        num_accepted=before.num_accepted + later.num_accepted,
        drafting_saved_s=before.drafting_saved_s + later.drafting_saved_s,
    )
