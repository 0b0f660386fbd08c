"""Limits of the time that the engine's process is waited for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How long the engine's process is waited for, in seconds, and how often it is started again.

    A step of a large model on a slow machine takes long: `stall_s` only turns health false, and true again
    when a step ends; `hang_s` ends a process that no step will ever leave, so that no stream hangs for ever.
    """

    stall_s: float = 10.0
    hang_s: float = 300.0
    first_delay_s: float = 0.5  # before a restart; doubled at each death within `window_s`
    longest_delay_s: float = 10.0
    window_s: float = 300.0
    max_deaths: int = 10  # within `window_s`: then it is left alone
    stop_s: float = 2.0

    def delay_s(self, num_deaths: int) -> float:
        """How long to wait after so many deaths within the window."""
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** (num_deaths - 1))
