"""The metrics of one engine, with its number as the label `engine`, as vLLM has them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.block_store import StoreCounters
from quire.config import EngineConfig
from quire.outputs import CompletionOutput, RequestOutput
from quire.step_record import Record
from quire.types import Bound, FinishReason, NewRequest, RequestMetrics

if TYPE_CHECKING:
    from quire.engine.status import EngineStatus, StepReport

# Upper bounds of buckets, as in vLLM: seconds or tokens
_SECONDS = (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_WAIT_S = (*_SECONDS, 160.0, 640.0, 2560.0)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, *_WAIT_S)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, *_SECONDS)
_MINUTES = (10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, *_MINUTES)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PART_S = (0.0, *_STEP_S, 30.0, 60.0, 120.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_COUNTS = (1, 2, 5, 10, 20)
LABELS = ("model_name", "engine")
INFO = (  # the metric of the cache's configuration: name, help, labels
    "vllm:cache_config_info",
    "Configuration of the KV cache",
    ("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks", *LABELS),
)
STORE_EVENTS = ("stored", "fetched", "evicted", "damaged", "declined")
M = TypeVar("M", Counter, Gauge, Histogram)


class Families:
    """The metrics of a registry by name, each defined once for all engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._known: dict[str, Counter | Gauge | Histogram] = {}

    def get(self, kind: type[M], name: str, help: str, labels: Sequence[str] = LABELS, **more: Any) -> M:
        """Return the metric by this name, defined when it is first asked for."""
        if (found := self._known.get(name)) is None:
            found = self._known[name] = kind(name, help, labels, registry=self.registry, **more)
        return cast(M, found)


