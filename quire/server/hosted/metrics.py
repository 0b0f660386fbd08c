"""Prometheus metrics of several models: those of each loaded one, under its name, and of their loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from quire.server.metrics import HttpCounts

if TYPE_CHECKING:
    from quire.server.hosted.host import Host

STATES = ("unloaded", "loading", "loaded", "unloading")


class _Models(Collector):
    """States and loads of the models, read at each scrape."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        label = ("model_name",)
        states = GaugeMetricFamily(
            "quire:model_state", "1 for the state of a model", labels=(*label, "state")
        )
        memory = GaugeMetricFamily("quire:model_memory_bytes", "Planned memory, while loaded", labels=label)
        loads = CounterMetricFamily("quire:model_loads", "How often a model was loaded", labels=label)
        failures = CounterMetricFamily("quire:model_load_failures", "Loads that failed", labels=label)
        waiting = GaugeMetricFamily("quire:model_waiting", "Requests that wait for a model", labels=label)
        for one in list(self._host.models.values()):
            for state in STATES:
                states.add_metric((one.name, state), float(one.state == state))
            held = one.budget.need.total_bytes if one.state != "unloaded" else 0
            memory.add_metric((one.name,), held)
            loads.add_metric((one.name,), one.num_loads)
            failures.add_metric((one.name,), one.num_failures)
            waiting.add_metric((one.name,), len(one.waiters))
        limit = GaugeMetricFamily("quire:models_max_memory_bytes", "What loaded models may use together")
        limit.add_metric((), self._host.limit_bytes)
        yield from (states, memory, loads, failures, waiting, limit)


class HostMetrics:
    """All metrics of a server with several models. A model's counters begin anew when it is loaded again."""

    def __init__(self, host: Host) -> None:
        self._host = host
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Models(host))
        self.http = HttpCounts(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this server and of its models, those of one name as one."""
        found = {metric.name: metric for metric in self._registry.collect()}
        own = set(found)
        for model in list(self._host.models.values()):
            if (service := model.service) is None:
                continue
            for metric in service.metrics.collect():
                if metric.name in own:
                    continue
                if metric.name in found:
                    found[metric.name].samples.extend(metric.samples)
                else:
                    found[metric.name] = metric
        yield from found.values()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format. Takes milliseconds: call it in a thread."""
        return exposition.generate_latest(self)
