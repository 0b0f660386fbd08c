"""Status of an engine: facts about it, its limits, and counters updated by its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.block_store import StoreCounters
from quire.engine.request_limits import RequestLimits
from quire.engine.step_law import StepCosts, StepLaw
from quire.engine.view import View
from quire.step_record import Record
from quire.types import Bound

NUM_RECORDS = 4096  # kept for whoever asks what happened
State = Literal["starting", "ready", "restarting", "stopped"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model as it is served. Weights and cached tokens are counted as stored, not as packed.

    `windows` has the positions that the layers of each cache group see, None for all. `sees`: prompts may
    have images.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    quantization: str | None
    kv_cache_dtype: str
    windows: list[int | None]
    sees: bool = False


class AdapterFacts(NamedTuple):
    """A loaded adapter: what requests have as `adapter`, its name and folder, and what its files say."""

    adapter: str
    name: str
    path: str
    rank: int
    nbytes: int
    modules: tuple[str, ...]


class Facts(NamedTuple):
    """Facts known once a model is loaded. `chosen` are the choices made for it, as text.

    `longest_context` is the maximum number of tokens of a sequence, memory permitting. `fingerprint`
    identifies everything that determines the bits of an answer. `ceilings` are measured rates of the machine,
    and when they were measured (`measured_at`, seconds since 1970). `law` is assumed for them until one is
    calibrated. `costs` are those of all steps. `adapters` are those loaded with the model.
    """

    chosen: dict[str, str]
    limits: RequestLimits
    longest_context: int
    fingerprint: str = ""
    ceilings: dict[str, float] | None = None
    law: StepLaw | None = None
    model: ModelFacts | None = None
    costs: StepCosts | None = None
    adapters: tuple[AdapterFacts, ...] = ()


HASH_PREFIX_BYTES = 8  # of a block's hash, in reports of what is cached


class CacheChanges(NamedTuple):
    """Blocks that became findable and that were evicted: the first HASH_PREFIX_BYTES of each hash, joined.

    With `whole`, `stored` are all blocks that can be found, and nothing told before holds any more.
    """

    stored: bytes
    evicted: bytes
    whole: bool = False


class StepReport(NamedTuple):
    """The record of a step, and the engine's counters after it. No record: no step has ended.

    `law` is the law of the time of steps, if it has changed; `view` is there while somebody watches, `cache`
    while somebody follows what is cached. `stores` are the counters of a block store, if there is one, by
    place. Where there are several replicas, their owner says which one it is.
    """

    record: Record | None
    num_running: int
    num_waiting: int
    num_free_blocks: int
    law: StepLaw | None = None
    view: View | None = None
    cache: CacheChanges | None = None
    replica: int = 0
    stores: Mapping[str, StoreCounters] | None = None


@dataclass(slots=True)
class Totals:
    """Sums over all steps since the start."""

    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0
    bound_s: dict[Bound, float] = field(default_factory=dict)  # Record.wall_s, by bound

    def add(self, record: Record) -> None:
        self.num_tokens += record.num_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_preemptions += record.num_preemptions
        self.seconds += record.seconds
        self.bound_s[record.bound] = self.bound_s.get(record.bound, 0.0) + record.wall_s


@dataclass(slots=True)
class EngineStatus:
    """The current status of an engine, updated in place. Times are of time.monotonic.

    `facts` are empty until the engine is first ready.
    """

    state: State = "starting"
    facts: Facts = field(default_factory=lambda: Facts({}, RequestLimits(0, (), 1, 1), 0))
    pid: int | None = None  # of the engine process, if it has one
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    steps: int = 0  # since the start, restarts included
    last_progress_s: float = 0.0  # when a step ended, or an idle engine received work
    has_work: bool = False
    num_restarts: int = 0
    num_bad_frames: int = 0
    totals: Totals = field(default_factory=Totals)
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=NUM_RECORDS))  # of the last steps
    law: StepLaw | None = None  # of the time of steps, as calibrated last
    stores: Mapping[str, StoreCounters] = field(default_factory=dict)  # of the engine's process, by place

    @property
    def num_blocks(self) -> int:
        return self.facts.limits.num_blocks

    def take_facts(self, facts: Facts) -> None:
        """Note that the engine is ready."""
        self.state, self.facts = "ready", facts
        self.num_free_blocks = facts.limits.num_blocks

    def take_work(self) -> None:
        """Note that a request was sent."""
        if not self.has_work:
            self.has_work, self.last_progress_s = True, time.monotonic()

    def take_report(self, report: StepReport) -> None:
        """Update the counters after a step."""
        self.steps += 1
        self.last_progress_s = time.monotonic()
        self.num_running, self.num_waiting = report.num_running, report.num_waiting
        self.num_free_blocks = report.num_free_blocks
        if report.law is not None:
            self.law = report.law
        if report.stores is not None:
            self.stores = report.stores
        if report.record is not None:
            self.totals.add(report.record)
            self.records.append(report.record)

    def stalled(self, now: float, stall_s: float) -> str | None:
        """Return a description if the engine has work but finished no step for `stall_s`, else None."""
        still_s = now - self.last_progress_s
        if self.has_work and still_s > stall_s:
            return f"no step of the engine has ended for {still_s:.0f} s"
        return None

    def take_death(self) -> None:
        """Note that the engine died: nothing runs."""
        self.pid, self.has_work = None, False
        self.num_running = self.num_waiting = 0
        self.num_free_blocks = self.num_blocks