class EngineMetrics:
    """The metrics of one engine and of its requests. Its maximum model length determines some buckets."""

    def __init__(
        self, families: Families, model_name: str, engine: int, config: EngineConfig, max_model_len: int
    ) -> None:
        self._names = {"model_name": model_name, "engine": str(engine)}
        self._config = config
        self._families = families
        self._num_restarts = 0
        self._stores: dict[str, StoreCounters] = {}  # as counted last
        self._define_engine()
        self._define_requests(_one_two_five(max_model_len))
        self._define_times()

    def _define_engine(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Requests being computed")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests waiting for a slot")
        self._waiting_for = self._gauge(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason", reason="capacity"
        )
        self._cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Fraction of the KV cache in use")
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions of running requests")
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens per step", _STEP_TOKENS)
        self._steps = self._counter("quire:engine_step", "Steps of the engine")
        self._step_s = self._histogram("quire:step_seconds", "Duration of a step", _STEP_S)
        self._predicted_s = self._counter(
            "quire:step_predicted_seconds", "Predicted time of steps on the device"
        )
        self._device_s = self._counter(
            "quire:step_device_seconds", "Time of the predicted steps on the device"
        )
        self._roof_share = self._histogram(
            "quire:step_roof_share",
            "Time of a step at the ceilings over its own; above 1 they are stale",
            _SHARES,
        )
        bound_s = self._families.get(
            Counter,
            "quire:step_bound_seconds",
            "Time of steps, and between them, by what bound them",
            (*LABELS, "bound"),
        )
        self._bound_s: dict[Bound, Counter] = {
            bound: bound_s.labels(**self._names, bound=bound or "unknown") for bound in get_args(Bound)
        }
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts that steps verified")
        self._drafted = self._counter(
            "vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified"
        )
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted")
        self._draft_s = self._counter("quire:draft_seconds", "Time of the draft model")
        self._image_s = self._counter("quire:image_seconds", "Time of encoding images")
        self._drafting_saved = self._gauge(
            "quire:drafting_saved_seconds",
            "Predicted time of the same tokens without drafts, less that of their steps, since the start",
        )
        self._loaded_tokens = self._counter(
            "quire:loaded_tokens", "Tokens of blocks that came into the cache from a store"
        )
        self._loaded_bytes = self._counter("quire:loaded_bytes", "Bytes of these blocks")
        self._load_s = self._counter("quire:load_seconds", "Time of copying them into the cache")
        self._restarts = self._counter("quire:engine_restarts", "Restarts of the engine's process")
        self._info = self._families.get(Gauge, *INFO)

    def _define_requests(self, lengths: Sequence[int]) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self._cache_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache")
        self._prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Tokens per prompt", lengths)
        self._lengths = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated per choice", lengths
        )
        self._longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a request", lengths
        )
        self._computed_lengths = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed per request", lengths
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request", lengths
        )
        self._n = self._histogram("vllm:request_params_n", "n of a request", _COUNTS)
        self._preempted = self._histogram(
            "vllm:request_num_preemptions", "Preemptions per choice", (0, *_COUNTS)
        )
        self._ended = self._families.get(
            Counter, "vllm:request_success", "Finished choices", (*LABELS, "finished_reason")
        )
        for reason in get_args(FinishReason):  # present with value 0 from the start
            self._ended.labels(**self._names, finished_reason=reason)

    def _define_times(self) -> None:
        """Define histograms of times in seconds."""
        self._ttft = self._time("time_to_first_token", "Time from arrival to the first token", _FIRST_TOKEN_S)
        self._itl = self._time("inter_token_latency", "Time between two deliveries of tokens", _PER_TOKEN_S)
        self._tpot = self._time(
            "request_time_per_output_token", "Mean time per output token of a choice", _PER_TOKEN_S
        )
        self._e2e = self._time("e2e_request_latency", "Time from arrival to the end")
        self._queue = self._time("request_queue_time", "Time waiting for a slot")
        self._prefill = self._time("request_prefill_time", "Time from slot to first token")
        self._decode = self._time("request_decode_time", "Time from the first token to the end")
        self._inference = self._time("request_inference_time", "Time from slot to end")
        interference = self._families.get(
            Histogram,
            "quire:request_interference_seconds",
            "Time that prompts and decoding of other requests added to a choice",
            (*LABELS, "kind"),
            buckets=_PART_S,
        )
        self._interference = {
            kind: interference.labels(**self._names, kind=kind) for kind in ("prefill", "decode")
        }
        self._continuations = self._counter("quire:continuations", "Choices that another engine went on with")
        self._preempted_s = self._histogram(
            "quire:request_preempted_seconds", "Time from preemptions to the next token", _PART_S
        )
        self._ideal = self._histogram(
            "quire:request_ideal_seconds", "Time of the steps of a choice, alone, at the roof", _PART_S
        )
        self._saved = self._counter(
            "quire:prefix_cache_saved_seconds", "Time that computing cached tokens would have taken"
        )

    def _gauge(self, name: str, help: str, **more: str) -> Gauge:
        return self._families.get(Gauge, name, help, (*LABELS, *more)).labels(**self._names, **more)

    def _counter(self, name: str, help: str) -> Counter:
        return self._families.get(Counter, name, help).labels(**self._names)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return self._families.get(Histogram, name, help, buckets=buckets).labels(**self._names)

    def _time(self, name: str, help: str, buckets: Sequence[float] = _REQUEST_S) -> Histogram:
        return self._histogram(f"vllm:{name}_seconds", help, buckets)

    # Events

    def step(self, report: StepReport) -> None:
        """Count a step of the engine."""
        if (record := report.record) is not None:
            self._steps.inc()
            self._step_s.observe(record.seconds)
            self._step_tokens.observe(record.num_tokens)
            self._preemptions.inc(record.num_preemptions)
            self._drafts.inc(record.num_drafts)
            self._drafted.inc(record.num_drafted)
            self._accepted.inc(record.num_accepted)
            self._draft_s.inc(record.draft_s)
            self._image_s.inc(record.image_s)
            self._drafting_saved.inc(record.drafting_saved_s)
            self._loaded_tokens.inc(record.num_loaded_tokens)
            self._loaded_bytes.inc(record.loaded_bytes)
            self._load_s.inc(record.load_s)
            self._judged(record)

    def _judged(self, record: Record) -> None:
        self._bound_s[record.bound].inc(record.wall_s)
        if record.predicted_s:
            self._predicted_s.inc(record.predicted_s)
            self._device_s.inc(record.device_s)
            self._roof_share.observe(record.roof_share)

    def first_tokens(self, request: NewRequest, num_tokens: int, num_cached_tokens: int) -> None:
        """Count the delivery of a request's first output."""
        num_prompt = len(request.prompt_token_ids)
        self._ttft.observe(time.monotonic() - request.arrival_s)
        self._prompt_tokens.inc(num_prompt)
        self._cached.inc(num_cached_tokens)
        self._generation_tokens.inc(num_tokens)
        if self._config.enable_prefix_caching:
            self._cache_queries.inc(num_prompt)
            self._cache_hits.inc(num_cached_tokens)

    def next_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Count the delivery of more tokens of a request, `gap_s` after the previous ones."""
        self._itl.observe(gap_s)
        self._generation_tokens.inc(num_tokens)

    def request_finished(self, request: NewRequest, output: RequestOutput, failed: bool = False) -> None:
        """Count a request whose choices have all ended. Those unfinished failed or lost their client."""
        num_prompt, lengths = len(request.prompt_token_ids), [len(one.token_ids) for one in output.outputs]
        self._prompt_lengths.observe(num_prompt)
        self._computed_lengths.observe(num_prompt - output.num_cached_tokens)
        self._longest.observe(max(lengths))
        self._n.observe(request.params.n)
        if request.params.max_tokens is not None:
            self._max_tokens.observe(request.params.max_tokens)
        for choice in output.outputs:
            reason = choice.finish_reason
            if reason is None or reason == "abort":
                reason = "error" if failed else "abort"
            self._ended.labels(**self._names, finished_reason=reason).inc()
            self._lengths.observe(len(choice.token_ids))
            if choice.metrics is not None:
                self._saved.inc(choice.metrics.cached_saved_s)
            if choice.metrics is not None and choice.metrics.finished_s is not None:
                self._preempted.observe(choice.metrics.num_preemptions)
                self._continuations.inc(choice.metrics.num_continuations)
                if reason in ("stop", "length"):
                    self._observe_times(choice, choice.metrics)

    def _observe_times(self, choice: CompletionOutput, times: RequestMetrics) -> None:
        admitted, first, end = times.admitted_s, times.first_token_s, times.finished_s
        if admitted is None or first is None or end is None:
            return
        self._e2e.observe(time.monotonic() - times.arrival_s)
        self._queue.observe(admitted - times.arrival_s)
        self._prefill.observe(first - admitted)
        self._decode.observe(end - first)
        self._inference.observe(end - admitted)
        self._interference["prefill"].observe(times.prefill_interference_s)
        self._interference["decode"].observe(times.decode_interference_s)
        self._preempted_s.observe(times.preempted_s)
        self._ideal.observe(times.ideal_s)
        if len(choice.token_ids) > 1:
            self._tpot.observe((end - first) / (len(choice.token_ids) - 1))

    def take_status(self, status: EngineStatus) -> None:
        """Set what the status of the engine says."""
        config = self._config
        self._running.set(status.num_running)
        self._waiting.set(status.num_waiting)
        self._waiting_for.set(status.num_waiting)
        self._cache_usage.set(1 - status.num_free_blocks / status.num_blocks if status.num_blocks else 0)
        self._restarts.inc(max(0, status.num_restarts - self._num_restarts))
        self._num_restarts = status.num_restarts
        caching = str(config.enable_prefix_caching)
        values = (str(config.block_size), config.kv_cache_dtype, caching, str(status.num_blocks))
        self._info.labels(*values, *self._names.values()).set(1)
        for place, counters in status.stores.items():
            self._take_store(place, counters)

    def take_end(self) -> None:
        """Note that the engine runs no longer: another one with its number counts from 0."""
        for gauge in (self._running, self._waiting, self._waiting_for, self._cache_usage):
            gauge.set(0)
        self._num_restarts = 0
        for place in self._stores:
            self._take_store(place, StoreCounters())

    def _take_store(self, place: str, counters: StoreCounters) -> None:
        """Set what a block store has, and count its events. A restarted engine counts from 0 again."""
        self._gauge("quire:block_store_blocks", "Blocks outside the KV cache", place=place).set(
            counters.num_blocks
        )
        self._gauge("quire:block_store_bytes", "Bytes of these blocks", place=place).set(counters.num_bytes)
        last, self._stores[place] = self._stores.get(place, StoreCounters()), counters
        family = self._families.get(
            Counter, "quire:block_store_events", "Blocks stored, fetched, ...", (*LABELS, "place", "event")
        )
        for event in STORE_EVENTS:
            now, before = (getattr(one, f"num_{event}") for one in (counters, last))
            more = now - before if now >= before else now
            family.labels(**self._names, place=place, event=event).inc(more)


def _one_two_five(limit: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to the limit, vLLM's buckets for lengths."""
    steps = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return [step for step in steps if step <= limit] or [1]
