"""A fleet: one replica is the single simulation exactly, and nothing is lost when replicas come and go."""

from __future__ import annotations

from itertools import islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from quire.bench.metrics import Timeline
from quire.bench.workload import Lengths, Request, poisson, random_requests
from quire.cluster.split import MIN_TOKENS
from quire.engine.caches import BlockGroup
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.status import CacheChanges, StepReport
from quire.engine.step_law import Stage, StepLaw
from quire.program.features import LEADING, Feature
from quire.routing.router import Ask, Decision, Health
from quire.routing.scaling import Observed
from quire.simulation.apart import LEAST_PROMPT, Apart
from quire.simulation.clients import NO_BOUNDS, NO_DELAYS, Bounds, Clients, Delays
from quire.simulation.clock import VirtualClock
from quire.simulation.fleet import Fleet, FleetPlan
from quire.simulation.prompts import BlockVocabulary
from quire.simulation.runner import VirtualRunner
from quire.simulation.simulate import simulate

FEATURES = (*LEADING, Feature("positions"))  # one, rows, tokens, logits, positions
ROOF = (Stage((0.010, 0.0, 0.0, 0.0, 1e-5), (0.0, 0.0, 0.0005, 0.0, 0.0)),)
LAW = StepLaw(FEATURES, ROOF, (0.001, 0.0, 0.0001, 0.0, 0.0), ROOF, host_s=0.0003)


def scheduler(num_blocks: int = 64, **options) -> Scheduler:
    given = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 200}
    return Scheduler(groups=[BlockGroup(num_blocks)], **(given | options))


def load(count: int, rate: float = 20.0, seed: int = 0) -> list[Request]:
    drawn = random_requests(
        Lengths(16, 8, 0.9, num_prefix_tokens=12, num_prefixes=3), BlockVocabulary(), seed
    )
    return list(islice(poisson(drawn, rate, seed), count))


def run_of_one_engine(planner: Scheduler, clients: Clients) -> Engine:
    """One engine in a loop, as a thread serves it, on one clock: what a fleet of one must be equal to."""
    clock = VirtualClock()
    engine = Engine(planner, VirtualRunner(LAW, clock), clock=clock.read, num_records=10_000)
    while True:
        while (next_s := clients.next_s) is not None and next_s <= clock.now_s:
            new = clients.take()
            assert clients.queue(new)
            engine.add(new)
        if engine.has_work:
            clients.receive(engine.step(), clock.now_s)
        elif next_s is not None:
            clock.advance_to(next_s)
        else:
            return engine


@given(
    st.integers(0, 1000),
    st.sampled_from([1, 2]),
    st.sampled_from([14, 20, 64]),
    st.sampled_from([None, 3]),
    st.booleans(),
)
def test_one_replica_is_the_single_simulation(seed, in_flight, num_blocks, max_concurrency, is_open):
    bounds, delays = Bounds(max_concurrency=max_concurrency), Delays(0.003, 0.0001)
    planner = scheduler(num_blocks, max_steps_in_flight=in_flight, max_model_len=48)
    clients = Clients(load(15, seed=seed), delays, bounds, is_open=is_open)
    alone = run_of_one_engine(planner, clients)
    planner = scheduler(num_blocks, max_steps_in_flight=in_flight, max_model_len=48)
    found = simulate(
        planner, LAW, load(15, seed=seed), delays=delays, bounds=bounds, is_open=is_open, num_records=10_000
    )
    assert found.timelines == clients.timelines
    assert found.records == alone.records
    assert found.num_steps == len(found.records)
    assert found.num_preemptions == alone.scheduler.num_preemptions


class InTurn:
    """A router that notes what it is told, and chooses ready replicas in turn."""

    def __init__(self) -> None:
        self.health: list[Health] = []
        self.chosen: dict[str, int] = {}
        self.started_on: list[tuple[str, int]] = []
        self.asks: list[Ask] = []
        self.changes = [0] * 100
        self.laws: dict[int, StepLaw] = {}

    def add_replica(self) -> int:
        self.health.append("ready")
        return len(self.health) - 1

    def set_health(self, replica: int, health: Health) -> None:
        self.health[replica] = health

    def choose(self, ask: Ask, among=None) -> Decision:
        able = range(len(self.health)) if among is None else among
        ready = [number for number in able if self.health[number] == "ready"]
        self.chosen[ask.request_id] = ready[len(self.asks) % len(ready)]
        self.asks.append(ask)
        return Decision(self.chosen[ask.request_id], (), "")

    def started(self, request_id: str, num_cached_tokens: int) -> None:
        self.started_on.append((request_id, self.chosen[request_id]))

    def ended(self, request_id: str) -> None:
        del self.chosen[request_id]

    def take_report(self, replica: int, report: StepReport) -> None:
        if report.law is not None:
            self.laws[replica] = report.law
        if report.cache is not None:
            self.changes[replica] += len(report.cache.stored)

    def take_changes(self, replica: int, changes: CacheChanges) -> None:
        raise AssertionError("changes come with reports")


