"""Prometheus metrics with vLLM's names and meanings, so vLLM dashboards work unchanged.

Metrics of Quire's own begin with quire:. Every label has few values, whatever clients send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from quire.config import EngineConfig
from quire.engine.status import EngineStatus
from quire.server.engine_metrics import INFO, LABELS, EngineMetrics, Families

if TYPE_CHECKING:
    from quire.cluster.decisions import DecisionLog
    from quire.cluster.link_counts import LinkCounts

CONTENT_TYPE = exposition.CONTENT_TYPE_PLAIN_0_0_4
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
REJECTIONS = frozenset({"requests", "tokens", "ttft_goal", "draining"})
MAX_PATHS = 128  # counted by name; others count as "other"


class _RouterCounters(Collector):
    """The sums of a router's decisions, read at each scrape."""

    def __init__(self, model_name: str, log: DecisionLog) -> None:
        self._model_name = model_name
        self._log = log

    def collect(self) -> Iterator[Metric]:
        log, name = self._log, self._model_name
        words = "Requests sent to a replica, by the reason not to follow cached blocks"
        decisions = CounterMetricFamily("quire:router_decisions", words, labels=(*LABELS, "reason"))
        for (replica, reason), count in list(log.num_by_reason.items()):
            decisions.add_metric((name, str(replica), reason or "affinity"), count)
        yield decisions
        for metric, words, value in (
            ("prompt", "Full blocks of prompts that were routed", log.num_prompt_blocks),
            (
                "matched",
                "Blocks of prompts that their replicas were believed to have",
                log.num_matched_blocks,
            ),
        ):
            family = CounterMetricFamily(f"quire:router_{metric}_blocks", words, labels=("model_name",))
            family.add_metric((name,), value)
            yield family


class _LinkCounters(Collector):
    """The counts of links to prefill engines, read at each scrape."""

    def __init__(self, model_name: str, counts: Mapping[str, LinkCounts]) -> None:
        self._model_name = model_name
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "link")
        words = "Prompts sent over a link: computed there, or here after all as it was lost or refused them"
        prompts = CounterMetricFamily("quire:link_prompts", words, labels=(*labels, "outcome"))
        moved = CounterMetricFamily("quire:link_block_bytes", "Bytes of blocks that came", labels=labels)
        words = "Time from sending prompts to their first tokens, and from these to their last block"
        times = CounterMetricFamily("quire:link_seconds", words, labels=(*labels, "part"))
        for link, one in self._counts.items():
            names = (self._model_name, link)
            for outcome in ("computed", "lost", "refused"):
                prompts.add_metric((*names, outcome), getattr(one, f"num_{outcome}"))
            moved.add_metric(names, one.num_block_bytes)
            times.add_metric((*names, "prompt"), one.prompt_s)
            times.add_metric((*names, "blocks"), one.block_s)
        yield from (prompts, moved, times)


class HttpCounts:
    """Counts of HTTP responses by method, path and class of status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._paths: set[str] = set()
        self._counts = Counter(
            "quire:http_requests", "HTTP requests", ("method", "path", "status"), registry=registry
        )

    def __call__(self, method: str, path: str, status: int) -> None:
        """Count an HTTP response. `path` is that of the route, with names in place of the client's values."""
        if path not in self._paths:
            if len(self._paths) < MAX_PATHS:
                self._paths.add(path)
            else:
                path = "other"
        method = method if method in METHODS else "other"
        self._counts.labels(method, path, f"{status // 100}xx").inc()


class Metrics:
    """All metrics: updated from the event loop, rendered from any thread.

    Created when the engine is ready. `statuses` returns the current status of each engine by its number, in
    which the first is 0.
    """

    def __init__(
        self, model_name: str, config: EngineConfig, statuses: Callable[[], Mapping[int, EngineStatus]]
    ) -> None:
        self._model_name = model_name
        self._config = config
        self._statuses = statuses
        self._max_model_len = statuses()[0].facts.limits.max_model_len
        self._engines: dict[int, EngineMetrics] = {}
        self._lock = threading.Lock()
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._families = Families(registry)
        self._rejected = Counter(
            "vllm:admission_rejections",
            "Requests rejected before they were queued",
            (*LABELS, "reason"),
            registry=registry,
        )
        for reason in REJECTIONS:
            self._rejected.labels(model_name, "0", reason)
        self.http = HttpCounts(registry)
        for number in statuses():
            self.of(number)

    def of(self, engine: int) -> EngineMetrics:
        """Return the metrics of an engine and of its requests."""
        if (found := self._engines.get(engine)) is None:
            found = self._engines[engine] = EngineMetrics(
                self._families, self._model_name, engine, self._config, self._max_model_len
            )
        return found

    def watch_router(self, log: DecisionLog) -> None:
        """Add the counters of a router."""
        self._registry.register(_RouterCounters(self._model_name, log))

    def watch_links(self, counts: Mapping[str, LinkCounts]) -> None:
        """Add the counters of links, by their addresses."""
        self._registry.register(_LinkCounters(self._model_name, counts))

    def rejected(self, reason: str) -> None:
        """Count a request that was not admitted, by one of REJECTIONS."""
        reason = reason if reason in REJECTIONS else "other"
        self._rejected.labels(self._model_name, "0", reason).inc()

    def collect(self) -> list[Metric]:
        """Return all metrics as they are now."""
        with self._lock:
            self._families.get(Gauge, *INFO).clear()
            statuses = self._statuses()
            for number, status in statuses.items():
                self.of(number).take_status(status)
            for number, engine in list(self._engines.items()):
                if number not in statuses:
                    engine.take_end()
            return list(self._registry.collect())

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format. Takes milliseconds: call it in a thread."""
        return exposition.generate_latest(self)
