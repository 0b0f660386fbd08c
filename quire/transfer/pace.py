"""Prediction of the time that fetches from a disk take, from those before."""

from __future__ import annotations

BLOCK_S = 40e-6  # of a block, whatever its size: to find, verify and hand it over
BYTE_S = 1e-9
START_S = 0.5e-3  # until a fetch begins
_RECOVERY = 0.3  # weight of a faster fetch; a slower one counts in full


class Pace:
    """The factor by which fetches are slower than the constants of this file say.

    A slower fetch raises it at once and faster ones lower it little by little, since a fetch that was chosen
    wrongly costs more than one that was not chosen. `known` is False until something was measured.
    """

    def __init__(self) -> None:
        self.known = False
        self._factor = 8.0  # that of a disk of 125 MB/s

    def predict(self, num_blocks: int, num_bytes: int) -> float:
        """Return the predicted time of a fetch, in seconds."""
        return self._factor * _work(num_blocks, num_bytes)

    def learn(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        """Take a measured time."""
        factor = seconds / _work(num_blocks, num_bytes)
        if self.known and factor < self._factor:
            factor = self._factor + _RECOVERY * (factor - self._factor)
        self._factor, self.known = factor, True


def _work(num_blocks: int, num_bytes: int) -> float:
    return START_S + num_blocks * BLOCK_S + num_bytes * BYTE_S