def run(requests: list[Request], router: InTurn, bounds: Bounds = NO_BOUNDS, **plan) -> Fleet:
    clients = Clients(requests, NO_DELAYS, bounds)
    fleet = Fleet(FleetPlan(**plan), clients, scheduler, LAW, router)
    fleet.run()
    return fleet


def assert_whole(timelines: list[Timeline], requests: list[Request]) -> None:
    """Every request got all its tokens, once."""
    assert [len(one.chunk_s) for one in timelines] == [one.num_output_tokens for one in requests]
    assert all(one.chunk_s == sorted(one.chunk_s) and not one.error for one in timelines)


def test_requests_are_spread_as_the_router_says():
    router, requests = InTurn(), load(40, rate=200.0)
    fleet = run(requests, router, num_replicas=3)
    assert_whole(fleet.clients.timelines, requests)
    assert [ask.num_prompt_tokens for ask in router.asks] == [len(one.content) for one in requests]
    assert [len(ask.hashes) for ask in router.asks] == [(len(one.content) - 1) // 4 for one in requests]
    assert sorted(router.started_on) == sorted((str(i), i % 3) for i in range(40))
    assert router.chosen == {}
    assert router.laws == dict.fromkeys(range(3), LAW)
    assert all(router.changes[:3])
    alone = [
        simulate(scheduler(), LAW, requests[number::3], num_records=10_000).timelines for number in range(3)
    ]
    assert [fleet.clients.timelines[number::3] for number in range(3)] == alone


def test_more_replicas_answer_more():
    few, many = (run(load(60, rate=100.0), InTurn(), num_replicas=n) for n in (1, 6))
    slowest = [max(one.ttft_s or 0.0 for one in fleet.clients.timelines) for fleet in (few, many)]
    assert slowest[1] < slowest[0] / 3


class Asked:
    """A scaler that says what it is told to, by time."""

    interval_s = 0.5

    def __init__(self, targets: dict[float, int]) -> None:
        self.targets, self.seen = targets, list[Observed]()

    def target(self, observed: Observed) -> int:
        self.seen.append(observed)
        return next(count for at_s, count in self.targets.items() if observed.at_s <= at_s)


def test_replicas_are_started_and_drained():
    requests = load(100, rate=25.0)
    scaler = Asked({1.0: 1, 2.0: 9, 100.0: 2})
    router = InTurn()
    fleet = run(requests, router, scaler=scaler, least=1, most=4, start_up_s=0.3)
    assert_whole(fleet.clients.timelines, requests)
    counts = fleet.log.counts
    assert max(one.num_ready for one in counts) == 4
    assert (1.5, 1, 3, 0) in counts
    assert (1.8, 4, 0, 0) in counts
    assert counts[-1][1:] == (2, 0, 0)
    assert any(one.num_draining for one in counts), "a replica with open requests ends them before it goes"
    assert [one.state for one in fleet.replicas].count("gone") == 2
    assert router.health.count("gone") == 2
    last = scaler.seen[-1]
    arrived = [one for one in requests if one.at_s <= last.at_s]
    assert last.num_arrived == len(arrived)
    assert last.num_prompt_tokens == sum(len(one.content) for one in arrived)
    for one in scaler.seen:
        assert one.num_arrived == one.num_open + one.num_ended
        assert one.num_started - one.num_ended == one.num_open - one.num_queued
    assert scaler.seen[3].starting_s == ()
    assert scaler.seen[2].num_ready == 1


def test_replicas_that_start_are_given_up_first():
    scaler = Asked({1.0: 4, 100.0: 1})
    fleet = run(load(60), InTurn(), scaler=scaler, most=4, start_up_s=5.0)
    assert [one.state for one in fleet.replicas] == ["ready", "gone", "gone", "gone"]
    assert len({one.number for one in fleet.replicas[1:]}) == 1, "they were never ready"


def test_requests_wait_where_no_replica_is_ready():
    requests = load(20)
    scaler = Asked({100.0: 1})
    fleet = run(requests, InTurn(), num_replicas=0, scaler=scaler, start_up_s=2.0)
    assert_whole(fleet.clients.timelines, requests)
    assert min(one.chunk_s[0] for one in fleet.clients.timelines) > 2.5


def test_bounds_of_the_queue_hold_for_each_replica():
    requests = [Request([i] * 10, 3) for i in range(20)]
    rejected = [
        sum(
            one.is_rejected
            for one in run(
                requests, InTurn(), Bounds(max_queued_requests=3), num_replicas=count
            ).clients.timelines
        )
        for count in (1, 4)
    ]
    assert rejected == [17, 8]


@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([15, 64]), st.sampled_from([0.0, 0.4]))
def test_no_token_is_lost_or_sent_twice_when_replicas_die(seed, num_replicas, num_blocks, start_up_s):
    requests, router = load(40, seed=seed), InTurn()
    deaths_s = tuple(0.11 * number for number in range(1, 16))
    clients = Clients(requests, NO_DELAYS, NO_BOUNDS)
    plan = FleetPlan(num_replicas=num_replicas, deaths_s=deaths_s, start_up_s=start_up_s, seed=seed)
    made: list[Scheduler] = []

    def make() -> Scheduler:
        made.append(scheduler(num_blocks, max_model_len=60))
        return made[-1]

    fleet = Fleet(plan, clients, make, LAW, router)
    fleet.run()
    assert_whole(clients.timelines, requests)
    assert 2 < fleet.log.num_deaths <= 15
    assert fleet.log.num_resumed > 5
    assert fleet.num_ready == num_replicas or start_up_s
    assert router.chosen == {}
    for planner, replica in zip(made, fleet.replicas, strict=False):
        planner.check()
        assert (planner.num_free_blocks == num_blocks) or replica.state == "gone"


