"""cuBLAS without a GPU: nvmath-python on a library (pretended_cublas.c) whose products are computed here."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from pretended_gpu import compiled

from quire.backends.cuda import interpreter
from quire.backends.cuda.interpreted import _kernels
from quire.backends.cuda.interpreter import Pointer
from quire.backends.cuda.kernels.product_variants import PRECISIONS, product_tile
from quire.backends.cuda.launch_list import product_grid
from quire.quantize.kinds import DTYPES

MANY_ROWS = 512
_Words = ctypes.POINTER(ctypes.c_uint64)
_Multiply = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _Words, _Words)


class PretendedProducts:
    """The products that cuBLAS was asked for, each by one of three algorithms.

    The first adds the inputs in another order than the kernel, the second does if there are many rows. So
    does the third unless it `is_exact`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.asked: list[tuple[int, ...]] = []  # the algorithm, rows, outputs, inputs
        self.is_exact = True
        self.errors: list[Exception] = []
        self.library = library
        self._multiply = _Multiply(self._compute)
        library.pretended_products(self._multiply)

    def _compute(self, algorithm: int, addresses: Any, sizes: Any) -> int:
        rows, outputs, inputs = sizes[:3]
        self.asked.append((algorithm, rows, outputs, inputs))
        try:
            if (algorithm == 1 and rows < MANY_ROWS) or (algorithm == 2 and self.is_exact):
                self._by_the_kernel(addresses[:3], rows, outputs, inputs)
            else:
                x = _at(addresses[1], (rows, inputs), "bf16").astype(np.float32)
                weight = _at(addresses[2], (outputs, inputs), "bf16").astype(np.float32)
                halves = (
                    x[:, own] @ weight[:, own].T for own in (slice(inputs // 2, None), slice(inputs // 2))
                )
                _at(addresses[0], (rows, outputs), "f32")[...] = sum(halves)
        except Exception as error:  # the caller, in C, cannot raise it
            self.errors.append(error)
        return 0

    @staticmethod
    def _by_the_kernel(addresses: list[int], rows: int, outputs: int, inputs: int) -> None:
        out, x, weight = map(Pointer, addresses, ("float32", "bfloat16", "bfloat16"))
        tile = product_tile(rows, outputs, "bf16")
        grid = product_grid(-(-rows // tile["BLOCK_M"]), outputs, tile)
        how = {"PRECISION": PRECISIONS["bf16"], "BIAS": False, **tile}
        interpreter.run(_kernels()["product"], grid, (out, x, weight, out, rows, outputs, inputs), how)


def _at(address: int, shape: tuple[int, ...], format: str) -> np.ndarray:
    """Return the numbers at an address."""
    dtype = DTYPES[format]
    return (
        np.ctypeslib.as_array((ctypes.c_uint8 * (dtype.itemsize * shape[0] * shape[1])).from_address(address))
        .view(dtype)
        .reshape(shape)
    )


def pretend_cublas(folder: Path) -> PretendedProducts:
    """Let this process, which has pretended GPUs, find cuBLAS; the folder has none yet."""
    return PretendedProducts(compiled(folder, "pretended_cublas.c", "libcublasLt.so.13"))
