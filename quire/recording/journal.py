"""The journal of an engine: a scheduler that writes down its calls, in epochs."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Series
from dataclasses import replace
from typing import Any

import msgspec

from quire.engine.caches import Group
from quire.engine.epoch_state import Epoch, EpochSequence, SequenceName
from quire.engine.epochs import EpochScheduler
from quire.engine.request import ScheduledRequest, Sequence
from quire.engine.step_law import StepLaw
from quire.recording import entries
from quire.recording.chunks import ChunkKind, JournalLimits
from quire.recording.entries import NUM_MAC_BYTES, Blocks, DeviceTimes, Entry
from quire.sampling_params import SamplingParams
from quire.types import BlockLoad, Draft, NewRequest, Output, RowResult, Step, StepResult

Send = Callable[[bytes, ChunkKind], None]
_ENCODER = msgspec.msgpack.Encoder()


class Journal:
    """Encodes entries into chunks and passes them on.

    `send` is called with each chunk and its kind: "epoch" begins an epoch, "more" continues it. `key` is that
    of all HMACs; it is never written down.
    """

    def __init__(self, limits: JournalLimits, send: Send, key: bytes) -> None:
        self.limits = limits
        self.send = send
        self._key = key
        self._pending: list[Entry] = []
        self._num_bytes = 0  # of the epoch, without its beginning
        self._began_s: float | None = None

    @property
    def contents(self) -> bool:
        return self.limits.contents

    def mac(self, parent: bytes, content: bytes) -> bytes:
        """Return the HMAC of some content that follows `parent`."""
        return hmac.digest(self._key, parent + content, "sha256")[:NUM_MAC_BYTES]

    def name(self, kind: str, text: str) -> str:
        """Return what stands for a name of a client: a tenant, a salt."""
        return self.mac(kind.encode(), text.encode("utf-8", "surrogatepass")).hex() if text else ""

    def due(self, now: float, load: float) -> bool:
        """Return True if an epoch should begin, given the share of slots whose sequences it would preempt.

        The first moment is taken at which that share is less than what the second half of the epoch has
        used up of its limits: an idle one past the half, any when the limit is reached.
        """
        if self._began_s is None:
            return True
        limits = self.limits
        used = max(self._num_bytes / limits.epoch_bytes, (now - self._began_s) / limits.epoch_s)
        return used > 0.5 and load <= 2 * used - 1

    def begin(self, entry: entries.Began) -> None:
        """Begin an epoch."""
        self.flush()
        self.send(_ENCODER.encode([entry]), "epoch")
        self._num_bytes, self._began_s = 0, entry.now_s

    def write(self, entry: Entry) -> None:
        """Add an entry; `flush` passes it on."""
        self._pending.append(entry)

    def flush(self) -> None:
        """Pass on the entries written since the last call."""
        if not self._pending:
            return
        chunk, self._pending = _ENCODER.encode(self._pending), []
        self._num_bytes += len(chunk)
        self.send(chunk, "more")


class JournaledScheduler(EpochScheduler):
    """A scheduler whose calls are recorded.

    The plan of a step is passed on before the step computes, so that it is known even if that ends the
    process. Plans do not depend on the recording, except that epochs begin.
    """

    def __init__(self, journal: Journal, *, groups: Iterable[Group], **arguments: Any) -> None:
        self.groups = tuple(groups)
        self.arguments = arguments
        super().__init__(groups=self.groups, **arguments)
        self._journal = journal
        self._number_of: dict[str, int] = {}  # of open requests
        self._num_added = 0
        self._now = 0.0  # of the last call
        self._blocks: dict[Sequence, list[bytes]] = {}  # HMACs of the full blocks, if redacted

    @property
    def records_contents(self) -> bool:
        return self._journal.contents

    def begin_journal(self, header: msgspec.Struct) -> None:
        """Pass on the header of all recordings."""
        self._journal.send(_ENCODER.encode(header), "header")

    def add(self, new: NewRequest) -> None:
        """See Scheduler.add."""
        super().add(new)
        number = self._number_of[new.request_id] = self._num_added
        self._num_added += 1
        request = self._requests[new.request_id]
        if self._journal.contents:
            self._journal.write(entries.Added(self._renamed(new, number)))
            return
        num_full = len(new.prompt_token_ids) // self.block_size
        blocks = self._extend([], request.leader)[:num_full]
        for sequence in request.sequences:
            if not sequence.finished:
                self._blocks[sequence] = self._extend(list(blocks), sequence)
        outline = self._outline(request, number)
        if new.resumed:
            outline = outline._replace(resumed=tuple(map(self._outlined_tokens, request.sequences)))
        self._journal.write(entries.Outlined(outline))

    def _outlined_tokens(self, sequence: Sequence) -> entries.OutlinedTokens | None:
        """Return what stands for the tokens that another engine emitted."""
        if sequence.finished:
            return None
        after = self._blocks[sequence][sequence.num_prompt // self.block_size :]
        return entries.OutlinedTokens(sequence.num_resumed, tuple(after))

    def load(self, new: NewRequest, first: int, groups: Series[Collection[int]]) -> list[BlockLoad]:
        """See Scheduler.load. An epoch that is due begins before: it would forget what is loaded."""
        now = max(self._now, new.arrival_s)
        if self.idle and self._journal.due(now, self.num_running / self.max_num_seqs):
            self._begin(now)
        loads = super().load(new, first, groups)  # without any it may still change the order of free blocks
        self._write_load(new, first, tuple([tuple(sorted(own)) for own in groups]))
        return loads

    def _write_load(self, new: NewRequest, first: int, groups: tuple[tuple[int, ...], ...]) -> None:
        request = ScheduledRequest.of(new, self.max_model_len, self.block_size, private=False)
        known = next(one for one in request.sequences if not one.finished).known_tokens()
        text = replace(new, prompt_token_ids=known, params=SamplingParams(), resumed=())
        if self._journal.contents:
            self._journal.write(entries.Loaded(self._renamed(text, 0), first, groups))
            return
        request = ScheduledRequest.of(text, self.max_model_len, self.block_size, private=False)
        (leader,) = request.sequences
        self._blocks[leader] = self._extend([], leader)
        outline = self._outline(request, 0)
        del self._blocks[leader]
        self._journal.write(entries.LoadedOutline(outline, first, groups))

    def abort(self, request_id: str, now: float, sequence: int | None = None) -> list[Output]:
        """See Scheduler.abort."""
        number = self._number_of.get(request_id)
        if number is None:
            return []
        sequences = self._requests[request_id].sequences
        outputs = super().abort(request_id, now, sequence)
        self._journal.write(entries.Aborted(now, number, sequence))
        self._drop(sequences)
        return outputs

    def draft(self, request_id: str, sequence: int, drafts: tuple[Draft, ...]) -> bool:
        """See Scheduler.draft."""
        drafting = super().draft(request_id, sequence, drafts)
        if drafting:
            if not self._journal.contents:
                drafts = tuple([one._replace(token_ids=(0,) * len(one.token_ids)) for one in drafts])
            self._journal.write(entries.Drafted(self._number_of[request_id], sequence, drafts))
        return drafting

    def calibrate(self, law: StepLaw, draft_law: StepLaw | None = None) -> None:
        """See Scheduler.calibrate."""
        super().calibrate(law, draft_law)
        self._journal.write(entries.Calibrated(law, draft_law))

    def schedule(self, now: float) -> Step | None:
        """See Scheduler.schedule. Before an epoch begins, the steps in flight are waited for."""
        self._now = now
        if self._journal.due(now, self.num_running / self.max_num_seqs):
            if not self.idle:
                return None
            self._begin(now)
        step = None
        try:
            step = super().schedule(now)
        finally:
            composition = entries.composition_of(step, self._number_of) if step is not None else None
            self._journal.write(entries.Planned(now, composition))
            self._journal.flush()
        return step

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """See Scheduler.commit."""
        self._now = now
        times = DeviceTimes(
            result.began_s,
            result.ended_s,
            result.mask_s,
            result.sampling_s,
            result.core_wait_s,
            result.draft_s,
            result.image_s,
        )
        failed = tuple([i for i, row in enumerate(result.rows) if row.error is not None])
        if self._journal.contents:
            token_ids = tuple([row.token_ids for row in result.rows])
            digests = tuple([(i, digest(row)) for i, row in enumerate(result.rows) if has_floats(row)])
            self._journal.write(entries.Committed(now, times, token_ids, failed, digests))
            outputs = super().commit(step, result, now)
        else:
            sequences = self.oldest
            known = [0 if c.finished else c.num_known for c in sequences]
            outputs = super().commit(step, result, now)
            self._write_outline(step, sequences, known, outputs, times, now)
        ended = [out for out in outputs if out.finish_reason is not None]
        for out in ended:
            if out.request_id not in self._requests:
                self._number_of.pop(out.request_id, None)
        if not self.has_work or any(out.error is not None for out in ended):
            self._journal.flush()
        return outputs

    def _write_outline(
        self,
        step: Step,
        sequences: list[Sequence],
        known: list[int],
        outputs: list[Output],
        times: DeviceTimes,
        now: float,
    ) -> None:
        """Write the results of a step without tokens. `known` tokens before it, 0 for an ended sequence."""
        reasons = {
            (o.request_id, o.sequence): o.finish_reason for o in outputs if o.finish_reason is not None
        }
        failed, stopped, blocks, num_tokens = [], [], [], []
        for i, (sequence, before) in enumerate(zip(sequences, known, strict=True)):
            if not before:
                num_tokens.append(1)
                continue
            num_known, full = sequence.num_known, self._blocks[sequence]
            num_tokens.append(num_known - before)
            if num_known // self.block_size > len(full):
                num_full = len(full)
                blocks.append((i, tuple(self._extend(full, sequence)[num_full:])))
            if sequence.finished:
                del self._blocks[sequence]
                reason = reasons[sequence.request.new.request_id, sequence.index]
                if reason == "error":
                    failed.append(i)
                elif reason == "stop" and not sequence.request.new.pooling:
                    stopped.append(i)
        verified = any(row.drafted for row in step.rows)
        self._journal.write(
            entries.CommittedOutline(
                now,
                times,
                tuple(num_tokens) if verified else (),
                tuple(failed),
                tuple(stopped),
                tuple(blocks),
            )
        )

    def _extend(self, blocks: list[bytes], sequence: Sequence) -> list[bytes]:
        """Append the HMACs of the full blocks that are not in `blocks` yet; return them all."""
        request, size, num_prompt = sequence.request, self.block_size, sequence.num_prompt
        prompt, mac = request.new.prompt_token_ids, self._journal.mac
        parent = blocks[-1] if blocks else mac(b"", request.root)
        for index in range(len(blocks), sequence.num_known // size):
            start, end = index * size, (index + 1) * size
            token_ids = prompt[start:end]
            if end > num_prompt:
                token_ids += tuple(sequence.emitted[max(0, start - num_prompt) : end - num_prompt])
            packed = struct.pack(f"<{size}I", *token_ids)
            parent = mac(parent, packed + request.keys.get(index, b""))
            blocks.append(parent)
        return blocks

    def _drop(self, sequences: Iterable[Sequence]) -> None:
        """Forget the sequences that ended, and their request if it did."""
        for sequence in sequences:
            if sequence.finished:
                self._blocks.pop(sequence, None)
                request_id = sequence.request.new.request_id
                if request_id not in self._requests:
                    self._number_of.pop(request_id, None)

    # Epochs

    def _begin(self, now: float) -> None:
        self._journal.flush()
        epoch = self.begin_epoch(now)
        names = {one.new.request_id: str(self._number_of[one.new.request_id]) for one in epoch.requests}

        def renamed(places: tuple[SequenceName, ...]) -> tuple[SequenceName, ...]:
            return tuple((names[request_id], index) for request_id, index in places)

        tenants = tuple((self._journal.name("tenant", name), count) for name, count in epoch.tenants)
        first, queued = renamed(epoch.first), renamed(epoch.queued)
        epoch = epoch._replace(first=first, queued=queued, tenants=tenants)
        if self._journal.contents:
            requests = tuple(
                one._replace(new=self._renamed(one.new, int(names[one.new.request_id])))
                for one in epoch.requests
            )
            self._journal.begin(entries.Began(now, epoch._replace(requests=requests)))
        else:
            outlines = tuple(self._outlined_requests(epoch))
            self._journal.begin(entries.Began(now, epoch._replace(requests=()), outlines))

    def _outlined_requests(self, epoch: Epoch) -> Iterable[entries.OutlinedRequest]:
        for opened in epoch.requests:
            request = self._requests[opened.new.request_id]
            sequences = tuple(self._outlined(request.sequences[one.number], one) for one in opened.sequences)
            outline = self._outline(request, self._number_of[opened.new.request_id])
            yield entries.OutlinedRequest(outline, sequences, opened.owes_prompt_logprobs)

    def _outlined(self, sequence: Sequence, opened: EpochSequence) -> entries.OutlinedSequence:
        after = self._blocks[sequence][sequence.num_prompt // self.block_size :]
        return entries.OutlinedSequence(opened._replace(emitted=()), len(opened.emitted), tuple(after))

    def _outline(self, request: ScheduledRequest, number: int) -> entries.Outline:
        new, params = request.new, request.new.params
        blocks: Blocks = tuple(self._blocks[request.leader][: len(new.prompt_token_ids) // self.block_size])
        return entries.Outline(
            request=number,
            num_tokens=len(new.prompt_token_ids),
            blocks=blocks,
            arrival_s=new.arrival_s,
            num_sequences=params.num_sequences,
            max_tokens=params.max_tokens,
            priority=new.priority,
            tenant=self._journal.name("tenant", new.tenant),
            grammar=bool(new.grammar),
            pooling=bool(new.pooling),
            prompt_logprobs=params.prompt_logprobs is not None,
            images=tuple(
                entries.OutlinedImage(one.first, one.end, one.whole, one.work) for one in new.images
            ),
        )

    def _renamed(self, new: NewRequest, number: int) -> NewRequest:
        """Return a request with a number for its id, and HMACs for the names that clients chose."""
        name = self._journal.name
        return replace(
            new,
            request_id=str(number),
            tenant=name("tenant", new.tenant),
            cache_salt=name("salt", new.cache_salt),
        )


def has_floats(row: RowResult) -> bool:
    """Return True if a row has log-probabilities or a vector."""
    return bool(row.logprobs or row.prompt_logprobs or row.vector)


def digest(row: RowResult) -> bytes:
    """Return a digest of the bits of all floats of a row, with the tokens they belong to."""
    content = _ENCODER.encode((row.logprobs, row.prompt_logprobs, row.vector))
    return hashlib.sha256(content).digest()[:NUM_MAC_BYTES]
