"""PrefixRouter: sends each request where its first token is predicted to come first, prefixes considered.

The prediction for a replica is that of its queue and of the part of the prompt that it has not cached, by the
law of the time of its steps (quire/engine/forecast.py). What is cached is known from the reports of replicas;
what the requests sent there will have cached, until they have begun, from the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from random import Random

from quire.config import EngineConfig
from quire.engine.forecast import Forecast, Work
from quire.engine.status import CacheChanges, StepReport
from quire.routing.block_map import BlockMap, Keys, keys_in, keys_of
from quire.routing.expected_blocks import MAX_EXPECTED, ExpectedBlocks
from quire.routing.loads import Loads, Sent
from quire.routing.router import Ask, Candidate, Decision, Health, NoAffinity

MAX_PAIRS = 1_000_000  # of blocks and replicas that have them
ALL_UP_TO = 32  # replicas: of more, those with most of the prompt are considered, and some others
NUM_MATCHED, NUM_OTHERS = 8, 16
TOKEN_S = 1e-3  # of a prompt, where there is no law
OTHERS_WAIT = 1.0  # seconds that others wait for each second of computing a prompt
# Seconds more that a first token may take, by health
PENALTY_S: dict[Health, float] = {"ready": 0.0, "slow": 1.0, "restarting": 30.0, "draining": 1e4, "gone": 0.0}
_GRAIN_S = 1e-4  # times closer than that are equal
_SMOOTHING = 0.1


class _Replica:
    """A replica as its reports show it."""

    def __init__(self, config: EngineConfig) -> None:
        self.forecast = Forecast(config)
        self.num_running = 0
        self.has_told = False  # what is cached
        self.clock_s = 0.0  # stands still while it has nothing to do
        self.step_s = 0.0  # of its last step
        self.slowness = 1.0  # time of steps over what its law predicts

    def take_report(self, report: StepReport) -> None:
        self.forecast.take_report(report)
        self.num_running = report.num_running
        if (record := report.record) is not None:
            self.clock_s += record.wall_s
            self.step_s = record.device_s
            if record.predicted_s > 0:
                self.slowness += _SMOOTHING * (record.device_s / record.predicted_s - self.slowness)


class PrefixRouter(Loads):
    """A router by predicted time to first token. Of equal choices it takes the least loaded, or in turns.

    `config` is that of all replicas. The choice also counts what computing the prompt costs others: each
    second of it delays those who come after it by OTHERS_WAIT seconds. A replica without a law is predicted
    to compute a token of a prompt in TOKEN_S, so that without any law the least loaded is chosen.
    """

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        super().__init__()
        self._config = config
        self._dice = Random(seed)
        self._replicas: dict[int, _Replica] = {}
        self._stored = BlockMap(MAX_PAIRS)
        self._expected = ExpectedBlocks(MAX_EXPECTED)
        self._last = -1  # replica that was chosen

    def add_replica(self) -> int:
        """See Router."""
        replica = super().add_replica()
        self._replicas[replica] = _Replica(self._config)
        return replica

    def set_health(self, replica: int, health: Health) -> None:
        """See Router. A replica that restarts or is gone has nothing cached."""
        super().set_health(replica, health)
        if health in ("restarting", "gone"):
            self._stored.remove_replica(replica)
            self._expected.remove_replica(replica)
        if health == "gone":
            self._replicas.pop(replica, None)

    def choose(self, ask: Ask, among: Sequence[int] | None = None) -> Decision:
        """See Router."""
        able, keys = self.able(among), keys_of(ask.hashes)
        found = self._found(keys, able)
        candidates, costs = [], []
        for replica in self._shortlist(able, found):
            ttft_s, own_s = self._predict(replica, ask, found.get(replica, 0))
            health = self.loads[replica].health
            ttft_s += PENALTY_S[health]
            candidates.append(Candidate(replica, found.get(replica, 0), ttft_s, health))
            costs.append(ttft_s + OTHERS_WAIT * own_s)
        best = min(range(len(costs)), key=lambda i: self._order(candidates[i].replica, costs[i]))
        chosen = candidates[best]
        self._last = chosen.replica
        listed = keys.tolist()
        self.note(Sent(ask, chosen.replica, listed, chosen.num_blocks * self._config.block_size))
        self._expected.add(chosen.replica, listed)
        return Decision(chosen.replica, tuple(candidates), self._no_affinity(ask, chosen, found))

    def _order(self, replica: int, cost_s: float) -> tuple[int, float, int]:
        """Return what the least of which is the best choice."""
        load = self.loads[replica]
        turn = (replica - self._last - 1) % self.num_added
        return round(cost_s / _GRAIN_S), load.queued.num_tokens + load.num_open, turn

    def _found(self, keys: Keys, able: Sequence[int]) -> dict[int, int]:
        """Return how many leading blocks of a prompt each replica has, or will have when it comes to it."""
        found = self._stored.match(keys)
        for replica, num_blocks in self._expected.match(keys.tolist()).items():
            found[replica] = max(num_blocks, found.get(replica, 0))
        choosable = set(able)
        return {replica: number for replica, number in found.items() if replica in choosable}

    def _shortlist(self, able: list[int], found: dict[int, int]) -> list[int]:
        """Return the replicas that are worth a prediction."""
        if len(able) <= ALL_UP_TO:
            return able
        loads = self.loads
        best = nlargest(NUM_MATCHED, found, key=lambda one: (found[one], -loads[one].queued.num_tokens, -one))
        return list(dict.fromkeys(best + self._dice.sample(able, NUM_OTHERS)))

    def _predict(self, replica: int, ask: Ask, num_blocks: int) -> tuple[float, float]:
        """Return the time to first token of a request, and that of computing its prompt alone."""
        known, load = self._replicas[replica], self.loads[replica]
        num_cached = num_blocks * self._config.block_size
        own = Work(1, ask.num_prompt_tokens - num_cached, num_cached)
        context = load.num_context // max(1, load.num_open - load.queued.num_requests)
        forecast = known.forecast.ttft_s(load.queued, own, known.num_running, context)
        if forecast is None:
            return TOKEN_S * (load.queued + own).num_tokens, TOKEN_S * own.num_tokens
        rest_s = known.step_s / 2 if load.num_open else 0.0  # of the step in flight
        slowness = max(1.0, known.slowness)
        return (forecast[0] + rest_s) * slowness, forecast[1] * slowness

    def _no_affinity(self, ask: Ask, chosen: Candidate, found: dict[int, int]) -> NoAffinity:
        if not ask.hashes:
            return "short prompt"
        most = max(found.values(), default=0)
        if not most:
            return "nothing cached" if any(one.has_told for one in self._replicas.values()) else "unknown"
        return "busier" if chosen.num_blocks < most else ""

    def started(self, request_id: str, num_cached_tokens: int) -> None:
        """See Router."""
        sent = self.sent.get(request_id)
        if sent is None or sent.has_started:
            return
        known = self._replicas[sent.replica]
        sent.started_s = known.clock_s
        known.forecast.started(sent.ask.num_prompt_tokens, num_cached_tokens)
        self._expected.remove(sent.replica, sent.keys)
        super().started(request_id, num_cached_tokens)

    def ended(self, request_id: str) -> None:
        """See Router."""
        if (sent := self.sent.get(request_id)) is not None:
            known = self._replicas[sent.replica]
            if sent.has_started:
                known.forecast.ended(known.clock_s - sent.started_s)
            else:
                self._expected.remove(sent.replica, sent.keys)
        super().ended(request_id)

    def take_report(self, replica: int, report: StepReport) -> None:
        """See Router."""
        if (known := self._replicas.get(replica)) is not None:
            known.take_report(report)
            if report.cache is not None:
                self.take_changes(replica, report.cache)

    def take_changes(self, replica: int, changes: CacheChanges) -> None:
        """See Router."""
        if (known := self._replicas.get(replica)) is None:
            return
        known.has_told = True
        if changes.whole:
            self._stored.remove_replica(replica)
        self._stored.remove(replica, keys_in(changes.evicted))
        self._stored.add(replica, keys_in(changes.stored))
