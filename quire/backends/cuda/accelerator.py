"""The Accelerator protocol: memory, and launches of kernels in the order in which they are asked for.

There are two: a GPU (driver.py), and Triton's interpreter on the CPU (interpreted.py), on which everything
but speed and the order of sums within a tile is tested. Several of either are one as well (group.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np

from quire.errors import QuireError

Constant = int | float | bool | str
ALIGNMENT = 16  # bytes: kernels are compiled for arrays that begin at multiples of it


@dataclass(slots=True, eq=False)
class DeviceArray:
    """Numbers in the memory of an accelerator, contiguous, from `first_byte` of a buffer on.

    `buffer` is what it allocated: an object of the driver, or a NumPy array of bytes where kernels
    are interpreted; of a group a tuple of those of its ranks. Nobody changes one; a frozen class would take
    twice as long for the hundreds that a step makes.
    """

    buffer: Any
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    first_byte: int = 0

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def part(self, first: int, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> DeviceArray:
        """Return `shape` numbers from byte `first` of this array on, of another type if one is given."""
        found = DeviceArray(self.buffer, dtype or self.dtype, shape, self.first_byte + first)
        if first < 0 or first + found.num_bytes > self.num_bytes:
            raise ValueError(
                f"{found.num_bytes} bytes from byte {first} on leave an array of {self.num_bytes}"
            )
        return found

    def rows(self, first: int, count: int) -> DeviceArray:
        """Return `count` rows (of the first axis) from row `first` on."""
        row = prod(self.shape[1:]) * self.dtype.itemsize
        return self.part(first * row, (count, *self.shape[1:]))


@dataclass(frozen=True, slots=True)
class ByRank:
    """An integer argument that is `factor` times the number of the rank: 0 on a single accelerator."""

    factor: int


@dataclass(frozen=True, slots=True)
class OfRank:
    """The row of an array that is that of the rank."""

    rows: DeviceArray


Argument = DeviceArray | int | float | ByRank | OfRank


def row_of(rank: int, arg: OfRank) -> DeviceArray:
    """Return the row of a rank."""
    return arg.rows.part(rank * arg.rows.rows(0, 1).num_bytes, arg.rows.shape[1:])


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel: the name of its function in `kernels/`, its grid, arguments and constants.

    `args` are the parameters that are not constexpr, in the order of the function: arrays are pointers to
    numbers of their type, integers are i32, floats fp32. `constants` are all constexpr parameters, by name.
    So a cubin is found by the name, the types of the arguments and the constants.
    """

    kernel: str
    grid: tuple[int, int, int]
    args: tuple[Argument, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if no program is in its grid."""
        return 0 in self.grid


@dataclass(frozen=True, slots=True)
class RankExchange:
    """Give all ranks of a group what each has: row r of `parts` [ranks, bytes] is copied from rank r.

    No rank goes on before all have come here, also for an empty array.
    """

    parts: DeviceArray


def in_graph(
    launches: Sequence[Launch | RankExchange], dependent: bool
) -> Iterator[tuple[Launch | RankExchange, bool]]:
    """Yield what does something, and whether it is a dependent launch: one behind another launch."""
    behind = False
    for launch in launches:
        if isinstance(launch, RankExchange):
            yield launch, False
            behind = False
        elif not launch.is_empty:
            yield launch, behind and dependent
            behind = True


class DeviceFault(QuireError):
    """An accelerator did not do what it was asked for. `works`: it still does other things.

    Else whatever was in its memory is lost to this process.
    """

    def __init__(self, message: str, hint: str | None = None, works: bool = False) -> None:
        super().__init__(message, hint)
        self.works = works


class HostCopy(Protocol):
    """A copy to the host that was begun."""

    def result(self) -> np.ndarray:
        """Wait for the copy and return the numbers."""
        ...


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Memory of the host that an accelerator copies from: `bytes` [n] uint8, in memory of `owner`."""

    bytes: np.ndarray
    owner: Any


class Upload(Protocol):
    """A copy from a host buffer that was begun."""

    def wait(self) -> None:
        """Wait for its end: the buffer may then be written again."""
        ...


class Graph(Protocol):
    """Launches that were captured."""

    def replay(self) -> None:
        """Launch all of them again, with the same arguments, on what is in their arrays by then."""
        ...


class Memory(Protocol):
    """Memory of an accelerator, in which programs are laid out and steps put: that of each of its ranks."""

    num_ranks: int

    def allocate(self, num_bytes: int) -> DeviceArray:
        """Return so many bytes (uint8), with any content, at an address that is a multiple of 256.

        Raises DeviceFault if there is not as much.
        """
        ...

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        """Replace the numbers of an array by as many of its type. `values` may change after the call."""
        ...

    def addresses(self, array: DeviceArray) -> tuple[int, ...]:
        """Return where an array begins on each rank, for kernels that read addresses from tables."""
        ...


class Accelerator(Memory, Protocol):
    """One GPU, or what stands for one. Launches and copies happen in the order of the calls.

    `name` is what configurations call it, "cuda:0"; `target` for what its kernels were compiled, "sm_90". It
    has one rank, itself, or is a group of several.
    Whatever fails on it raises DeviceFault, also later, when somebody waits.
    """

    name: str
    target: str

    @property
    def ranks(self) -> Sequence[Rank]:
        """The accelerators that compute every launch side by side: those of a group, or only this one."""
        ...

    def on(self, rank: int, array: DeviceArray) -> DeviceArray:
        """Return an array as it is in the memory of a rank."""
        ...

    def in_words(self) -> str:
        """Return a readable description: "NVIDIA H200, sm_90"."""
        ...

    def free_bytes(self) -> int:
        """Return the memory that nobody uses."""
        ...

    def state(self) -> str:
        """Return temperature and clocks in words, "" if they are unknown."""
        ...

    def fetch(self, array: DeviceArray) -> HostCopy:
        """Begin to copy an array, as the launches before this call leave it, to the host."""
        ...

    def has_kernel(self, key: str) -> bool:
        """Return whether the kernel of this name (manifest.launch_key) was compiled."""
        ...

    def launch(self, launch: Launch | RankExchange) -> None:
        """Launch a kernel, unless its grid is empty. Raises ConfigError for one that was not compiled.

        A single accelerator has nothing to exchange.
        """
        ...

    def capture(self, launches: Sequence[Launch | RankExchange], dependent: bool = True) -> Graph:
        """Return launches as one, without launching them. Each of their kernels was launched before.

        With `dependent`, a GPU may prepare a launch while the one before it ends; it reads and writes nothing
        before that one has ended. Results are the same.
        """
        ...


class ProductLibrary(Protocol):
    """Another implementation of products, which computes launches where its bits are those of the kernel."""

    name: str

    def prove(self, products: Sequence[Launch]) -> bool:
        """Compare products of one shape; return whether bits are equal, so that it computes the shape."""
        ...


class Rank(Accelerator, Protocol):
    """A single accelerator, to which weights are uploaded."""

    def open_library(self) -> ProductLibrary | None:
        """Return the library of products of this accelerator, if it has one."""
        ...

    def stage(self, num_bytes: int) -> HostBuffer:
        """Return memory of the host for uploads, pinned on a GPU. Raises DeviceFault if there is none."""
        ...

    def upload(self, buffer: HostBuffer, array: DeviceArray) -> Upload:
        """Begin to copy the first bytes of a buffer to an array, as many as it has."""
        ...
