"""Simple routers, to compare with: in turns, the less loaded of two, and one that knows every cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from quire.routing.block_map import keys_of
from quire.routing.expected_blocks import MAX_EXPECTED, ExpectedBlocks
from quire.routing.loads import Loads, Sent
from quire.routing.router import Ask, Candidate, Decision

Find = Callable[[int, Sequence[bytes]], int]  # replica, hashes of a chain -> leading blocks that it has


class RoundRobin(Loads):
    """Chooses the replicas in turns."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -1

    def choose(self, ask: Ask, among: Sequence[int] | None = None) -> Decision:
        """See Router."""
        able = sorted(self.able(among))
        self._last = next((one for one in able if one > self._last), able[0])
        return _decide(self, ask, self._last, [Candidate(self._last, 0, 0.0, self.loads[self._last].health)])


class TwoChoices(Loads):
    """Chooses the one with fewer open requests of two that are drawn at random."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._dice = Random(seed)

    def choose(self, ask: Ask, among: Sequence[int] | None = None) -> Decision:
        """See Router."""
        able = self.able(among)
        drawn = self._dice.sample(able, min(2, len(able)))
        best = min(drawn, key=lambda one: self.loads[one].num_open)
        return _decide(self, ask, best, [Candidate(one, 0, 0.0, self.loads[one].health) for one in drawn])


class PrefixOracle(Loads):
    """Chooses the replica with the most leading blocks; of equals the one with fewer requests.

    `find` knows the caches exactly; prompts on the way are known, too. The most that routing by prefixes can
    find cached, whatever the queues.
    """

    def __init__(self, find: Find) -> None:
        super().__init__()
        self._find = find
        self._expected = ExpectedBlocks(MAX_EXPECTED)

    def choose(self, ask: Ask, among: Sequence[int] | None = None) -> Decision:
        """See Router."""
        keys = keys_of(ask.hashes).tolist()
        coming = self._expected.match(keys)
        found = {one: max(self._find(one, ask.hashes), coming.get(one, 0)) for one in self.able(among)}
        best = min(found, key=lambda one: (-found[one], self.loads[one].num_open, one))
        chosen = Candidate(best, found[best], 0.0, self.loads[best].health)
        decision = _decide(self, ask, best, [chosen], keys)
        self._expected.add(best, keys)
        return decision

    def started(self, request_id: str, num_cached_tokens: int) -> None:
        """See Router."""
        self._forget(request_id)
        super().started(request_id, num_cached_tokens)

    def ended(self, request_id: str) -> None:
        """See Router."""
        self._forget(request_id)
        super().ended(request_id)

    def _forget(self, request_id: str) -> None:
        sent = self.sent.get(request_id)
        if sent is not None and not sent.has_started:
            self._expected.remove(sent.replica, sent.keys)


def _decide(
    loads: Loads, ask: Ask, replica: int, candidates: list[Candidate], keys: Sequence[int] = ()
) -> Decision:
    loads.note(Sent(ask, replica, keys))
    return Decision(replica, tuple(candidates), "unknown")
