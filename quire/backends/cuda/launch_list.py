"""The launches of a program while they are recorded: functions of a step, which fills them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.backends.cuda.accelerator import Constant, DeviceArray, Launch, Memory, RankExchange
from quire.backends.cuda.adapters import DeviceAdapters
from quire.backends.cuda.caches import LayerCache
from quire.backends.cuda.kernels.variant import row_block
from quire.backends.cuda.kernels.variants import DIMS
from quire.backends.cuda.segments import Segments
from quire.backends.cuda.states import LayerState
from quire.backends.cuda.step_arrays import StepArrays, Tiles
from quire.backends.cuda.weights import DeviceWeight
from quire.errors import ConfigError
from quire.program.passes import BufferPlan
from quire.program.program import Count, Program, Value, WeightSpec

if TYPE_CHECKING:
    from quire.backends.cuda.joined import ProductGroup

Record = Callable[[StepArrays], Launch | RankExchange]
Grid = tuple[int, int, int]
At = Callable[[StepArrays], DeviceArray]  # where an array is in a step
Arrays = Callable[[StepArrays], tuple[DeviceArray, ...]]  # the same of several

_NEIGHBOURS = 16  # tiles of rows that are computed beside each other, at most
_ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program as launches, the plan of its values, and the buffers of its logits and hidden states."""

    program: Program
    launches: Sequence[Record]
    plan: BufferPlan
    output: int
    hidden: int | None  # of a program that hands them out
    scratch_row_bytes: int
    adapters: DeviceAdapters
    tiles: Sequence[Tiles]


class LaunchList:
    """The launches so far, in order, and what they refer to: weights, caches, and the buffers of values."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, DeviceWeight],
        caches: Sequence[LayerCache | LayerState],
        plan: BufferPlan,
        block_size: int,
        memory: Memory,
        halves: bool = False,
    ) -> None:
        self.launches: list[Record] = []
        self.weights = weights
        self._caches = caches
        self.groups = program.layer_groups
        self.block_size = block_size
        self.halves = halves  # of keys and values of attention within a step
        self.segments = Segments(memory, block_size)
        self.adapters = DeviceAdapters(memory, program)
        self.none = memory.allocate(256).part(0, (1,), np.dtype(np.float32))  # for absent arguments
        # The value that was quantized last, how, and where it is in scratch memory.
        self.rounded: tuple[int, object, Callable[[StepArrays], tuple[DeviceArray, ...]]] | None = None
        self.joined: ProductGroup | None = None  # the products recorded last, if they may be launched as one
        self.num_exchanges = 0  # among ranks, so far
        self.tiles = dict[Tiles, None]()  # of tokens, that steps must bring
        self._buffer = plan.buffer
        self._memory = memory

    def add(
        self,
        kernel: str,
        grid: Callable[[StepArrays], Grid],
        args: Callable[[StepArrays], tuple[Any, ...]],
        **constants: Constant,
    ) -> None:
        """Add a launch."""
        self.launches.append(lambda step: Launch(kernel, grid(step), args(step), constants))

    def add_by_row(
        self,
        kernel: str,
        count: Count,
        width: int,
        args: Callable[[StepArrays], tuple[Any, ...]],
        **constants: Constant,
    ) -> None:
        """Add a kernel whose programs have a part each of the `width` numbers of a row."""
        block = row_block(width)
        across = -(-width // block)
        self.add(kernel, lambda step: (step.counts[count], across, 1), args, **constants, BLOCK=block)

    def at(self, value: Value) -> At:
        """Return where a value is in a step."""
        buffer = self._buffer[value.index]
        return lambda step: step.values[buffer]

    def tiled(self, count: Count, most: int, windows: bool = False) -> At:
        """Return where tiles of at most `most` tokens, each of one row, are in a step (row_tiles).

        Each is of one window with `windows`.
        """
        self.tiles[count, most, windows] = None
        return lambda step: step.tiles[count, most, windows]

    def paged(self, layer: int) -> LayerCache:
        """Return the cache of a layer that has blocks."""
        cache = self._caches[layer]
        if isinstance(cache, LayerState):
            raise TypeError(f"layer {layer} has a state")
        return cache

    def state(self, layer: int) -> LayerState:
        """Return the state of a layer that has one."""
        cache = self._caches[layer]
        if isinstance(cache, LayerCache):
            raise TypeError(f"layer {layer} has blocks")
        return cache

    def constant(self, values: np.ndarray) -> DeviceArray:
        """Return a copy of numbers on the accelerator."""
        array = self._memory.allocate(values.nbytes).part(0, values.shape, values.dtype)
        self._memory.write(array, values)
        return array

    def array(self, spec: WeightSpec | None) -> DeviceArray:
        """Return the only array of a weight of floats; any array for none."""
        return self.none if spec is None else self.weights[spec.name].arrays[0]


def product_grid(row_tiles: int, outputs: int, tile: Mapping[str, Constant]) -> Grid:
    """Return the grid of a product: groups of tiles of rows, equal ones, and in each all tiles of outputs.

    Programs start in order of the first number, then the second, then the third (kernels.tiles.row_tile).
    """
    groups = max(1, -(-row_tiles // _NEIGHBOURS))
    return -(-row_tiles // groups), -(-outputs // int(tile["BLOCK_N"])), groups


def padded_dim(*dims: int) -> int:
    """Return the size to which heads of these sizes are padded. Raises ConfigError if none is as large."""
    found = next((dim for dim in DIMS if dim >= max(dims)), None)
    if found is None:
        problem = f"the cuda backend has no kernels for heads of {max(dims)} numbers"
        raise ConfigError(problem, f"they have {DIMS[-1]} at most: use device='native'")
    return found


def activation_name(name: str) -> str:
    """Return the name of an activation in the kernels."""
    return _ACTIVATIONS.get(name, name)