def test_a_request_goes_on_after_its_last_token():
    """The second replica computes the prompt and two tokens, and gives the third one."""
    clients = Clients([Request([1] * 8, 5)], NO_DELAYS, NO_BOUNDS)
    fleet = Fleet(FleetPlan(num_replicas=2, deaths_s=(0.045,)), clients, scheduler, LAW)
    fleet.run()
    (one,) = clients.timelines
    assert sum(at_s < 0.045 for at_s in one.chunk_s) == 3
    again_s = 0.045 + LAW.host_s + LAW.seconds(LAW.values([(0, 11)], 1))
    assert one.chunk_s[3] == again_s
    assert [replica.state for replica in fleet.replicas] == ["gone", "ready", "ready"]


def run_apart(requests: list[Request], apart: Apart, num_replicas: int, num_blocks: int = 1000) -> Fleet:
    """Run requests where some replicas compute prompts, and check that nothing is lost."""
    made: list[Scheduler] = []

    def make() -> Scheduler:
        made.append(scheduler(num_blocks, max_model_len=1000, max_num_batched_tokens=256))
        return made[-1]

    router, clients = InTurn(), Clients(requests, NO_DELAYS, NO_BOUNDS)
    fleet = Fleet(FleetPlan(num_replicas=num_replicas, apart=apart), clients, make, LAW, router)
    fleet.run()
    assert_whole(clients.timelines, requests)
    assert router.chosen == {}
    assert {replica for _, replica in router.started_on} <= set(range(apart.num_prefill))
    for planner, replica in zip(made, fleet.replicas, strict=True):
        planner.check()
        assert planner.num_free_blocks == num_blocks
        assert not replica.open
        assert not replica.unstarted
    return fleet


def test_a_prompt_is_computed_apart_and_its_blocks_move():
    apart = Apart(1, token_bytes=1000.0, bytes_per_s=1e6, latency_s=0.25)
    fleet = run_apart([Request([1] * 513, 3)], apart, 2)
    (one,) = fleet.clients.timelines
    first_s = sum(
        LAW.host_s + LAW.seconds(LAW.values([rows], n)) for rows, n in (((0, 256), 0), ((256, 256), 0))
    )
    first_s += LAW.host_s + LAW.seconds(LAW.values([(512, 1)], 1))
    there_s = one.chunk_s[0] + 0.513 + 0.25
    next_s = LAW.host_s + LAW.seconds(
        LAW.values([(512, 2)], 1)
    )  # the last token of the prompt is in no block
    assert abs(one.chunk_s[0] - first_s) < 1e-9
    assert abs(one.chunk_s[1] - there_s - next_s) < 1e-9
    assert one.num_cached_tokens == 0, "blocks that moved were computed for this request"
    assert [replica.num_steps for replica in fleet.replicas] == [3, 2]


def test_a_link_moves_one_prompt_at_a_time():
    apart = Apart(1, token_bytes=1000.0, bytes_per_s=1e5, latency_s=0.0)
    requests = [Request([i] * 512, 2) for i in range(3)]
    ends = sorted(one.end_s for one in run_apart(requests, apart, 4).clients.timelines)
    assert all(5.12 <= later - one < 5.2 for one, later in pairwise(ends))


def test_short_prompts_are_computed_where_they_are_answered():
    assert LEAST_PROMPT == MIN_TOKENS
    requests = [Request([i] * n, k) for i, (n, k) in enumerate([(511, 5), (512, 5), (512, 1), (20, 3)])]
    fleet = run_apart(requests, Apart(1, 1.0), 3)
    assert [replica.number for replica in fleet.replicas if replica.num_steps] == [0, 1, 2]
    assert fleet.replicas[0].engine.scheduler.num_cached_tokens == 0
    assert sum(one.engine.scheduler.num_cached_tokens for one in fleet.replicas[1:]) == 512


@given(st.integers(0, 1000), st.integers(1, 2), st.sampled_from([260, 600]), st.sampled_from([1e4, 1e8]))
def test_no_token_is_lost_where_prompts_are_computed_apart(seed, num_prefill, num_blocks, bytes_per_s):
    drawn = random_requests(
        Lengths(500, 8, 0.9, num_prefix_tokens=24, num_prefixes=3), BlockVocabulary(), seed
    )
    requests = list(islice(poisson(drawn, 10.0, seed), 15))
    run_apart(requests, Apart(num_prefill, 10.0, bytes_per_s), num_prefill + 2, num_blocks)
