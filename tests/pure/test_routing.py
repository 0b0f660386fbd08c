"""Routers: which replica gets a request, and why."""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import pytest
from test_forecast import LAW

from quire.config import EngineConfig
from quire.engine.status import CacheChanges, StepReport
from quire.errors import EngineDead
from quire.routing.policies import PrefixOracle, RoundRobin, TwoChoices
from quire.routing.prefix_router import PrefixRouter
from quire.routing.router import Ask, Router
from quire.sampling_params import SamplingParams
from quire.step_record import Record
from quire.types import NewRequest

CONFIG = EngineConfig(max_num_batched_tokens=512)
SIZE = CONFIG.block_size


def ask(name: object, num_tokens: int = 1000, prefix: int = 0, num_shared: int = 0) -> Ask:
    """A request whose first `num_shared` tokens are those of all with the same prefix."""
    prompt = (prefix,) * num_shared + (crc32(str(name).encode()),) * (num_tokens - num_shared)
    return Ask.of(NewRequest(str(name), prompt, SamplingParams()), SIZE)


def stored(request: Ask, *, whole: bool = False) -> CacheChanges:
    return CacheChanges(b"".join(one[:8] for one in request.hashes), b"", whole)


def made(num_replicas: int = 2, law: bool = True) -> PrefixRouter:
    router = PrefixRouter(CONFIG)
    for _ in range(num_replicas):
        replica = router.add_replica()
        router.take_report(replica, StepReport(None, 0, 0, 4096, LAW if law else None))
    return router


def test_a_prompt_goes_where_its_blocks_are():
    router = made(4)
    router.take_report(2, StepReport(None, 0, 0, 4096, cache=stored(ask("a"))))
    decision = router.choose(ask("a"))
    assert (decision.replica, decision.no_affinity) == (2, "")
    assert [one.num_blocks for one in decision.candidates] == [0, 0, len(ask("a").hashes), 0]
    assert decision.candidates[2].ttft_s < decision.candidates[0].ttft_s


def test_requests_that_have_nothing_in_common_are_spread():
    router = made(4)
    chosen = [router.choose(ask(i)).replica for i in range(8)]
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("law", [True, False])
def test_equal_prompts_at_once_go_to_one_replica(law):
    router = made(4, law)
    decisions = [router.choose(ask(i, 1000, 7, 992)) for i in range(10)]
    assert len({one.replica for one in decisions}) == 1
    assert [one.no_affinity for one in decisions[1:]] == [""] * 9


def test_prompts_that_share_little_are_spread():
    router = made(4)
    decisions = [router.choose(ask(i, 1000, 7, 64)) for i in range(8)]
    assert Counter(one.replica for one in decisions) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert "busier" in [one.no_affinity for one in decisions]


def test_a_long_queue_outweighs_cached_blocks():
    router = made(2)
    router.take_changes(0, stored(ask("a", 320)))
    for index in range(8):
        router.choose(ask(index, 4000), among=[0])
    decision = router.choose(ask("a", 320))
    assert (decision.replica, decision.no_affinity) == (1, "busier")


def test_what_was_evicted_draws_nothing():
    router = made(2)
    router.take_changes(1, stored(ask("a")))
    router.take_changes(1, CacheChanges(b"", stored(ask("a")).stored))
    assert router.choose(ask("a")).no_affinity == "nothing cached"
    router.ended("a")
    router.take_changes(1, stored(ask("a")))
    router.take_changes(1, stored(ask("b"), whole=True))
    assert router.choose(ask("a")).no_affinity == "nothing cached"
    assert router.choose(ask("b")).replica == 1


def test_the_reason_for_no_affinity_is_told():
    router = made(2)
    assert router.choose(ask("a", SIZE)).no_affinity == "short prompt"
    assert router.choose(ask("b")).no_affinity == "unknown"
    router.take_changes(0, CacheChanges(b"", b"", whole=True))
    assert router.choose(ask("c")).no_affinity == "nothing cached"


def test_a_request_that_ended_is_expected_no_longer():
    router = made(2)
    first = router.choose(ask("a", 1000, 7, 992)).replica
    router.ended("a")
    router.choose(ask("b", 4000), among=[first])
    assert router.choose(ask("c", 1000, 7, 992)).replica != first
    router.ended("unknown")
    for name in "bc":
        router.ended(name)
    assert all(load.queued == (0, 0, 0) and load.num_open == 0 for load in router.loads.values())


