"""Rates of an accelerator, measured by its own kernels: products for arithmetic, a scaling for memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, Argument, DeviceArray, Launch
from quire.backends.cuda.kernels.product_variants import quantized_tile
from quire.backends.cuda.kernels.variant import row_block
from quire.backends.cuda.launch_list import product_grid
from quire.backends.cuda.packing import packed_shapes
from quire.backends.cuda.products import float_product
from quire.backends.cuda.rounding import quantized_row
from quire.program.numerics import SPAN
from quire.quantize.kinds import DTYPES

MEMORY_BYTES = 1 << 30  # read in a pass, far more than any cache
SIZE = 8192  # rows, inputs and outputs of the products
_LAUNCHES = 4  # waited for together
_FLOAT = np.dtype(np.float32)


class CudaLoops:
    """Loops of an accelerator. It has no threads of which one could measure fewer.

    Rates are those of these kernels, which may be below the peak of the device; of a group those of all.
    """

    threads = 1

    def __init__(
        self, accelerator: Accelerator, kernels: str, size: int = SIZE, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self.machine = accelerator.in_words()
        self.isa = f"{accelerator.target}-{kernels}"
        self.levels: Mapping[str, int] | None = {"memory": memory_bytes}
        self._accelerator, self._num_ranks = accelerator, accelerator.num_ranks
        self._size = size

    def operations(self, kind: str, seconds: float) -> float:
        """Return operations per second of large products of int8, or of weights in bfloat16 or float32."""
        size = self._size if kind != "f32" else self._size // 4  # without tensor cores
        launch = self._integers(size) if kind == "int8" else self._floats(kind, size)
        return self._num_ranks * 2.0 * size**3 / self._seconds(launch, seconds)

    def read_bytes(self, threads: int, nbytes: int, seconds: float) -> float:
        """Return bytes per second read and written of so many bytes in all."""
        width = 4096
        rows, block = max(1, nbytes // (8 * width)), row_block(width)
        arrays = [self._array(_some((rows, width), _FLOAT)) for _ in range(2)]
        launch = Launch("scale", (rows, -(-width // block), 1), (*arrays, width, 1.0), {"BLOCK": block})
        return self._num_ranks * 8.0 * rows * width / self._seconds(launch, seconds)

    def _floats(self, kind: str, size: int) -> Launch:
        own = DTYPES["bf16"] if kind == "bf16" else _FLOAT  # of rows of large products
        x, weight = (self._array(_some((size, size), dtype)) for dtype in (own, DTYPES[kind]))
        out, none = self._empty((size, size), _FLOAT), self._empty((64,), _FLOAT)
        return float_product(out, x, weight, none)

    def _integers(self, size: int) -> Launch:
        spans = size // SPAN
        weight = [self._array(_some(*part)) for part in packed_shapes("int8", (size, size))]
        rows = [self._array(_some((size, width), kind)) for width, kind in quantized_row(size)]
        out, none = self._empty((size, size), _FLOAT), self._empty((64,), _FLOAT)
        tile = quantized_tile(size, size)
        how = {"KIND": "int8", "BIAS": False, **tile}
        args: tuple[Argument, ...] = (out, *rows, *weight, none, size, size, spans)
        grid = product_grid(-(-size // int(tile["BLOCK_M"])), size, tile)
        return Launch("quantized_product", grid, args, how)

    def _seconds(self, launch: Launch, seconds: float) -> float:
        """Return the least seconds of a launch, of several in about so many seconds."""
        least, began_s = float("inf"), time.perf_counter()
        self._accelerator.launch(launch)
        marker = self._empty((64,), _FLOAT)
        self._accelerator.fetch(marker).result()
        while time.perf_counter() - began_s < seconds or least == float("inf"):
            start_s = time.perf_counter()
            for _ in range(_LAUNCHES):
                self._accelerator.launch(launch)
            self._accelerator.fetch(marker).result()
            least = min(least, (time.perf_counter() - start_s) / _LAUNCHES)
        return least

    def _array(self, values: np.ndarray) -> DeviceArray:
        found = self._empty(values.shape, values.dtype)
        self._accelerator.write(found, values)
        return found

    def _empty(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> DeviceArray:
        return self._accelerator.allocate(prod(shape) * kind.itemsize).part(0, shape, kind)


def _some(shape: tuple[int, ...], kind: np.dtype[Any]) -> np.ndarray:
    """Return numbers that differ, as those of models do: equal ones take less power, and so more clocks."""
    numbers = np.random.default_rng(0).integers(-100, 101, min(prod(shape), 1_000_003))
    return np.resize(numbers.astype(kind), shape)
