"""The decode engine's side of links: prompts are computed by prefill engines, and answers here.

A prompt goes to a prefill engine when it is long and the engine here has little of it cached. The prefill
engine computes it and one token; its blocks are loaded here, and the request goes on as one that another
engine began. So the bits are those of one engine. Whatever goes wrong with a link, the request goes on here
from what it has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from quire.cluster.link import LinkAddress, LinkConnection, connect
from quire.cluster.link_counts import LinkCounts
from quire.cluster.link_messages import Abandon, Alive, Blocks, FromPrefill, Prefill, Prefilled, Refused
from quire.engine.client import Stream
from quire.engine.open_request import OpenRequest, OpenRequests
from quire.engine.request import prompt_hashes
from quire.engine.status import EngineStatus, StepReport
from quire.errors import EngineDead, QuireError
from quire.routing.block_map import BlockMap, keys_in, keys_of
from quire.types import NewRequest, Output, RequestMetrics

if TYPE_CHECKING:
    from quire.server.remote import RemoteEngine

MIN_TOKENS = 512  # of a prompt that are not cached here, for which a prefill engine is asked
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 10.0  # between attempts to connect
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class AskedPrompt:
    """A request whose prompt a prefill engine computes."""

    own: OpenRequest
    since_s: float  # when it was asked for, or when its first tokens came

    def passed(self) -> float:
        """Return the seconds since then, and count from now on."""
        before_s, self.since_s = self.since_s, time.monotonic()
        return self.since_s - before_s


@dataclass(slots=True, eq=False)
class PrefillLink:
    """One prefill engine: its connection, while there is one, and the prompts that it computes."""

    address: LinkAddress
    connection: LinkConnection | None = None
    asked: dict[str, AskedPrompt] = field(default_factory=dict)
    num_tokens: int = 0  # of these prompts
    counts: LinkCounts = field(default_factory=LinkCounts)


class SplitEngine:
    """An EngineClient: the engine of this server, and links to the prefill engines that help it."""

    def __init__(self, engine: RemoteEngine, addresses: Sequence[LinkAddress], key: bytes) -> None:
        self.on_record: Callable[[StepReport], None] | None = None
        self._engine = engine
        self._key = key
        self._links = [PrefillLink(address) for address in addresses]
        self.counts = {str(link.address): link.counts for link in self._links}
        self._decoder = msgspec.msgpack.Decoder(FromPrefill | Alive)
        self._requests = OpenRequests()  # those that wait for their prompt
        self._cached = BlockMap()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        engine.on_record = self._take_report
        engine.follow_cache(True)

    def start(self) -> None:
        """Connect to the prefill engines, now and whenever a connection is lost."""
        self._tasks = [asyncio.create_task(self._keep(link)) for link in self._links]

    # EngineClient

    @property
    def status(self) -> EngineStatus:
        """The status of the engine here."""
        return self._engine.status

    @property
    def statuses(self) -> Mapping[int, EngineStatus]:
        """See EngineClient."""
        return self._engine.statuses

    def submit(self, request: NewRequest) -> Stream:
        """See EngineClient."""
        link = self._link_for(request)
        if link is None or link.connection is None or self._engine.healthy(time.monotonic()) is not None:
            return self._engine.submit(request)
        own = self._requests.open(OpenRequest(request, self))
        params = replace(request.params, max_tokens=1, min_tokens=min(1, request.params.min_tokens))
        first = replace(request, params=params)
        try:
            link.connection.send(Prefill(first, link.address.shared))
        except ValueError:  # longer than a frame
            self._requests.take(request.request_id)
            return self._engine.submit(request)
        link.asked[request.request_id] = AskedPrompt(own, time.monotonic())
        link.num_tokens += len(request.prompt_token_ids)
        return Stream(own)

    def abort(self, request_id: str, sequence: int | None = None) -> None:
        """See EngineClient."""
        own = self._requests.get(request_id)
        if own is None:
            self._engine.abort(request_id, sequence)
            return
        own.note_abort(sequence)
        if all(one.aborted for one in own.sequences):
            link = self._give_up(request_id)
            if link is not None and link.connection is not None:
                link.connection.send(Abandon(request_id))
            self._requests.deliver(own.aborted_outputs(time.monotonic()))

    def abort_later(self, own: OpenRequest) -> None:
        """Abort from any thread, such as that of the garbage collector."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort_dropped, own)

    def _abort_dropped(self, own: OpenRequest) -> None:
        if not own.ended:  # otherwise its id may belong to another request by now
            own.owner.abort(own.request.request_id)

    def watch(self, on: bool) -> None:
        """See EngineClient."""
        self._engine.watch(on)

    def healthy(self, now: float) -> str | None:
        """See EngineClient: without prefill engines it serves, too."""
        return self._engine.healthy(now)

    async def close(self) -> None:
        """See EngineClient."""
        for task in self._tasks:
            task.cancel()
        for link in self._links:
            if link.connection is not None:
                link.connection.close()
        self._requests.fail_all(EngineDead("the engine was stopped"))
        await self._engine.close()

    # Prompts

    def _link_for(self, request: NewRequest) -> PrefillLink | None:
        """Return the link with the least work, if a prefill engine shall compute this prompt."""
        if len(request.prompt_token_ids) < MIN_TOKENS or request.pooling or request.resumed:
            return None
        limits = self.status.facts.limits
        longest = limits.max_model_len - len(request.prompt_token_ids)
        if min(request.params.max_tokens or longest, longest) <= 1:
            return None  # the first token is the answer
        connected = [link for link in self._links if link.connection is not None]
        if not connected:
            return None
        hashes = prompt_hashes(request, limits.block_size)
        num_cached = self._cached.match(keys_of(hashes)).get(0, 0) * limits.block_size
        if len(request.prompt_token_ids) - num_cached < MIN_TOKENS:
            return None
        return min(connected, key=lambda link: link.num_tokens)

    def _take_prefilled(self, message: Prefilled) -> None:
        """Pass on the first tokens; what ended only because one token was asked for has not ended."""
        own = self._requests.get(message.request_id)
        if own is None or any(one.error is not None for one in message.outputs):
            return
        own.take_fingerprint(message.fingerprint)
        later_s = own.request.arrival_s - message.arrival_s
        self._requests.deliver([_at_first_token(output, later_s) for output in message.outputs])

    def _continue_here(self, request_id: str) -> None:
        """Give a request to the engine here, which goes on after what it has."""
        self._give_up(request_id)
        own = self._requests.get(request_id)
        if own is None:
            return
        own.lose_engine(time.monotonic(), died=False)
        self._requests.deliver(own.aborted_outputs(time.monotonic()))
        if self._requests.take(request_id) is None:
            return
        try:
            self._engine.adopt(own)
        except QuireError as error:
            own.release_brought()
            own.error = error
            if own.wake is not None:
                own.wake(own)

    def _give_up(self, request_id: str) -> PrefillLink | None:
        """Forget which link computes a prompt; return it."""
        for link in self._links:
            if (asked := link.asked.pop(request_id, None)) is not None:
                link.num_tokens -= len(asked.own.request.prompt_token_ids)
                return link
        return None

    def _take_report(self, report: StepReport) -> None:
        """Keep track of what is cached here."""
        if (changes := report.cache) is not None:
            if changes.whole:
                self._cached.remove_replica(0)
            self._cached.remove(0, keys_in(changes.evicted))
            self._cached.add(0, keys_in(changes.stored))
        if self.on_record is not None:
            self.on_record(report)

    # Links

    async def _keep(self, link: PrefillLink) -> None:
        """Connect, again and again, until cancelled."""
        delay_s, told = FIRST_DELAY_S, ""
        while True:
            try:
                why, proven = await self._serve(link)
                delay_s = FIRST_DELAY_S if proven else delay_s
            except (OSError, UnicodeError) as error:  # of a host's name that cannot be one
                why = getattr(error, "strerror", None) or str(error)
            if why != told:
                _LOG.warning("link %s: %s; prompts are computed here until it is back", link.address, why)
                told = why
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def _serve(self, link: PrefillLink) -> tuple[str, bool]:
        """Use one connection until it ends; return why it did, and whether the other side had the key.

        Raises OSError if there is none.
        """
        ended: asyncio.Future[str] = self._loop.create_future()

        def lost(_: LinkConnection, why: str) -> None:
            if not ended.done():
                ended.set_result(why)

        def make() -> LinkConnection:
            return LinkConnection(
                self._key,
                self._decoder,
                calling=True,
                receive=lambda _, message: self._receive(link, message),
                lost=lost,
            )

        connection = await connect(link.address, make)
        try:
            await asyncio.wait((connection.proven, ended), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                _LOG.info(
                    "link %s: prompts of %d tokens and more are computed there", link.address, MIN_TOKENS
                )
                link.connection = connection
            return await ended, link.connection is not None
        finally:
            connection.close()
            link.connection = None
            for request_id in [*link.asked]:
                link.counts.num_lost += 1
                self._continue_here(request_id)

    def _receive(self, link: PrefillLink, message: FromPrefill) -> None:
        asked, counts = link.asked.get(message.request_id), link.counts
        unwanted = asked is None or asked.own.ended  # it was aborted, or its first tokens were its last
        if unwanted and isinstance(message, Blocks) and message.parcel is not None:
            message.parcel.discard()
            return
        if asked is None:
            return
        match message:
            case Prefilled():
                counts.prompt_s += asked.passed()
                self._take_prefilled(message)
            case Blocks(request_id, parcel):
                if parcel is not None:
                    counts.num_block_bytes += parcel.num_bytes
                    asked.own.brought = (*asked.own.brought, parcel)
                    return
                counts.block_s += asked.passed()
                counts.num_computed += 1
                self._continue_here(request_id)
            case Refused(request_id):
                counts.num_refused += 1
                _LOG.warning("link %s: a prompt was refused: %s", link.address, message.message)
                self._continue_here(request_id)


def _at_first_token(output: Output, later_s: float) -> Output:
    """Return an output of a prefill engine as that of a sequence that goes on, by the clock here."""
    times = output.metrics
    if times is not None:
        times = _moved(times, later_s)
    if output.finish_reason != "length":
        return output._replace(metrics=times)
    return output._replace(finish_reason=None, metrics=times and replace(times, finished_s=None))


def _moved(times: RequestMetrics, later_s: float) -> RequestMetrics:
    def moved(at_s: float | None) -> float | None:
        return None if at_s is None else at_s + later_s

    return replace(
        times,
        arrival_s=times.arrival_s + later_s,
        admitted_s=moved(times.admitted_s),
        first_token_s=moved(times.first_token_s),
        finished_s=moved(times.finished_s),
    )
