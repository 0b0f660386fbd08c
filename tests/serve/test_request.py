"""The places that a request holds in the queue, without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import EngineConfig, ServerConfig
from quire.errors import EngineDead
from quire.frontend import Encoded
from quire.sampling_params import SamplingParams
from quire.server.request import ServerRequest
from quire.server.service import QueueFull, ServiceState
from quire.types import NewRequest

PROMPTS = [Encoded((1, 2, 3)), Encoded((4, 5)), Encoded((6,))]


def make_service(num_taken: int = 99, **limits: int) -> ServiceState:
    """A service whose engine takes so many requests, and dies."""
    left = [num_taken]

    def submit(request: NewRequest) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise EngineDead("the engine died")
        return SimpleNamespace(abort=lambda *_: None)

    def request(prompt: Encoded, params: SamplingParams, *, request_id: str, arrival_s: float) -> NewRequest:
        return NewRequest(request_id, prompt.token_ids, params, arrival_s=arrival_s)

    limits_of_engine = SimpleNamespace(check=lambda _: None)
    engine: Any = SimpleNamespace(
        healthy=lambda _: None,
        submit=submit,
        status=SimpleNamespace(facts=SimpleNamespace(limits=limits_of_engine)),
    )
    frontend: Any = SimpleNamespace(request=request, tokenizer=None)
    metrics: Any = SimpleNamespace(rejected=lambda _: None, request_finished=lambda *_: None)
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
    service.prompt_started(handle.prompts[0].request)
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
