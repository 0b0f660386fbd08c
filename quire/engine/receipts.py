"""The receipt of a sequence: where its time went, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Receipt:
    """Times of a sequence on the engine's clock, in seconds, and what other requests added to them.

    `RequestMetrics` defines the fields. A preemption lasts until the next token that the sequence computes
    after it: steps that were in flight then still count as its own.
    """

    admitted_s: float | None = None
    first_token_s: float | None = None
    num_preemptions: int = 0
    preempted_s: float = 0.0
    prefill_preempted_s: float = 0.0
    prefill_interference_s: float = 0.0
    decode_interference_s: float = 0.0
    grammar_s: float = 0.0
    cached_saved_s: float = 0.0
    ideal_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    drafting_saved_s: float = 0.0
    num_counted: int = 0  # leading positions that `ideal_s` covers: computing them again is not ideal
    preempted_since_s: float | None = None
    preempted_again: bool = False  # before a token had come
    awaits_token: bool = True  # the first one, or the next one after a preemption

    def preempt(self, now: float) -> None:
        """Note a preemption."""
        self.num_preemptions += 1
        self.awaits_token = True
        self.preempted_again = self.preempted_since_s is not None
        if not self.preempted_again:
            self.preempted_since_s = now

    def end_step_in_flight(self, now: float) -> None:
        """Note the end of a step that was in flight at the preemption."""
        if not self.preempted_again:
            self.preempted_since_s = now

    def take_token(self, now: float, running: bool) -> None:
        """Note a token. One of a sequence that is not `running` was in flight at its preemption."""
        if running or self.preempted_again:
            self.end_preemption(now)
        if self.first_token_s is None:
            self.first_token_s = now
        self.awaits_token, self.preempted_again = not running, False

    def inherit(self, leader: Receipt) -> None:
        """Take over what computing the shared prompt took."""
        self.prefill_interference_s = leader.prefill_interference_s
        self.decode_interference_s = leader.decode_interference_s
        self.ideal_s, self.num_counted = leader.ideal_s, leader.num_counted

    def end_preemption(self, now: float) -> None:
        """Note the end of a preemption, if there is one."""
        if self.preempted_since_s is not None:
            lasted_s, self.preempted_since_s = now - self.preempted_since_s, None
            self.preempted_s += lasted_s
            if self.first_token_s is None:
                self.prefill_preempted_s += lasted_s
