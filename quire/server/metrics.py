"""Prometheus metrics with vLLM's names and meanings, so vLLM dashboards work unchanged.

Metrics of Quire's own begin with quire:. Every label has few values, whatever clients send.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, exposition

from quire.config import EngineConfig
from quire.engine.status import EngineStatus, StepReport
from quire.outputs import CompletionOutput, RequestOutput
from quire.types import Bound, FinishReason, NewRequest, Record, RequestMetrics

CONTENT_TYPE = exposition.CONTENT_TYPE_PLAIN_0_0_4
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
REJECTIONS = frozenset({"requests", "tokens", "ttft_goal", "draining"})
MAX_PATHS = 128  # counted by name; others count as "other"

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
_INFO = ("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks", "engine")
_ENGINE = "0"  # the only one


class Metrics:
    """All metrics: updated from the event loop, rendered from any thread.

    Created when the engine is ready: its maximum model length determines the buckets for lengths. `status`
    returns the engine's current status.
    """

    def __init__(self, model_name: str, config: EngineConfig, status: Callable[[], EngineStatus]) -> None:
        self._names = {"model_name": model_name, "engine": _ENGINE}
        self._config = config
        self._status = status
        self._registry = CollectorRegistry()
        self._paths: set[str] = set()
        self._num_restarts = 0
        self._lock = threading.Lock()
        ProcessCollector(registry=self._registry)
        self._define_engine()
        self._define_requests()
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
        bound_s = Counter(
            "quire:step_bound_seconds",
            "Time of steps, and between them, by what bound them",
            (*self._names, "bound"),
            registry=self._registry,
        )
        self._bound_s: dict[Bound, Counter] = {
            bound: bound_s.labels(**self._names, bound=bound or "unknown") for bound in get_args(Bound)
        }
        self._restarts = self._counter("quire:engine_restarts", "Restarts of the engine's process")
        self._info = Gauge(
            "vllm:cache_config_info", "Configuration of the KV cache", _INFO, registry=self._registry
        )

    def _define_requests(self) -> None:
        lengths = _one_two_five(self._status().facts.limits.max_model_len)
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
        registry, own = self._registry, tuple(self._names)
        self._ended = Counter(
            "vllm:request_success", "Finished choices", (*own, "finished_reason"), registry=registry
        )
        self._rejected = Counter(
            "vllm:admission_rejections",
            "Requests rejected before they were queued",
            (*own, "reason"),
            registry=registry,
        )
        for reason in get_args(FinishReason):  # present with value 0 from the start
            self._ended.labels(**self._names, finished_reason=reason)
        for reason in REJECTIONS:
            self._rejected.labels(**self._names, reason=reason)
        self._http = Counter(
            "quire:http_requests", "HTTP requests", ("method", "path", "status"), registry=registry
        )

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
        interference = Histogram(
            "quire:request_interference_seconds",
            "Time that prompts and decoding of other requests added to a choice",
            (*self._names, "kind"),
            buckets=_PART_S,
            registry=self._registry,
        )
        self._interference = {
            kind: interference.labels(**self._names, kind=kind) for kind in ("prefill", "decode")
        }
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
        labels = self._names | more
        return Gauge(name, help, labels, registry=self._registry).labels(**labels)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, self._names, registry=self._registry).labels(**self._names)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, help, self._names, buckets=buckets, registry=self._registry)
        return made.labels(**self._names)

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

    def rejected(self, reason: str) -> None:
        """Count a request that was not admitted, by one of REJECTIONS."""
        reason = reason if reason in REJECTIONS else "other"
        self._rejected.labels(**self._names, reason=reason).inc()

    def http(self, method: str, path: str, status: int) -> None:
        """Count an HTTP response. `path` is that of the route, with names in place of the client's values."""
        if path not in self._paths:
            if len(self._paths) < MAX_PATHS:
                self._paths.add(path)
            else:
                path = "other"
        method = method if method in METHODS else "other"
        self._http.labels(method, path, f"{status // 100}xx").inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format. Takes milliseconds: call it in a thread."""
        with self._lock:
            self._take_status()
            return exposition.generate_latest(self._registry)

    def _take_status(self) -> None:
        status, config = self._status(), self._config
        self._running.set(status.num_running)
        self._waiting.set(status.num_waiting)
        self._waiting_for.set(status.num_waiting)
        self._cache_usage.set(1 - status.num_free_blocks / status.num_blocks if status.num_blocks else 0)
        self._restarts.inc(status.num_restarts - self._num_restarts)
        self._num_restarts = status.num_restarts
        self._info.clear()
        caching = str(config.enable_prefix_caching)
        values = (str(config.block_size), config.kv_cache_dtype, caching, str(status.num_blocks), _ENGINE)
        self._info.labels(*values).set(1)


def _one_two_five(limit: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to the limit, vLLM's buckets for lengths."""
    steps = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return [step for step in steps if step <= limit] or [1]
