"""The experiment "fleet": one load on several replicas of an engine, simulated with each router."""

from __future__ import annotations

import gc
import math
import random
import time
from bisect import bisect_left
from collections.abc import Iterator

from quire.bench.metrics import percentile
from quire.bench.workload import Request
from quire.errors import QuireError
from quire.experiments.parameters import Line
from quire.experiments.served_engine import FleetTask
from quire.goals import Goal, Limit
from quire.routing.goal_scaler import GoalScaler, LatencyGoal
from quire.routing.scaling import Observed, Scaler
from quire.simulation.fleet import FleetPlan
from quire.simulation.fleet_run import SimulatedFleet, replica_model, simulate_fleet
from quire.simulation.law_file import from_json
from quire.simulation.runner import TOKEN_ID
from quire.simulation.saturation import FULL_BATCHES, saturation_rate
from quire.simulation.shares import slower

ROUTERS = ("round-robin", "two-choices", "prefix")
SIZES = (0.5, 0.75, 1.0, 1.5, 2.0)  # times the replicas that were asked for: fixed numbers to compare with
MAX_S = 30.0  # no further run is begun after that; on an idle core all take 5 s
MAX_FULL = 256  # requests that find the rate of a full replica
NUM_TURNS = 6  # of a conversation
TURN_TOKENS = 80  # of a question and its answer, at most
NUM_ACTIVE = 12  # conversations at a time, for each unit of the load
SWING = 0.6  # of the rate around its mean: at its peak it is four times its least
DAY_S = 1800.0  # that the load takes for the scaler, whose averages are over minutes
START_UP_S = 60.0  # of a replica, on that scale
GOAL_TIMES = 2.0  # the time that the longest prompt takes alone: the goal for the first token, or a bit more
NUM_PIECES = 60  # of the time, in the picture of replicas
SHARES = (*range(0, 100, 2), 99, 100)  # percentiles


def run(asked: FleetTask) -> Iterator[Line]:
    """Simulate a load with each router, and with other numbers of replicas; yield the figures of each run.

    All times are predicted: they are those of a virtual clock.
    """
    begin_s = time.perf_counter()
    experiment = FleetExperiment(asked)
    yield {"setup": experiment.described()}
    count = asked.replicas
    sizes = sorted({max(1, round(part * count)) for part in SIZES})
    runs = [(router, count, asked.autoscaling) for router in ROUTERS]
    others = [("prefix", count, True), *[("prefix", size, False) for size in sizes]]
    found: dict[tuple[str, int, bool], Line] = {}
    for index, key in enumerate(runs + others):
        if time.perf_counter() - begin_s > MAX_S:
            break
        router, size, scales = key
        if key not in found:
            gc.collect()  # the replicas of the last run: nothing else collects in this process
            done = experiment.run(router, size, scales=scales)
            found[key] = {"num_replicas": size, "autoscaling": scales, **_figures(done, experiment.goal)}
        if index < len(runs):  # none of these was run before
            yield {"router": {"router": router, **found[key], **_history(done)}}
        else:
            yield {"size": found[key]}
        yield {"progress": (index + 1) / len(runs + others)}
    is_complete = found.keys() == {*runs, *others}
    yield {"done": {"took_s": time.perf_counter() - begin_s, "is_complete": is_complete}}


class ScalerOnScale:
    """A scaler for which `factor` seconds pass in each second of the simulation."""

    def __init__(self, scaler: Scaler, factor: float) -> None:
        self.interval_s = scaler.interval_s / factor
        self._scaler, self._factor = scaler, factor

    def target(self, observed: Observed) -> int:
        """See Scaler."""
        factor = self._factor
        starting_s = tuple([factor * one for one in observed.starting_s])
        return self._scaler.target(observed._replace(at_s=factor * observed.at_s, starting_s=starting_s))


