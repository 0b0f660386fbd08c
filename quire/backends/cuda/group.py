"""Several accelerators as one: each computes its part of every step by the same launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quire.backends.cuda.accelerator import (
    Argument,
    ByRank,
    DeviceArray,
    Graph,
    HostCopy,
    Launch,
    OfRank,
    Rank,
    RankExchange,
    row_of,
)


class AcceleratorGroup(ABC):
    """Accelerators of one kind, its `ranks`. An array has as many bytes in the memory of each.

    What is written is written to all, and what is launched is launched on all, with the arrays of each: so
    whatever is computed from equal numbers is equal on all ranks, and it is that of the first that is
    fetched. Ranks differ in what `Accelerator.on` names, in arguments by rank, and in what they exchange.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks, self.num_ranks = tuple(ranks), len(ranks)
        self.name, self.target = self.ranks[0].name, self.ranks[0].target

    def on(self, rank: int, array: DeviceArray) -> DeviceArray:
        return replace(array, buffer=array.buffer[rank])

    def in_words(self) -> str:
        return f"{len(self.ranks)} x {self.ranks[0].in_words()}"

    def free_bytes(self) -> int:
        return min(rank.free_bytes() for rank in self.ranks)

    def state(self) -> str:
        return "; ".join(filter(None, (rank.state() for rank in self.ranks)))

    def allocate(self, num_bytes: int) -> DeviceArray:
        arrays = [rank.allocate(num_bytes) for rank in self.ranks]
        return replace(arrays[0], buffer=tuple(array.buffer for array in arrays))

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        for number, rank in enumerate(self.ranks):
            rank.write(self.on(number, array), values)

    def addresses(self, array: DeviceArray) -> tuple[int, ...]:
        return tuple(
            address for i, rank in enumerate(self.ranks) for address in rank.addresses(self.on(i, array))
        )

    def fetch(self, array: DeviceArray) -> HostCopy:
        return self.ranks[0].fetch(self.on(0, array))

    def has_kernel(self, key: str) -> bool:
        return self.ranks[0].has_kernel(key)

    def launch(self, launch: Launch | RankExchange) -> None:
        if isinstance(launch, RankExchange):
            self._exchange(launch.parts)
            return
        for number, rank in enumerate(self.ranks):
            rank.launch(self.of_rank(number, launch))

    def of_rank(self, rank: int, launch: Launch) -> Launch:
        """Return a launch with the arguments of a rank."""

        def own(arg: Argument) -> Argument:
            if isinstance(arg, DeviceArray):
                return self.on(rank, arg)
            if isinstance(arg, OfRank):
                return self.on(rank, row_of(rank, arg))
            return arg.factor * rank if isinstance(arg, ByRank) else arg

        return replace(launch, args=tuple(map(own, launch.args)))

    @abstractmethod
    def capture(self, launches: Sequence[Launch | RankExchange], dependent: bool = True) -> Graph:
        """See Accelerator.capture."""

    @abstractmethod
    def _exchange(self, parts: DeviceArray) -> None:
        """See RankExchange."""
