"""Metrics: vLLM's names and meanings, right numbers, and labels of few values whatever clients send."""

from __future__ import annotations

import itertools
import random
import string
import time
from dataclasses import replace

import pytest
from guarded import make_metrics, serve
from prometheus_client.parser import text_string_to_metric_families

from quire.block_store import StoreCounters
from quire.config import EngineConfig
from quire.engine.caches import BlockGroup
from quire.engine.request_limits import RequestLimits
from quire.engine.status import EngineStatus, Facts, StepReport
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.metrics import MAX_PATHS, Metrics
from quire.step_record import Record
from quire.types import NewRequest, RequestMetrics

# As dashboards, load generators and routers ask for them.
EXPECTED = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
prompt_tokens_total generation_tokens_total num_preemptions_total request_success_total
prefix_cache_queries_total prefix_cache_hits_total admission_rejections_total cache_config_info
time_to_first_token_seconds_bucket inter_token_latency_seconds_sum
request_time_per_output_token_seconds_count e2e_request_latency_seconds_bucket
request_queue_time_seconds_bucket request_prefill_time_seconds_sum request_decode_time_seconds_sum
request_inference_time_seconds_sum request_prompt_tokens_bucket request_generation_tokens_bucket
request_params_n_bucket request_params_max_tokens_sum request_num_preemptions_count
iteration_tokens_total_bucket iteration_tokens_total_sum prompt_tokens_cached_total
request_max_num_generation_tokens_bucket request_prefill_kv_computed_tokens_sum
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
"""
OWN = ["engine_step_total", "step_seconds_bucket", "engine_restarts_total", "http_requests_total"]
OWN += ["request_interference_seconds_bucket", "request_preempted_seconds_sum", "request_ideal_seconds_count"]
OWN += ["prefix_cache_saved_seconds_total", "drafting_saved_seconds", "draft_seconds_total"]


class Values:
    """What a scrape reads: samples by name and labels."""

    def __init__(self, metrics: Metrics) -> None:
        families = text_string_to_metric_families(metrics.render().decode())
        self.samples = [sample for family in families for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]


def happen(metrics: Metrics) -> None:
    """A request of two choices: one ends, one is aborted; steps; a rejection."""
    now = time.monotonic()
    request = NewRequest("1", tuple(range(30)), SamplingParams(n=2, max_tokens=100), arrival_s=now - 10)
    metrics.of(0).first_tokens(request, 2, 16)
    metrics.of(0).next_tokens(3, 0.03)
    receipt = {"preempted_s": 0.5, "prefill_interference_s": 0.25, "decode_interference_s": 2.0}
    saved = {"cached_saved_s": 0.125, "ideal_s": 1.5}
    times = RequestMetrics(now - 10, now - 8, now - 7, now - 3, num_preemptions=2, **receipt, **saved)
    ended = CompletionOutput(0, token_ids=[1] * 5, finish_reason="length", metrics=times)
    output = RequestOutput(
        "1", None, list(range(30)), [ended, CompletionOutput(1, token_ids=[1], metrics=times)]
    )
    output.num_cached_tokens = 16
    metrics.of(0).request_finished(request, output)
    metrics.of(0).step(StepReport(Record(0, 2, 34, 1, 70, 16, 3, 0.02), 2, 1, 70))
    metrics.of(0).step(StepReport(None, 0, 0, 100))
    metrics.rejected("requests")


@pytest.fixture
def metrics() -> Metrics:
    made = make_metrics("org/model", block_size=32)
    happen(made)
    made.http("GET", "/health", 200)
    return made


def test_vllms_names_are_there(metrics: Metrics) -> None:
    samples = {sample.name: sample.labels for sample in Values(metrics).samples}
    for name in EXPECTED.split():
        labels = samples[f"vllm:{name}"]
        assert labels["engine"] == "0"
        assert labels["model_name"] == "org/model"  # which tells apart several models of a server
    assert all(f"quire:{name}" in samples for name in OWN)
    assert samples["process_resident_memory_bytes"] == {}


def test_numbers_of_requests(metrics: Metrics) -> None:
    value = Values(metrics)
    assert value("vllm:prompt_tokens_total") == 30
    assert value("vllm:generation_tokens_total") == 5
    assert value("vllm:prefix_cache_queries_total") == 30
    assert value("vllm:prefix_cache_hits_total") == 16
    assert value("vllm:request_success_total", finished_reason="length") == 1
    assert value("vllm:request_success_total", finished_reason="abort") == 1
    assert value("vllm:request_generation_tokens_sum") == 6
    assert value("vllm:request_max_num_generation_tokens_sum") == 5
    assert value("vllm:request_max_num_generation_tokens_count") == 1
    assert value("vllm:request_prefill_kv_computed_tokens_sum") == 14
    assert value("vllm:prompt_tokens_cached_total") == 16
    assert value("vllm:request_prompt_tokens_bucket", le="50.0") == 1
    assert value("vllm:request_prompt_tokens_bucket", le="20.0") == 0
    assert value("vllm:request_params_n_sum") == 2
    assert value("vllm:request_params_max_tokens_sum") == 100
    assert value("vllm:request_num_preemptions_sum") == 4
    assert value("quire:request_interference_seconds_sum", kind="prefill") == 0.25
    assert value("quire:request_interference_seconds_sum", kind="decode") == 2.0
    assert value("quire:request_interference_seconds_bucket", kind="decode", le="1.0") == 0
    assert value("quire:request_preempted_seconds_sum") == 0.5
    assert value("quire:request_ideal_seconds_sum") == 1.5
    assert value("quire:prefix_cache_saved_seconds_total") == 2 * 0.125
    assert value("vllm:admission_rejections_total", reason="requests") == 1


def test_who_was_told_an_error_did_not_leave() -> None:
    metrics = make_metrics("demo")
    ended, stopped = (CompletionOutput(i, finish_reason=r) for i, r in enumerate(("stop", "abort")))
    output = RequestOutput("1", None, [1], [ended, stopped, CompletionOutput(2)])
    metrics.of(0).request_finished(NewRequest("1", (1,), SamplingParams(n=3)), output, failed=True)
    value = Values(metrics)
    for reason, count in {"stop": 1, "error": 2, "abort": 0}.items():
        assert value("vllm:request_success_total", finished_reason=reason) == count


def test_drafts_of_steps() -> None:
    """What drafts saved may be less than nothing, so it is no counter."""
    metrics = make_metrics("demo")
    drafted = {"num_drafts": 2, "num_drafted": 9, "num_accepted": 5, "draft_s": 0.25}
    for saved_s in (0.5, -0.75):
        record = Record(0, 3, 12, 0, 70, 0, 0, 0.02, drafting_saved_s=saved_s, **drafted)  # type: ignore[arg-type]
        metrics.of(0).step(StepReport(record, 2, 1, 70))
    value = Values(metrics)
    assert value("vllm:spec_decode_num_drafts_total") == 4
    assert value("vllm:spec_decode_num_draft_tokens_total") == 18
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 10
    assert value("quire:draft_seconds_total") == 0.5
    assert value("quire:drafting_saved_seconds") == -0.25


def test_times_of_requests(metrics: Metrics) -> None:
    value = Values(metrics)
    expected = {"queue_time": 2, "prefill_time": 1, "decode_time": 4, "inference_time": 5}
    for name, seconds in expected.items():
        assert value(f"vllm:request_{name}_seconds_sum") == pytest.approx(seconds)
    assert value("vllm:e2e_request_latency_seconds_sum") == pytest.approx(10, abs=0.5)
    assert value("vllm:e2e_request_latency_seconds_count") == 1  # not of the aborted choice
    assert value("vllm:time_to_first_token_seconds_sum") == pytest.approx(10, abs=0.5)
    assert value("vllm:inter_token_latency_seconds_sum") == pytest.approx(0.03)
    assert value("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(1)


def test_numbers_of_steps(metrics: Metrics) -> None:
    value = Values(metrics)
    assert value("quire:engine_step_total") == 1
    assert value("quire:step_seconds_sum") == pytest.approx(0.02)
    assert value("vllm:iteration_tokens_total_sum") == 34
    assert value("vllm:num_preemptions_total") == 3


def test_the_state_of_the_engine_is_that_of_now() -> None:
    facts = Facts({}, RequestLimits(64, (BlockGroup(100),), 16, 64), 64)
    status = EngineStatus(facts=facts, num_running=3, num_waiting=2, num_free_blocks=25)
    metrics = Metrics("demo", EngineConfig(), lambda: {0: status})
    value = Values(metrics)
    assert value("vllm:num_requests_running") == 3
    assert value("vllm:num_requests_waiting") == 2
    assert value("vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert value("vllm:kv_cache_usage_perc") == pytest.approx(0.75)
    assert value("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    status.take_death()
    status.num_restarts, status.facts = 1, Facts({}, RequestLimits(64, (BlockGroup(50),), 16, 64), 64)
    for _ in range(2):
        value = Values(metrics)
        assert value("vllm:num_requests_running") == 0
        assert value("quire:engine_restarts_total") == 1
        assert value("vllm:cache_config_info") == 1
    assert value("vllm:cache_config_info", num_gpu_blocks="50") == 1


def test_each_of_several_engines_has_its_own_label() -> None:
    facts = Facts({}, RequestLimits(64, (BlockGroup(100),), 16, 64), 64)
    statuses = {n: EngineStatus(facts=facts, num_running=n, num_free_blocks=100) for n in (0, 1)}
    metrics = Metrics("demo", EngineConfig(), lambda: statuses)
    metrics.of(1).step(StepReport(Record(0, 2, 34, 1, 70, 16, 3, 0.02), 2, 1, 70))
    for number in (0, 1):
        value, engine = Values(metrics), str(number)
        assert value("vllm:num_requests_running", engine=engine) == number
        assert value("quire:engine_step_total", engine=engine) == number
        assert value("vllm:cache_config_info", engine=engine) == 1
        assert value("vllm:request_success_total", engine=engine, finished_reason="stop") == 0
    del statuses[1]
    assert Values(metrics)("vllm:cache_config_info") == 1
    metrics.of(2)
    assert Values(metrics)("quire:engine_step_total", engine="2") == 0


def test_an_engine_that_is_gone_has_nothing() -> None:
    facts = Facts({}, RequestLimits(64, (BlockGroup(100),), 16, 64), 64)
    stores = {"memory": StoreCounters(num_blocks=5, num_bytes=80, num_stored=7)}
    busy = EngineStatus(facts=facts, num_running=3, num_waiting=2, num_free_blocks=25, num_restarts=2)
    busy.stores = stores
    statuses = {0: EngineStatus(facts=facts, num_free_blocks=100), 1: busy}
    metrics = Metrics("demo", EngineConfig(), lambda: statuses)
    assert Values(metrics)("vllm:num_requests_running", engine="1") == 3
    del statuses[1]
    value = Values(metrics)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(f"vllm:{name}", engine="1") == 0
    assert value("vllm:num_requests_waiting_by_reason", engine="1") == 0
    assert value("quire:block_store_bytes", engine="1") == 0
    statuses[1] = replace(busy, num_restarts=1)  # another process, which counts from 0
    value = Values(metrics)
    assert value("vllm:num_requests_running", engine="1") == 3
    assert value("quire:engine_restarts_total", engine="1") == 3
    assert value("quire:block_store_events_total", engine="1", event="stored") == 14


def test_an_engine_that_is_not_there_yet() -> None:
    value = Values(Metrics("demo", EngineConfig(), lambda: {0: EngineStatus()}))
    assert value("vllm:kv_cache_usage_perc") == 0
    assert value("vllm:request_success_total", finished_reason="error") == 0
    assert value("vllm:admission_rejections_total", reason="tokens") == 0


def test_no_prefix_cache_no_queries() -> None:
    metrics = make_metrics(enable_prefix_caching=False)
    happen(metrics)
    assert Values(metrics)("vllm:prefix_cache_queries_total") == 0


def test_a_models_name_is_only_a_value() -> None:
    name = 'a"} 1\nvllm:forged 2\\'
    metrics = make_metrics(name)
    assert {sample.labels.get("model_name", name) for sample in Values(metrics).samples} == {name}


def test_labels_are_bounded() -> None:
    metrics, rng = make_metrics(), random.Random(0)
    for _ in range(100_000):
        word = "".join(rng.choices(string.ascii_letters, k=8))
        metrics.http(word, f"/{word}", rng.randrange(100, 600))
    for word in ("a", "b", "draining"):
        metrics.rejected(word)
    samples = [one for one in Values(metrics).samples if one.name == "quire:http_requests_total"]
    assert len(samples) <= (MAX_PATHS + 1) * 5
    assert sum(one.value for one in samples) == 100_000
    assert {one.labels["method"] for one in samples} == {"other"}
    assert Values(metrics)("vllm:admission_rejections_total", reason="other") == 2


def test_requests_are_counted_by_route() -> None:
    words = ["".join(pair) for pair in itertools.product("abcdefgh", repeat=2)]
    with serve() as running:
        for word in words:
            running.ask("GET", f"/{word}/{word}")
            running.ask("GET", f"/v1/models/{word}/{word}")
            running.ask(word.upper(), "/size")
        value = Values(running.metrics)
    counted = [one for one in value.samples if one.name == "quire:http_requests_total"]
    assert len(counted) == 3
    assert value("quire:http_requests_total", method="GET", path="unmatched", status="4xx") == 64
    assert value("quire:http_requests_total", path="/v1/models/{model}", status="2xx") == 64
    assert value("quire:http_requests_total", method="other", path="/size", status="4xx") == 64


def test_counting_a_delivery_costs_microseconds(metrics: Metrics) -> None:
    begin = time.perf_counter()
    for _ in range(1000):
        metrics.of(0).next_tokens(1, 0.02)
    assert time.perf_counter() - begin < 0.1  # 100 microseconds each; some 5 are usual
