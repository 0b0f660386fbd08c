"""The virtual clock: seconds that pass only when the simulation says so."""

from __future__ import annotations


class VirtualClock:
    """The time of a simulation, from 0. It is the clock of the simulated engine, and never goes back."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def read(self) -> float:
        """Return the time, in the form that Engine takes."""
        return self.now_s

    def advance_to(self, at_s: float) -> None:
        """Let time pass until a moment; one that has passed changes nothing."""
        self.now_s = max(self.now_s, at_s)
