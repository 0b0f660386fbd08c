"""Forecasts of the time to first token, against an engine on a virtual clock."""

from __future__ import annotations

from itertools import count

import pytest

from quire.config import EngineConfig
from quire.engine.caches import BlockGroup
from quire.engine.engine import Engine, request_limits, step
from quire.engine.forecast import Forecast, mean_context
from quire.engine.scheduler import Scheduler
from quire.engine.status import EngineStatus, Facts, StepReport
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.sampling_params import SamplingParams
from quire.simulation.clock import VirtualClock
from quire.simulation.runner import VirtualRunner
from quire.types import NewRequest

FEATURES = (*LEADING, Feature("pairs"))
STAGES = (Stage((2.3e-3, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 3.5e-4, 0.0, 1e-7)),)
LAW = StepLaw(FEATURES, STAGES, (3e-4, 1e-4, 0.0, 0.0, 0.0), (), host_s=5e-4, tail=1.0)
STEP_S = 0.2  # of 512 tokens: a prompt may get its token with the end of the one after it


class Service:
    """An engine on a virtual clock, with the queue that a server keeps in front of it."""

    def __init__(self, **options) -> None:
        self.config = config = EngineConfig(max_num_batched_tokens=512, **options)
        self.scheduler = Scheduler(
            groups=[BlockGroup(4096)],
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_prefill_tokens=config.max_num_prefill_tokens,
            itl_goal_s=config.itl_goal,
            max_model_len=4096,
        )
        self.clock = VirtualClock()
        self.engine = Engine(self.scheduler, VirtualRunner(LAW, self.clock), clock=self.clock.read)
        self.forecast, self.status = Forecast(config), EngineStatus()
        self.status.take_facts(Facts({}, request_limits(self.scheduler, None), 4096))
        self.names = count()
        self.queued: dict[str, NewRequest] = {}
        self.sent_s: dict[str, float] = {}
        self.ttft_s: dict[str, float] = {}

    def calibrate(self) -> None:
        self.scheduler.calibrate(LAW)
        self.forecast.take_report(StepReport(None, 0, 0, self.status.num_free_blocks, LAW))

    def expect(self, num_tokens: int, num_requests: int = 1) -> tuple[float, float] | None:
        num_queued = sum(len(new.prompt_token_ids) for new in self.queued.values())
        queued = self.forecast.uncached(len(self.queued), num_queued)
        new, status = self.forecast.uncached(num_requests, num_tokens), self.status
        return self.forecast.ttft_s(queued, new, status.num_running, mean_context(status))

    def add(self, num_prompt: int, max_tokens: int) -> str:
        name = str(next(self.names))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        new = NewRequest(name, (int(name),) * num_prompt, params, self.clock.now_s)
        self.engine.add(new)
        self.queued[name], self.sent_s[name] = new, self.clock.now_s
        return name

    def step(self) -> None:
        outputs, report = step(self.engine)
        self.status.take_report(report)
        self.forecast.take_report(report)
        for output in outputs:
            name = output.request_id
            if (new := self.queued.pop(name, None)) is not None:
                self.ttft_s[name] = self.clock.now_s - self.sent_s[name]
                self.forecast.started(len(new.prompt_token_ids), output.num_cached_tokens)
            if output.finish_reason is not None:
                self.forecast.ended(self.clock.now_s - self.sent_s[name] - self.ttft_s[name])

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()


def test_without_a_law_there_is_none():
    service = Service()
    assert service.expect(100) is None
    service.forecast.take_report(StepReport(None, 0, 0, 1, LAW._replace(tail=0.0)))
    assert service.expect(100) is not None
    assert not service.forecast.is_calibrated
    service.calibrate()
    assert service.forecast.is_calibrated


@pytest.mark.parametrize("options", [{"itl_goal": 0.06}, {"max_num_prefill_tokens": 48}, {}])
@pytest.mark.parametrize("num_streams", [0, 8])
def test_prompts_ahead_are_computed_first(options, num_streams):
    service = Service(**options)
    service.calibrate()
    for _ in range(num_streams):
        service.add(64, 2000)
    for _ in range(20 if num_streams else 0):
        service.step()
    expected = {}
    for _ in range(6):
        ttft_s, _ = service.expect(600)
        expected[service.add(600, 50)] = ttft_s
    service.step()
    service.step()  # part of the first prompt is computed
    ttft_s, alone_s = service.expect(600)
    ahead_s = service.clock.now_s - service.sent_s[str(num_streams)]
    expected[service.add(600, 50)] = ttft_s
    assert alone_s < ttft_s / 3
    service.finish()
    last = str(num_streams + 6)
    assert expected[last] == pytest.approx(expected[str(num_streams + 5)] + alone_s - ahead_s, rel=0.1)
    for name, ttft_s in expected.items():
        assert ttft_s == pytest.approx(service.ttft_s[name], rel=0.2, abs=STEP_S), name


@pytest.mark.parametrize("options", [{"max_num_seqs": 4}, {"itl_goal": 0.008}])
def test_slots_are_waited_for(options):
    service = Service(**options)
    service.calibrate()
    for number in range(24):
        service.add(32, 50 + 37 * number % 100)
    for _ in range(400):
        service.step()
    assert service.queued, "some wait when others come"
    expected = {}
    for number in range(12):
        ttft_s, _ = service.expect(32)
        expected[service.add(32, 50 + 37 * number % 100)] = ttft_s
    service.finish()
    errors = [expected[name] / service.ttft_s[name] - 1 for name in expected]
    assert abs(sum(errors) / len(errors)) < 0.2
    assert max(map(abs, errors)) < 0.5


def test_cached_prompts_take_no_time():
    service = Service()
    service.calibrate()
    before_s, _ = service.expect(2000)
    for _ in range(30):
        service.forecast.started(1000, 900)
    after_s, _ = service.expect(2000)
    assert after_s < 0.3 * before_s
