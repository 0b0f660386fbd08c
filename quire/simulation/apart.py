"""Prefill apart from decode: which replicas compute prompts, and how long the blocks of a prompt travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.simulation.replica import Replica
from quire.types import NewRequest, Output

LEAST_PROMPT = 512  # tokens: shorter prompts are computed where they are answered, as quire/cluster/split.py
GBIT_PER_S, LATENCY_S = 10.0, 1e-3


@dataclass(frozen=True, slots=True)
class Apart:
    """The first `num_prefill` replicas compute prompts and one token, the others go on from there.

    Blocks of a prompt, `token_bytes` for each token, move at `bytes_per_s`; a replica sends or receives those
    of one prompt at a time.
    """

    num_prefill: int
    token_bytes: float
    bytes_per_s: float = GBIT_PER_S * 1e9 / 8
    latency_s: float = LATENCY_S

    def is_sent(self, new: NewRequest) -> bool:
        """Return True if another replica computes the prompt of a request than the one that answers it."""
        return len(new.prompt_token_ids) >= LEAST_PROMPT and (new.params.max_tokens or 0) > 1

    def move(self, new: NewRequest, source: Replica, target: Replica, now_s: float) -> float:
        """Let the blocks of a prompt travel as soon as both ends are free; return when they are there."""
        begin_s = max(now_s, source.link_free_s, target.link_free_s)
        end_s = begin_s + len(new.prompt_token_ids) * self.token_bytes / self.bytes_per_s
        source.link_free_s = target.link_free_s = end_s
        return end_s + self.latency_s


def first_token_of(new: NewRequest) -> NewRequest:
    """Return a request for the first token only."""
    return replace(new, params=replace(new.params, max_tokens=1))


def going_on(outputs: Sequence[Output]) -> list[Output]:
    """Return outputs of first tokens as those of requests that go on."""
    return [one._replace(finish_reason=None) if one.finish_reason == "length" else one for one in outputs]


def load_prompt(replica: Replica, new: NewRequest) -> None:
    """Put the full blocks of a prompt into the caches of a replica, as far as there is room."""
    scheduler = replica.engine.scheduler
    groups = range(len(scheduler.caches.groups))
    scheduler.load(new, 0, [groups] * (len(new.prompt_token_ids) // scheduler.block_size))
