"""The places that a request holds in the queue, without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import EngineConfig, ServerConfig
from quire.engine.status import StepReport
from quire.engine.step_law import StepLaw
from quire.errors import EngineDead
from quire.frontend import Encoded
from quire.program.features import LEADING
from quire.sampling_params import SamplingParams
from quire.server.request import ServerRequest
from quire.server.service import QueueFull, ServiceState
from quire.types import NewRequest

PROMPTS = [Encoded((1, 2, 3)), Encoded((4, 5)), Encoded((6,))]


def make_service(num_taken: int = 99, **limits: float) -> ServiceState:
    """A service whose engine takes so many requests, and dies."""
    left = [num_taken]

    def submit(request: NewRequest) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise EngineDead("the engine died")
        return SimpleNamespace(abort=lambda *_: None, replica=0)

    def request(prompt: Encoded, params: SamplingParams, *, request_id: str, arrival_s: float) -> NewRequest:
        return NewRequest(request_id, prompt.token_ids, params, arrival_s=arrival_s)

    limits_of_engine = SimpleNamespace(check=lambda _: None, groups=(), block_size=16)
    facts = SimpleNamespace(limits=limits_of_engine)
    counters = {"num_running": 0, "num_blocks": 8, "num_free_blocks": 8}
    status = SimpleNamespace(state="ready", facts=facts, **counters)
    engine: Any = SimpleNamespace(healthy=lambda _: None, submit=submit, status=status, statuses={0: status})
    frontend: Any = SimpleNamespace(request=request, tokenizer=None)
    rejected: list[str] = []
    of_engine = SimpleNamespace(request_finished=lambda *_: None, step=lambda _: None)
    metrics: Any = SimpleNamespace(rejected=rejected.append, reasons=rejected, of=lambda _: of_engine)
    config = ServerConfig(**limits)  # type: ignore[arg-type]
    unused: Any = None
    return ServiceState(config, EngineConfig(), frontend, engine, metrics, ("demo",), False, unused)


def queued(service: ServiceState) -> tuple[int, int]:
    return service.num_queued_requests, service.num_queued_tokens


def submit(service: ServiceState) -> ServerRequest:
    """A request of three prompts that was handed to the engine."""
    handle = ServerRequest(service)
    handle.enter_queue()
    params = [SamplingParams(seed=0, detokenize=False)] * len(PROMPTS)
    try:
        asyncio.run(handle.submit(PROMPTS, params))
    except EngineDead:
        handle.failure = EngineDead("expected")
    return handle


def test_each_prompt_holds_a_place_until_its_first_output() -> None:
    service = make_service()
    handle = submit(service)
    assert queued(service) == (3, 6)
    service.prompt_started(handle.prompts[0].request, 0)
    handle.prompts[0].is_queued = False
    assert queued(service) == (2, 3)
    handle.close()
    handle.close()
    assert queued(service) == (0, 0)


@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_a_submission_that_fails_leaves_no_place(num_taken: int) -> None:
    service = make_service(num_taken)
    handle = submit(service)
    assert handle.failure is not None
    assert queued(service) == (0, 0)


def test_the_queue_is_bounded_by_requests_and_tokens() -> None:
    service = make_service(max_queued_requests=4, max_queued_tokens=10)
    first = submit(service)  # 3 places, 6 tokens
    second = ServerRequest(service)
    second.enter_queue(1, 4)
    with pytest.raises(QueueFull, match="4 requests wait"):
        service.check_queue()
    second.leave_queue()
    service.num_queued_tokens -= 4
    with pytest.raises(QueueFull, match="6 prompt tokens wait"):
        service.check_queue(1, 5)
    first.close()
    service.check_queue(1000, 1000)  # one that is larger than the whole queue runs alone


def test_a_request_makes_room_for_its_own_prompts() -> None:
    """Its own place does not count against it."""
    service = make_service(max_queued_requests=1)
    assert submit(service).failure is None
    assert queued(service) == (3, 6)


LAW = StepLaw(LEADING, (), (0.0, 0.0, 1e-3, 0.0), (), tail=1.0)  # 1 ms a token


def test_a_queue_that_would_break_the_goal_refuses() -> None:
    service = make_service(ttft_goal=2)
    handle = ServerRequest(service)
    handle.enter_queue(1, 1500)
    service.check_queue(1, 20_000)  # nobody can say
    service.take_report(StepReport(None, 0, 0, 8, LAW))
    service.check_queue()
    service.check_queue(1, 500)
    with pytest.raises(QueueFull, match=r"would come in 5\.2 s, and the goal is 2 s") as refusal:
        service.check_queue(1, 3700)
    assert refusal.value.retry_after_s == 2  # then it waits for nobody: alone it takes 3.7 s
    with pytest.raises(QueueFull) as refusal:
        service.check_queue(1, 1900)
    assert refusal.value.retry_after_s == 2  # in 1.4 s it would get its token in time
    handle.enter_queue(1, 500)
    with pytest.raises(QueueFull):
        service.check_queue(1, 1)
    assert metrics_of(service) == ["ttft_goal"] * 3
    handle.leave_queue()
    service.num_queued_tokens = 0
    service.check_queue(1, 100_000)  # it takes longer than the goal, and nothing is ahead of it


def metrics_of(service: ServiceState) -> list[str]:
    metrics: Any = service.metrics
    reasons: list[str] = metrics.reasons
    return reasons
