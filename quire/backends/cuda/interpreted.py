"""An accelerator without a GPU, for tests: launches run in Triton's interpreter, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import (
    ALIGNMENT,
    Argument,
    ByRank,
    Constant,
    DeviceArray,
    HostBuffer,
    Launch,
    OfRank,
    RankExchange,
    Upload,
    row_of,
)
from quire.backends.cuda.group import AcceleratorGroup
from quire.backends.cuda.kernels.product_variants import tiles_on
from quire.backends.cuda.kernels.variant import Variant
from quire.backends.cuda.kernels.variants import ALIGNED, MULTIPLE, variants
from quire.backends.cuda.manifest import launch_key
from quire.backends.host import available_memory
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Fetched:
    values: np.ndarray

    def result(self) -> np.ndarray:
        return self.values


class _Uploaded:
    def wait(self) -> None:
        """Do nothing: it was copied at once."""


@dataclass(frozen=True, slots=True)
class _Captured:
    accelerator: InterpretedAccelerator | InterpretedGroup
    launches: Sequence[Launch | RankExchange]

    def replay(self) -> None:
        for launch in self.launches:
            self.accelerator.launch(launch)


class InterpretedAccelerator:
    """Runs each launch at once, some milliseconds for a program of the grid. Needs Triton and NumPy alone.

    `num_bytes` counts what was allocated. `loaded` are the kernels that were launched, by their keys.
    """

    name = "cuda-interpreted"
    target = "interpreted"

    def __init__(self) -> None:
        try:
            self._interpreter: Any = import_module("quire.backends.cuda.interpreter")
        except ModuleNotFoundError as error:
            problem = "device = 'cuda-interpreted' is for tests, and needs Triton, which is not installed"
            raise ConfigError(problem, "run `make cuda`, or choose another device") from error
        self.num_bytes = 0
        self.loaded = set[str]()
        self.ranks, self.num_ranks = (self,), 1

    def on(self, rank: int, array: DeviceArray) -> DeviceArray:
        return array

    def in_words(self) -> str:
        return "Triton's interpreter, on the CPU"

    def free_bytes(self) -> int:
        return available_memory()

    def state(self) -> str:
        return ""

    def allocate(self, num_bytes: int) -> DeviceArray:
        self.num_bytes += num_bytes
        # What was never written is never to be read: 0xFF bytes are NaN in every format.
        buffer = np.full(num_bytes, 0xFF, np.uint8)
        return DeviceArray(buffer, np.dtype(np.uint8), (num_bytes,))

    def write(self, array: DeviceArray, values: np.ndarray) -> None:
        view_of(array)[...] = values.reshape(array.shape)

    def addresses(self, array: DeviceArray) -> tuple[int, ...]:
        return (int(view_of(array).ctypes.data),)

    def fetch(self, array: DeviceArray) -> _Fetched:
        return _Fetched(view_of(array).copy())

    def has_kernel(self, key: str) -> bool:
        """Return whether GPUs have it: the interpreter itself runs kernels with any constants."""
        return key in _compiled()

    def stage(self, num_bytes: int) -> HostBuffer:
        return HostBuffer(np.empty(num_bytes, np.uint8), None)

    def open_library(self) -> None:
        """Return None: there are kernels alone."""

    def upload(self, buffer: HostBuffer, array: DeviceArray) -> Upload:
        view_of(array.part(0, (array.num_bytes,), buffer.bytes.dtype))[...] = buffer.bytes[: array.num_bytes]
        return _Uploaded()

    def launch(self, launch: Launch | RankExchange) -> None:
        if isinstance(launch, Launch) and not launch.is_empty:
            self.loaded.add(key := launch_key(launch))
            kernel = _kernels()[launch.kernel]
            _require_multiples(kernel.arg_names, launch)
            args, constants = self._tiled(key, list(map(_argument, launch.args)), launch.constants)
            self._interpreter.run(kernel, launch.grid, args, constants)

    def capture(self, launches: Sequence[Launch | RankExchange], dependent: bool = True) -> _Captured:
        """See Accelerator.capture. Raises RuntimeError for a kernel that a GPU had to load meanwhile."""
        _require_loaded(launches, self.loaded)
        return _Captured(self, launches)

    def _tiled(
        self, key: str, args: list[Any], constants: Mapping[str, Constant]
    ) -> tuple[list[Any], Mapping[str, Constant]]:
        """Return arguments and constants of a launch as on GPUs that copy tiles by themselves."""
        variant = _compiled().get(key)
        if variant is None or not (tiles := tiles_on(variant, "sm_90")):
            return args, constants
        matrix, names = self._interpreter.tiled, zip(variant.types, args, strict=True)
        return [matrix(arg, tiles[n]) if n in tiles else arg for n, arg in names], {
            **constants,
            "TILED": True,
        }


class InterpretedGroup(AcceleratorGroup):
    """Interpreted accelerators as one: each launch is run for one rank after the other."""

    def __init__(self, number: int) -> None:
        self._interpreted = [InterpretedAccelerator() for _ in range(number)]
        super().__init__(self._interpreted)

    def capture(self, launches: Sequence[Launch | RankExchange], dependent: bool = True) -> _Captured:
        _require_loaded(launches, self._interpreted[0].loaded)
        return _Captured(self, launches)

    def _exchange(self, parts: DeviceArray) -> None:
        for source in range(len(self.ranks) if parts.num_bytes else 0):
            part = view_of(self.on(source, parts))[source]
            for rank in range(len(self.ranks)):
                view_of(self.on(rank, parts))[source] = part


def _require_loaded(launches: Sequence[Launch | RankExchange], loaded: set[str]) -> None:
    own = (launch for launch in launches if isinstance(launch, Launch) and not launch.is_empty)
    if missing := set(map(launch_key, own)) - loaded:
        raise RuntimeError(f"{min(missing)} was captured before it was launched")


def view_of(array: DeviceArray) -> np.ndarray:
    """Return the numbers of an array in the memory of this process."""
    found: np.ndarray = array.buffer[array.first_byte : array.first_byte + array.num_bytes]
    return found.view(array.dtype).reshape(array.shape)


def _argument(arg: Argument) -> np.ndarray | int | float:
    """Return an argument for the interpreter. Raises ValueError for an array that no cubin could be given."""
    if isinstance(arg, ByRank):
        return 0
    if isinstance(arg, OfRank):
        arg = row_of(0, arg)
    if not isinstance(arg, DeviceArray):
        return arg
    if arg.first_byte % ALIGNMENT:
        raise ValueError(f"a kernel takes arrays at multiples of {ALIGNMENT} bytes, not at {arg.first_byte}")
    return view_of(arg)


def _require_multiples(names: Sequence[str], launch: Launch) -> None:
    """Raise ValueError for a size that kernels take as a multiple of what it is not."""
    taken = [name for name in names if name not in launch.constants]  # those with defaults are the last
    for name, size in zip(taken, launch.args, strict=False):
        if name in ALIGNED and isinstance(size, int) and size % MULTIPLE:
            raise ValueError(f"{launch.kernel} takes {name} as a multiple of {MULTIPLE}, not {size}")


@cache
def _compiled() -> dict[str, Variant]:
    return {variant.key: variant for variant in variants()}


@cache
def _kernels() -> dict[str, Any]:
    """Return all kernels by name. They can be imported only after the interpreter."""
    from quire.backends.cuda.kernels import (
        adapters,
        attention,
        coded,
        coded_floats,
        coded_grouped,
        distances,
        elementwise,
        embedding,
        experts,
        grouped,
        images,
        joined,
        joined_coded,
        latent,
        logits,
        logprobs,
        norms,
        parts,
        products,
        quantized,
        quantizing,
        recurrences,
        rope_and_kv,
        sampling,
        segments,
        states,
        steps,
    )

    modules = (
        *(adapters, attention, coded, coded_grouped, elementwise, embedding, experts, grouped, latent),
        *(norms, products, quantized, rope_and_kv, segments, logits, logprobs, sampling, steps, states),
        *(coded_floats, distances, images, joined, joined_coded, parts, quantizing, recurrences),
    )
    return {name: thing for module in modules for name, thing in vars(module).items() if hasattr(thing, "fn")}
