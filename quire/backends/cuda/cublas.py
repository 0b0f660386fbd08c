"""cuBLAS, through nvmath-python. Only this module knows them.

None of it has run on a GPU yet: tests run it with nvmath-python on a pretended library
(tests/cuda/pretended_cublas.c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from nvmath import CudaDataType
from nvmath.bindings import cublasLt
from nvmath.bindings.cublas import ComputeType, Operation
from nvmath.bindings.cublasLt import MatmulDescAttribute, MatmulPreferenceAttribute, ReductionScheme

from quire.backends.cuda.accelerator import ALIGNMENT

WORKSPACE_BYTES = 32 << 20  # what algorithms for sm_90 take
_MOST_ALGORITHMS = 8  # asked for, of one shape
_FOUND = 0  # the state of an algorithm that can be used

Algorithm = np.ndarray  # [1], as the library describes it


class Cublas:
    """Products out = x weight^T of a GPU, the current one when this is made, row by row without gaps.

    x [rows, inputs] and weight [outputs, inputs] are bfloat16 and out [rows, outputs] float32, all at
    multiples of ALIGNMENT bytes. `workspace` is the address of WORKSPACE_BYTES on the GPU.
    """

    def __init__(self, workspace: int) -> None:
        self._workspace = workspace
        self._handle = cublasLt.create()
        # It has matrices by columns: out^T, outputs by rows, is the product of the weight, which it
        # transposes, and x^T.
        kind = int(ComputeType.COMPUTE_32F), int(CudaDataType.CUDA_R_32F)
        self._product = cublasLt.matmul_desc_create(*kind)
        transposed = MatmulDescAttribute.TRANSA, np.int32(Operation.T)
        _set(cublasLt.matmul_desc_set_attribute, self._product, *transposed)
        self._limits = cublasLt.matmul_preference_create()
        names = MatmulPreferenceAttribute
        limits: dict[MatmulPreferenceAttribute, np.generic] = {
            names.MAX_WORKSPACE_BYTES: np.uint64(WORKSPACE_BYTES),
            # Inputs are not divided among sums that are added later.
            names.REDUCTION_SCHEME_MASK: np.uint32(ReductionScheme.NONE),
            **{
                name: np.uint32(ALIGNMENT)
                for name in (
                    names.MIN_ALIGNMENT_A_BYTES,
                    names.MIN_ALIGNMENT_B_BYTES,
                    names.MIN_ALIGNMENT_C_BYTES,
                    names.MIN_ALIGNMENT_D_BYTES,
                )
            },
        }
        for name, value in limits.items():
            _set(cublasLt.matmul_preference_set_attribute, self._limits, name, value)
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    @property
    def name(self) -> str:
        """Name and version of the library: "cuBLAS 13.1.0"."""
        version = cublasLt.get_version()  # 130100
        return f"cuBLAS {version // 10_000}.{version // 100 % 100}.{version % 100}"

    def algorithms(self, rows: int, outputs: int, inputs: int) -> list[Algorithm]:
        """Return algorithms for a shape, and for others with as many outputs and inputs; fastest first."""
        found = np.zeros(_MOST_ALGORITHMS, cublasLt.matmul_heuristic_result_dtype)
        count = np.zeros(1, np.int32)
        with _layouts(rows, outputs, inputs) as (weight, x, out):
            matrices = weight, x, out, out
            arrays = found.ctypes.data, count.ctypes.data
            asked = self._limits, _MOST_ALGORITHMS
            cublasLt.matmul_algo_get_heuristic(self._handle, self._product, *matrices, *asked, *arrays)
        usable = np.flatnonzero(found["state"][: count[0]] == _FOUND)
        return [found["algo"][i : i + 1].copy() for i in usable]

    def multiply(
        self, algorithm: Algorithm, out: int, x: int, weight: int, sizes: tuple[int, int, int], stream: int
    ) -> None:
        """Compute a product in a stream: `out`, `x` and `weight` are addresses; rows, outputs, inputs."""
        with _layouts(*sizes) as (of_weight, of_x, of_out):
            cublasLt.matmul(
                self._handle,
                self._product,
                self._one.ctypes.data,
                *(weight, of_weight, x, of_x),
                self._zero.ctypes.data,
                *(out, of_out, out, of_out),
                algorithm.ctypes.data,
                self._workspace,
                WORKSPACE_BYTES,
                stream,
            )


@contextmanager
def _layouts(rows: int, outputs: int, inputs: int) -> Iterator[tuple[int, int, int]]:
    """Yield how weight, x and out lie in memory, by columns: a row is one of their columns."""
    bfloat16, float32 = int(CudaDataType.CUDA_R_16BF), int(CudaDataType.CUDA_R_32F)
    kinds = (bfloat16, inputs, outputs), (bfloat16, inputs, rows), (float32, outputs, rows)
    made = [cublasLt.matrix_layout_create(kind, width, number, width) for kind, width, number in kinds]
    try:
        yield made[0], made[1], made[2]
    finally:
        for layout in made:
            cublasLt.matrix_layout_destroy(layout)


def _set(function: Callable[..., Any], what: int, name: int, value: np.generic) -> None:
    """Set an attribute, whose value is read from memory."""
    kept = np.array([value])
    function(what, int(name), kept.ctypes.data, kept.nbytes)