class FleetExperiment:
    """The replicas, the load on them and the goal, which all runs have in common."""

    def __init__(self, task: FleetTask) -> None:
        served = task.served
        known = from_json(served.law)
        self.asked, self.served = task, served
        self.law, self.source = known.law, known.source
        turn = max(2, min(TURN_TOKENS, served.max_model_len // NUM_TURNS))
        self.num_output = max(1, turn // 5)
        self.num_question = turn - self.num_output
        self.one_rate = self._rate_of_one()
        if not self.one_rate:
            raise QuireError("this engine is too small for conversations", "allow longer requests")
        self.peak_rate = task.load * self.one_rate
        self.load_s = task.num_requests * (1 + SWING) / self.peak_rate
        self.goal_s = _rounded(GOAL_TIMES * self._alone_s())
        self.goal = Goal((Limit("ttft", "p99", 1e3 * self.goal_s),))
        self.requests = list(self._requests())

    def described(self) -> Line:
        """Return what is reported first: the law, the load and the goal."""
        return {
            "law": self.source,
            "fitted": self.law.tail > 0,
            "replicas": self.asked.replicas,
            "autoscaling": self.asked.autoscaling,
            "death": self.asked.death,
            "num_requests": len(self.requests),
            "num_turns": NUM_TURNS,
            "prompt_tokens": [self._num_prompt(0), self._num_prompt(NUM_TURNS - 1)],
            "output_tokens": self.num_output,
            "one_requests_per_s": self.one_rate,
            "peak_requests_per_s": self.peak_rate,
            "load_s": self.load_s,
            "goal_ms": 1e3 * self.goal_s,
            "start_up_s": self.load_s * START_UP_S / DAY_S,
        }

    def _rate_of_one(self) -> float:
        """Return the requests a second that a full replica completes with nothing cached."""
        count = min(FULL_BATCHES * self.served.max_num_seqs, MAX_FULL)
        several = [
            Request([number] * self._num_prompt(number % NUM_TURNS), self.num_output)
            for number in range(1, count + 1)
        ]
        return saturation_rate(self.served.scheduler(), self.law, several)

    def _alone_s(self) -> float:
        """Return the time to the first token of the longest prompt, alone and with nothing cached."""
        num_prompt, at_s, start = self._num_prompt(NUM_TURNS - 1), 0.0, 0
        while start < num_prompt:
            count = min(num_prompt - start, self.served.max_num_batched_tokens)
            at_s += self.law.seconds(self.law.values([(start, count)], 1)) + self.law.host_s
            start += count
        return at_s

    def _num_prompt(self, turn: int) -> int:
        return (turn + 1) * self.num_question + turn * self.num_output

    def _requests(self) -> Iterator[Request]:
        """Yield turns of conversations: each prompt is the one before, its answer, and a question."""
        dice = random.Random(0)
        active: list[tuple[int, list[int]]] = []  # turn, tokens so far
        for number, at_s in enumerate(self._arrivals(dice), 1):
            place = dice.randrange(max(2, round(NUM_ACTIVE * self.asked.load)))
            if place >= len(active) or active[place][0] == NUM_TURNS:
                place = min(place, len(active))
                active[place : place + 1] = [(0, [])]
            turn, tokens = active[place]
            tokens = tokens + [number] * self.num_question
            yield Request(tokens, self.num_output, at_s)
            active[place] = turn + 1, tokens + [TOKEN_ID] * self.num_output

    def _arrivals(self, dice: random.Random) -> list[float]:
        """Return the moments of a Poisson process whose rate rises to its peak in the middle, and falls."""
        fine = [index / 1000 for index in range(1001)]
        share = [one - SWING / math.tau * math.sin(math.tau * one) for one in fine]
        gaps = [dice.expovariate(1.0) for _ in range(self.asked.num_requests)]
        passed, total, found = 0.0, sum(gaps), []
        for gap in gaps:
            passed += gap
            found.append(self.load_s * fine[min(bisect_left(share, passed / total), 1000)])
        return found

    def run(self, router: str, num_replicas: int, *, scales: bool) -> SimulatedFleet:
        """Simulate the load."""
        asked, served = self.asked, self.served
        factor = DAY_S / self.load_s
        scaler: Scaler | None = None
        if scales:
            model = replica_model(served.config(), slower(self.law, factor), served.scheduler())
            goal = LatencyGoal(self.goal_s * factor)
            made = GoalScaler(goal, model, start_up_s=START_UP_S, most=num_replicas)
            scaler = ScalerOnScale(made, factor)
        plan = FleetPlan(
            num_replicas=max(1, math.ceil(num_replicas / 3)) if scales else num_replicas,
            start_up_s=START_UP_S / factor,
            deaths_s=(self.load_s / 2,) if asked.death else (),
            scaler=scaler,
            most=num_replicas,
            num_records=1,
        )
        return simulate_fleet(plan, router, served.config(), served.scheduler, self.law, self.requests)


def _figures(done: SimulatedFleet, goal: Goal) -> Line:
    """Return the figures of a run. `replica_hours` are those of an hour of it: its replicas on average."""
    ranked = sorted(1e3 * one.ttft_s for one in done.timelines if one.ttft_s is not None)
    return {
        "p50_ttft_ms": percentile(ranked, 50) if ranked else None,
        "p99_ttft_ms": percentile(ranked, 99) if ranked else None,
        "cached_share": done.cached_share,
        "violated_share": done.violated_share(goal),
        "replica_hours": done.replica_s / (done.end_s or 1.0),
    }


def _history(done: SimulatedFleet) -> Line:
    """Return the distribution of times to the first token, and what became of each replica.

    `open` is how many requests a replica had, in each of NUM_PIECES of the time on average.
    """
    ranked = sorted(1e3 * one.ttft_s for one in done.timelines if one.ttft_s is not None)
    opened = _open_requests(done)
    replicas = [one._asdict() | {"open": pieces} for one, pieces in zip(done.lives, opened, strict=True)]
    return {
        "ttft_ms": [(share, percentile(ranked, share)) for share in SHARES] if ranked else [],
        "replicas": replicas,
        "end_s": done.end_s,
        "num_resumed": done.num_resumed,
    }


def _open_requests(done: SimulatedFleet) -> list[list[float]]:
    """Return the mean number of open requests by replica and piece of the time."""
    found = [[0.0] * NUM_PIECES for _ in done.lives]
    until_s = [one.end_s for one in done.timelines]
    for choice in reversed(done.choices):  # a request that was sent twice left the first replica then
        request = int(choice.request_id)
        begin, end = (at_s / done.end_s * NUM_PIECES for at_s in (choice.at_s, until_s[request]))
        until_s[request] = choice.at_s
        for piece in range(int(begin), min(math.ceil(end), NUM_PIECES)):
            found[choice.replica][piece] += min(end, piece + 1) - max(begin, piece)
    return [[round(one, 2) for one in pieces] for pieces in found]


def _rounded(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below a value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(part * power for part in (1, 2, 5, 10) if part * power >= value * 0.999)
