"""OpenTelemetry: a span for each request that reached the engine, exported by OTLP over HTTP.

Names follow the semantic conventions for generative AI. A `traceparent` header of the client makes the span
part of the client's trace. Prompts and answers are never exported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import Scope

from quire import __version__
from quire.errors import ConfigError
from quire.server.errors import report
from quire.server.logs import route_path

if TYPE_CHECKING:
    from quire.server.request import ServerRequest

Attribute = str | int | float | list[str]
_TEXT_ROUTES = frozenset({"/v1/completions", "/completion", "/completions", "/infill", "/api/generate"})
_POOLED = {"embed": "embeddings", "score": "score"}
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")


class Spans:
    """Spans of requests on their way to a collector. They are sent in batches, by a thread.

    Raises ConfigError if the packages of `quire[otel]` are missing, or the endpoint is no URL.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            hint = "give a URL such as http://127.0.0.1:4318/v1/traces"
            raise ConfigError(f"otlp_traces_endpoint = {endpoint!r} is no URL", hint)
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            hint = "pip install 'quire[otel]'"
            raise ConfigError("otlp_traces_endpoint needs OpenTelemetry's packages", hint) from None
        resource = Resource.create({"service.name": "quire", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("quire.server", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._model = model

    def record(self, scope: Scope, handle: ServerRequest) -> None:
        """Export the span of a request that has ended, with a child for each of its phases."""
        trace, timings = self._trace, handle.timings()
        began_ns = time.time_ns() - round((time.monotonic() - handle.arrival_s) * 1e9)

        def at_ns(name: str) -> int:
            return began_ns + round(timings[name] * 1e6)

        carrier = {
            name.decode(): v.decode("latin-1") for name, v in scope["headers"] if name in _CONTEXT_HEADERS
        }
        path = route_path(scope)
        pooling = handle.prompts[0].request.pooling
        operation = _POOLED.get(pooling, "text_completion" if path in _TEXT_ROUTES else "chat")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            self._propagator.extract(carrier),
            trace.SpanKind.SERVER,
            self._attributes(operation, path, handle, timings),
            start_time=began_ns,
        )
        if handle.failure is not None:
            failure = report(handle.failure)
            span.set_attribute("error.type", failure.type)
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        below = trace.set_span_in_context(span)
        bounds = (began_ns, at_ns("queue_ms"), at_ns("ttft_ms"), at_ns("total_ms"))
        for name, begin_ns, end_ns in zip(("queue", "prefill", "decode"), bounds, bounds[1:], strict=False):
            if end_ns > begin_ns:
                self._tracer.start_span(name, below, start_time=begin_ns).end(end_ns)
        span.end(bounds[-1])

    def _attributes(
        self, operation: str, path: str, handle: ServerRequest, timings: Mapping[str, float]
    ) -> dict[str, Attribute]:
        request = handle.prompts[0].request
        sequences = [one for prompt in handle.prompts for one in prompt.output.outputs]
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": int(timings["prompt_tokens"]),
            "gen_ai.usage.output_tokens": int(timings["completion_tokens"]),
            "gen_ai.usage.cache_read.input_tokens": int(timings["cached_tokens"]),
            "gen_ai.response.finish_reasons": [one.finish_reason or "error" for one in sequences],
            "gen_ai.latency.time_in_queue": timings["queue_ms"] / 1e3,
            "gen_ai.latency.time_to_first_token": timings["ttft_ms"] / 1e3,
            "gen_ai.latency.e2e": timings["total_ms"] / 1e3,
            "http.route": path,
        }
        if not request.pooling:
            attributes["gen_ai.request.temperature"] = request.params.temperature
            attributes["gen_ai.request.top_p"] = request.params.top_p
            if request.params.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = request.params.max_tokens
        return attributes | {
            f"quire.{name}": value
            for name, value in timings.items()
            if name.endswith("ms") or name == "replica"
        }

    def close(self) -> None:
        """Send what is left, and stop the thread."""
        self._provider.shutdown()
