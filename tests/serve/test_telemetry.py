"""Spans of requests, as a collector receives them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from server import running

from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams
from quire.server import lifecycle
from quire.server.telemetry import Spans
from quire.types import NewRequest

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WORDS = {"model": "demo", "prompt": "Once upon a time, a fox found a lantern", "max_tokens": 8}


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """The URL of a collector, and the bodies that it received."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        finally:
            server.shutdown()
            thread.join()


def spans_in(bodies: list[bytes]) -> list[Span]:
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    scopes = [scope for one in requests for resource in one.resource_spans for scope in resource.scope_spans]
    return [span for scope in scopes for span in scope.spans]


def test_a_request_is_a_span_of_its_clients_trace() -> None:
    with collector() as (url, received):
        with running("--otlp-traces-endpoint", url) as server, server.client() as client:
            parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            answer = client.post("/v1/completions", json=WORDS, headers=parent).json()
            refused = client.post("/v1/completions", json=WORDS | {"max_tokens": -2})
            assert refused.status_code == 400
        text = answer["choices"][0]["text"].encode()
        assert not any(b"lantern" in body or text in body for body in received)
        spans = {span.name: span for span in spans_in(received)}
    root = spans.pop("text_completion demo")  # the refused request had no prompt in the engine
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    values = {one.key: one.value for one in root.attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == answer["usage"]["completion_tokens"] == 8
    assert values["gen_ai.usage.input_tokens"].int_value == answer["usage"]["prompt_tokens"]
    assert values["http.route"].string_value == "/v1/completions"
    assert values["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert spans.keys() == {"queue", "prefill", "decode"}
    ends = [(one.start_time_unix_nano, one.end_time_unix_nano) for one in spans.values()]
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    assert min(ends)[0] == root.start_time_unix_nano
    assert max(end for _, end in ends) == root.end_time_unix_nano
    taken_s = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9
    assert taken_s == pytest.approx(values["gen_ai.latency.e2e"].double_value, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "pooling", "operation"),
    [
        ("/v1/embeddings", "embed", "embeddings"),
        ("/rerank", "score", "score"),
        ("/v1/completions", "", "text_completion"),
        ("/v1/messages", "", "chat"),
    ],
)
def test_a_span_says_what_was_done(path: str, pooling: str, operation: str) -> None:
    request = NewRequest("0", (1, 2), SamplingParams(), pooling=pooling)
    prompt = SimpleNamespace(request=request, output=SimpleNamespace(outputs=[]))
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "queue_ms", "ttft_ms", "total_ms")
    timings = dict.fromkeys(names, 1.0)
    handle: Any = SimpleNamespace(
        prompts=[prompt], timings=lambda: timings, arrival_s=time.monotonic(), failure=None
    )
    with collector() as (url, received):
        spans = Spans(url, "demo")
        spans.record({"type": "http", "path": path, "headers": [], "endpoint": print}, handle)
        spans.close()
    (root,) = [span for span in spans_in(received) if not span.parent_span_id]
    values = {one.key: one.value for one in root.attributes}
    assert root.name == f"{operation} demo"
    assert values["gen_ai.operation.name"].string_value == operation
    assert ("gen_ai.request.temperature" in values) == (not pooling)


def test_a_collector_that_does_not_answer_stops_no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last spans of a model are sent when it is unloaded, while others answer requests."""
    others, waited = threading.Event(), list[bool]()
    service = SimpleNamespace(close=lambda: waited.append(others.wait(10)))

    class FakeEngine:
        async def start(self) -> None:
            pass

        async def close(self) -> None:
            pass

    async def load_and_unload() -> None:
        async with lifecycle.loaded(ServerConfig(), EngineConfig(), keyed=False):
            asyncio.get_running_loop().call_later(0.01, others.set)

    monkeypatch.setattr(lifecycle, "RemoteEngine", lambda *args, **options: FakeEngine())
    monkeypatch.setattr(lifecycle, "make_service", lambda *args: service)
    asyncio.run(load_and_unload())
    assert waited == [True]


def test_a_wrong_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="no URL"):
        Spans("localhost:4318", "demo")