@pytest.mark.parametrize(
    "make", [RoundRobin, TwoChoices, lambda: PrefixOracle(lambda *_: 0), lambda: made(0)]
)
def test_health_decides_first(make):
    router: Router = make()
    with pytest.raises(EngineDead, match="no replica is left"):
        router.choose(ask("a"))
    for _ in range(3):
        router.add_replica()
    router.set_health(1, "draining")
    assert {router.choose(ask(i)).replica for i in range(12)} == {0, 2}
    assert {router.choose(ask(i), among=[1]).replica for i in range(3)} == {1}  # there is no other
    router.set_health(0, "gone")
    router.set_health(0, "ready")  # said too late
    assert {router.choose(ask(i)).replica for i in range(6)} == {2}
    assert router.add_replica() == 3
    assert {router.choose(ask(i)).replica for i in range(30)} == {2, 3}
    with pytest.raises(EngineDead):
        router.choose(ask("a"), among=[0])


def test_a_replica_that_restarts_has_nothing_cached():
    router = made(2)
    router.take_changes(1, stored(ask("a")))
    router.set_health(1, "restarting")
    router.set_health(1, "ready")
    assert router.choose(ask("a")).no_affinity == "nothing cached"


def test_a_slow_replica_gets_less():
    router = made(2)
    router.set_health(0, "slow")
    chosen = Counter(router.choose(ask(i, 600)).replica for i in range(10))
    assert chosen[1] > chosen[0] > 0


def step_record(device_s: float, predicted_s: float = 0.0) -> Record:
    return Record(0, 1, 1, 0, 0, 0, 0, device_s, device_s=device_s, idle_s=0.0, predicted_s=predicted_s)


def test_steps_slower_than_their_law_count():
    router = made(2)
    for _ in range(40):
        router.take_report(0, StepReport(step_record(0.3, 0.1), 0, 0, 4096))
    slow, other = router.choose(ask("a")).candidates
    assert slow.ttft_s == pytest.approx(3 * other.ttft_s, rel=0.05)


def test_the_step_in_flight_ends_first():
    router = made(2)
    router.choose(ask("a", 8), among=[0])
    router.started("a", 0)
    for replica in range(2):
        router.take_report(replica, StepReport(step_record(0.2), 0, 0, 4096))
    busy, idle = router.choose(ask("b")).candidates
    assert busy.ttft_s == pytest.approx(idle.ttft_s + 0.1)


def test_a_place_is_waited_for_as_long_as_others_held_theirs():
    router = made(2)
    for replica, device_s in enumerate((9.0, 1.0)):
        router.choose(ask(replica, 8), among=[replica])
        router.started(str(replica), 0)
        router.take_report(replica, StepReport(step_record(device_s), CONFIG.max_num_seqs, 0, 4096))
        router.ended(str(replica))
    long, short = router.choose(ask("b", 8)).candidates
    assert long.ttft_s - short.ttft_s == pytest.approx(8.0 / CONFIG.max_num_seqs)


def test_of_equal_replicas_the_less_loaded_is_chosen():
    router = made(2)
    router.choose(ask("a", 8), among=[0])
    router.started("a", 0)
    assert router.loads[0].queued == (0, 0, 0)
    router.choose(ask("b", 8), among=[1])
    router.ended("b")
    first, second = router.choose(ask("c")).candidates
    assert first.ttft_s == second.ttft_s
    assert router.sent["c"].replica == 1


def test_a_request_that_began_is_expected_no_longer():
    router = made(2)
    replica = router.choose(ask("a", 1000, 7, 992)).replica
    router.started("a", 0)
    assert router.choose(ask("b", 1000, 7, 992)).no_affinity == "unknown"  # no report has told of its blocks
    router.take_changes(replica, stored(ask("a", 1000, 7, 992)))
    assert router.choose(ask("c", 1000, 7, 992)).replica == replica


def test_round_robin_takes_turns():
    router = RoundRobin()
    for _ in range(3):
        router.add_replica()
    assert [router.choose(ask(i)).replica for i in range(5)] == [0, 1, 2, 0, 1]
    assert router.choose(ask(9), among=[0, 1]).replica == 0


def test_the_oracle_takes_the_longest_prefix():
    router = PrefixOracle(lambda replica, hashes: [3, 5, 5][replica])
    for _ in range(3):
        router.add_replica()
    assert [router.choose(ask(i)).replica for i in range(3)] == [1, 2, 1]


def test_of_many_replicas_those_with_the_prompt_are_considered():
    router = made(1000)
    router.take_changes(777, stored(ask("a")))
    decision = router.choose(ask("a"))
    assert decision.replica == 777
    assert len(decision.candidates) <= 24
