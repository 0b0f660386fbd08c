"""Replay: feed a recorded run to a scheduler and a device, and compare every step.

The scheduler gets the recorded calls with the recorded times. With contents the device computes, and its
tokens and the bits of its log-probabilities are compared; a redacted recording replays without a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from quire.engine.engine import PendingStep, StepRunner, validate
from quire.engine.epoch_state import Epoch, EpochRequest
from quire.engine.epochs import EpochScheduler
from quire.engine.request import Sequence
from quire.engine.scheduler import Scheduler
from quire.errors import ConfigError, shortened
from quire.recording.entries import (
    Aborted,
    Added,
    AnyEntry,
    Began,
    Calibrated,
    Committed,
    CommittedOutline,
    Composition,
    Drafted,
    Loaded,
    LoadedOutline,
    Outlined,
    Planned,
    composition_of,
)
from quire.recording.incident import Header, Recording
from quire.recording.journal import digest, has_floats
from quire.recording.outlines import Contents
from quire.types import NewRequest, Output, Row, RowResult, Step, StepResult

Progress = Callable[[int], None]  # steps done


class Observer(Protocol):
    """Looks on while a recording is replayed. Times are the recorded ones."""

    def planned(self, now: float, step: Step) -> None:
        """Note a step that was planned."""

    def committing(self, sequences: Iterable[Sequence], now: float) -> None:
        """Note the sequences of a step's rows: before its results are taken in, and again after that."""

    def committed(self, now: float, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        """Note a step whose results were taken in."""

    def ended(self, outputs: Iterable[Output]) -> None:
        """Note outputs, of which some end their sequences."""


class Difference(NamedTuple):
    """The first point at which a replay and its recording differ; `row` is None for a whole step."""

    step: int
    row: int | None
    field: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        place = f"step {self.step}" if self.row is None else f"step {self.step}, row {self.row}"
        return f"{place}, {self.field}: {self.recorded} was recorded, {self.replayed} replayed"


@dataclass(slots=True)
class ReplayResult:
    """The result of a replay. `open_steps` were planned and not committed when the recording ended."""

    num_steps: int = 0
    num_tokens: int = 0  # given by the device
    difference: Difference | None = None
    open_steps: tuple[int, ...] = ()
    failure: str | None = None  # of the scheduler or of an open step, where the recording ends

    @property
    def equal(self) -> bool:
        return self.difference is None


class _Differs(Exception):
    """Ends a replay at its first difference."""

    def __init__(self, difference: Difference) -> None:
        self.difference = difference


class _Launched(NamedTuple):
    step: Step
    pending: PendingStep | None


@dataclass(frozen=True, slots=True)
class _FailedStep:
    """A step that failed when it was launched."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


def replay(
    recording: Recording,
    runner: StepRunner | None,
    progress: Progress = lambda num_steps: None,
    observer: Observer | None = None,
    adapters: Container[str] = (),
) -> ReplayResult:
    """Replay a recording up to the first difference.

    `runner` computes the steps of a recording with contents; without one its results are those recorded, and
    only plans are compared. `adapters` are those that it has. Raises ConfigError for entries that no
    scheduler can have given.
    """
    replaying, outcome = _Replay(recording.header, runner, observer, adapters), ReplayResult()
    try:
        for entry in recording.entries():
            replaying.feed(entry, outcome)
            if isinstance(entry, Committed | CommittedOutline):
                progress(outcome.num_steps)
        replaying.finish(outcome)
    except _Differs as found:
        outcome.difference = found.difference
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"{recording.where}: after {outcome.num_steps:,} steps: {error}") from None
    return outcome


class _Replay:
    """A scheduler that is given recorded calls, and the steps in flight."""

    def __init__(
        self, header: Header, runner: StepRunner | None, observer: Observer | None, adapters: Container[str]
    ) -> None:
        groups = [shape.group() for shape in header.groups]
        try:
            self.scheduler = EpochScheduler(groups=groups, **header.arguments)
        except (TypeError, ValueError, LookupError) as error:
            raise ConfigError(f"the arguments of the scheduler are not possible: {error}") from None
        self._vocab_size = header.vocab_size if header.contents else None
        self._runner = runner
        self._observer = observer
        self._adapters = adapters
        self._contents = Contents(self.scheduler.block_size, self.scheduler.max_model_len)
        self._began = False
        self._released: tuple[int, ...] = ()  # by the first step, before the recording
        self._launched: deque[_Launched] = deque()
        self._number_of: dict[str, int] = {}

    def feed(self, entry: AnyEntry, outcome: ReplayResult) -> None:
        """Repeat a call and compare what it gives."""
        scheduler = self.scheduler
        match entry:
            case Began():
                self._begin(entry, outcome.num_steps)
            case Added(request):
                self._add(_checked(request))
            case Outlined(outline):
                self._add(self._contents.request(outline))
            case Loaded(request, first, groups):
                self._load(_checked(request), first, groups, outcome)
            case LoadedOutline(outline, first, groups):
                self._load(self._contents.request(outline), first, groups, outcome)
            case Aborted(now_s, request, sequence):
                outputs = scheduler.abort(str(request), now_s, sequence)
                if self._observer is not None:
                    self._observer.ended(outputs)
            case Drafted(request, sequence, drafts):
                scheduler.draft(str(request), sequence, drafts)
            case Calibrated(law, draft_law):
                scheduler.calibrate(law, draft_law)
            case Planned(now_s, composition):
                self._plan(now_s, composition, outcome)
            case Committed() | CommittedOutline():
                self._commit(entry, outcome)

    def finish(self, outcome: ReplayResult) -> None:
        """Wait for the steps that were in flight when the recording ended."""
        outcome.open_steps = tuple(launched.step.index for launched in self._launched)
        for step, pending in self._launched:
            try:
                if pending is not None:
                    pending.result()
            except Exception as error:
                outcome.failure = f"step {step.index}: {_described(error)}"
                return

    def _check(self, new: NewRequest) -> None:
        validate(new, self.scheduler, self._vocab_size)
        if new.adapter and self._runner is not None and new.adapter not in self._adapters:
            raise ConfigError(
                f"recorded with the adapter {shortened(new.adapter)}, which is not in adapter_dir as it was",
                "put its files back, or name their folder with --adapter-dir; --times and --trace need none",
            )

    def _add(self, new: NewRequest) -> None:
        self._check(new)
        self.scheduler.add(new)
        self._number_of[new.request_id] = int(new.request_id)

    def _load(
        self, new: NewRequest, first: int, groups: tuple[tuple[int, ...], ...], outcome: ReplayResult
    ) -> None:
        if self.scheduler.load(new, first, groups) and self._runner is not None:
            raise ConfigError(
                f"after {outcome.num_steps:,} steps, blocks were loaded whose contents are not recorded",
                "--times and --trace work; to replay tokens, record without a prefix cache outside memory",
            )

    def _begin(self, entry: Began, num_steps: int) -> None:
        epoch = entry.epoch
        opened = tuple(map(self._contents.open_request, entry.outlines)) or tuple(
            one._replace(new=_checked(one.new)) for one in epoch.requests
        )
        epoch = epoch._replace(requests=opened)
        for request in opened:
            self._number_of[request.new.request_id] = int(request.new.request_id)
        if not self._began:
            self._began = True
            for request in opened:
                self._check_opened(request)
            self.scheduler.restore(epoch)
            self._released = epoch.released
            return
        own = self.scheduler.begin_epoch(entry.now_s)
        own = own._replace(released=self._released + own.released)
        for name in Epoch._fields:
            _compare(epoch.num_steps, None, f"epoch.{name}", getattr(epoch, name), getattr(own, name))

    def _check_opened(self, opened: EpochRequest) -> None:
        self._check(opened.new)
        emitted = [token_id for one in opened.sequences for token_id in one.emitted]
        if (
            self._vocab_size is not None
            and emitted
            and not 0 <= min(emitted) <= max(emitted) < self._vocab_size
        ):
            raise ValueError("an emitted token is not in the vocabulary")

    def _plan(self, now_s: float, recorded: Composition | None, outcome: ReplayResult) -> None:
        try:
            step = self.scheduler.schedule(now_s)
        except Exception as error:  # whatever it is, the recorded one may have failed by the same
            if recorded is not None:
                failed = Difference(recorded.number, None, "scheduler", "a plan", _described(error))
                raise _Differs(failed) from error
            outcome.failure = f"scheduler: {_described(error)}"
            return
        replayed = composition_of(step, self._number_of) if step is not None else None
        if replayed is not None and self._released:
            replayed = replayed._replace(released=self._released + replayed.released)
        number = recorded.number if recorded else replayed.number if replayed else 0
        if recorded is None or replayed is None:
            _compare(number, None, "plan", *("a step" if one else "none" for one in (recorded, replayed)))
        else:
            _compare_compositions(recorded, replayed)
        if step is None:
            return
        if self._observer is not None:
            self._observer.planned(now_s, step)
        self._released = ()
        self._contents.take(step)
        self._launched.append(_Launched(step, self._launch(step)))

    def _launch(self, step: Step) -> PendingStep | None:
        if self._runner is None:
            return None
        try:
            return self._runner.launch(step)
        except Exception as error:
            return _FailedStep(error)

    def _commit(self, entry: Committed | CommittedOutline, outcome: ReplayResult) -> None:
        step, pending = self._launched.popleft()
        now_s, sequences = entry.now_s, self.scheduler.oldest
        if isinstance(entry, CommittedOutline):
            result = self._contents.result(step, entry)
        elif pending is None:
            result = self._contents.recorded_result(step, entry)
        else:
            try:
                result = pending.result()
            except Exception as error:
                failed = Difference(step.index, None, "device", "a result", _described(error))
                raise _Differs(failed) from error
            _compare_results(step, entry, result, [sequence.finished for sequence in sequences])
            result = StepResult(result.rows, *entry.times)
        if (observer := self._observer) is not None:
            observer.committing(sequences, now_s)
        outputs = self.scheduler.commit(step, result, now_s)
        if observer is not None:
            observer.committing(sequences, now_s)
            observer.committed(now_s, step, result, self.scheduler)
            observer.ended(outputs)
        outcome.num_steps += 1
        outcome.num_tokens += sum(len(output.token_ids) for output in outputs)


def _checked(new: NewRequest) -> NewRequest:
    """Return the request with its parameters checked: decoding does not check ranges."""
    return replace(new, params=new.params.clone())


def _compare(step: int, row: int | None, field: str, recorded: Any, replayed: Any) -> None:
    if recorded != replayed:
        raise _Differs(Difference(step, row, field, _short(recorded), _short(replayed)))


def _described(error: Exception) -> str:
    return shortened(f"{type(error).__name__}: {error}", 200)


def _short(value: Any) -> str:
    return shortened(str(value), 200)


def _compare_compositions(recorded: Composition, replayed: Composition) -> None:
    if recorded == replayed:
        return
    number = replayed.number
    for row, (then, now) in enumerate(zip(recorded.rows, replayed.rows, strict=False)):
        for name in then._fields:
            _compare(number, row, name, getattr(then, name), getattr(now, name))
    for name in Composition._fields:
        _compare(number, None, name, getattr(recorded, name), getattr(replayed, name))


def _compare_results(step: Step, entry: Committed, result: StepResult, finished: list[bool]) -> None:
    """Compare what the device gave, but for rows whose sequence ended while they were in flight."""
    digests, failed = dict(entry.digests), set(entry.failed)
    if len(entry.token_ids) != len(result.rows):
        raise ValueError(f"{len(entry.token_ids)} results of {len(result.rows)} rows")
    for i, (row, got) in enumerate(zip(step.rows, result.rows, strict=True)):
        if finished[i]:
            continue
        problem = got.error.message if got.error is not None else "no failure"
        if (got.error is not None) != (i in failed):
            _compare(step.index, i, "failure", "a failure" if i in failed else "no failure", problem)
        if got.error is None:
            _compare(step.index, i, "token_ids", entry.token_ids[i], got.token_ids)
            _compare(step.index, i, _floats_of(row, got), digests.get(i, b"").hex(), _digest(got).hex())


def _floats_of(row: Row, got: RowResult) -> str:
    if got.vector:
        return "digest of the vector"
    return "digest of logprobs" if row.sample else "digest of prompt_logprobs"


def _digest(row: RowResult) -> bytes:
    return digest(row) if has_floats(row) else b""
