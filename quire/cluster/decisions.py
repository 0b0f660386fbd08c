"""Decisions of a router: the last ones with their alternatives, and sums over all."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from quire.routing.router import Ask, Candidate, Decision, NoAffinity

NUM_KEPT = 1000


class Routed(NamedTuple):
    """A decision. Replicas are numbered by their places; `at_s` is of time.time().

    Of the prompt's `num_prompt_blocks` full blocks, the replica was believed to have `num_blocks`.
    """

    at_s: float
    request_id: str
    replica: int
    num_prompt_tokens: int
    num_prompt_blocks: int
    num_blocks: int
    no_affinity: NoAffinity
    candidates: tuple[Candidate, ...]


class DecisionLog:
    """The last decisions, and the sums of all: decisions by (replica, reason), and blocks of prompts."""

    def __init__(self) -> None:
        self.last: deque[Routed] = deque(maxlen=NUM_KEPT)
        self.num_by_reason: Counter[tuple[int, NoAffinity]] = Counter()
        self.num_prompt_blocks = 0
        self.num_matched_blocks = 0

    def add(self, ask: Ask, decision: Decision, numbers: Mapping[int, int]) -> None:
        """Note a decision. `numbers` are those of places, by the numbers that the router gave."""
        candidates = tuple(
            one._replace(replica=numbers[one.replica])
            for one in decision.candidates
            if one.replica in numbers
        )
        number = numbers[decision.replica]
        num_blocks = next((one.num_blocks for one in candidates if one.replica == number), 0)
        self.last.append(
            Routed(
                time.time(),
                ask.request_id,
                number,
                ask.num_prompt_tokens,
                len(ask.hashes),
                num_blocks,
                decision.no_affinity,
                candidates,
            )
        )
        self.num_by_reason[number, decision.no_affinity] += 1
        self.num_prompt_blocks += len(ask.hashes)
        self.num_matched_blocks += num_blocks
