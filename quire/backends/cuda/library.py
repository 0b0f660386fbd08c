"""Large products that cuBLAS computes instead of a kernel: those in whose shape it has the kernel's bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, DeviceArray, Launch
from quire.backends.cuda.faults import first_line, is_of_driver
from quire.backends.cuda.graphs import MOST_ROWS
from quire.backends.cuda.products import float_product, is_narrow
from quire.backends.cuda.weights import DeviceWeight
from quire.program import ops
from quire.program.program import Program
from quire.quantize.kinds import DTYPES

if TYPE_CHECKING:
    from quire.backends.cuda.cublas import Algorithm, Cublas
    from quire.backends.cuda.driver import Gpu

_LOG = logging.getLogger(__name__)
LEAST_ROWS = MOST_ROWS + 1  # of a product: steps with graphs launch kernels
TRIED_ROWS = (LEAST_ROWS, 1024)  # of products that are compared
_RANDOM = 1_000_003  # different numbers of their activations
_BFLOAT16, _FLOAT32 = DTYPES["bf16"], np.dtype(np.float32)


class Library:
    """cuBLAS for one GPU, and its algorithms for the shapes (outputs, inputs) that were proved."""

    def __init__(self, gpu: Gpu, cublas: Cublas, workspace: DeviceArray) -> None:
        self.name = cublas.name
        self._gpu, self._cublas, self._workspace = gpu, cublas, workspace
        self._proved: dict[tuple[int, int], Algorithm] = {}

    def prove(self, products: Sequence[Launch]) -> bool:
        """Compare cuBLAS with the kernel in products of one shape, of few rows and of many.

        Return whether one of its algorithms, of which the fastest is kept, has equal bits in all of them.
        """
        found = [_sizes(launch) for launch in products]
        sizes = [one for one in found if one is not None]
        if len(sizes) < len(products):
            raise ValueError("only large products of bfloat16 without a bias can be compared")
        rows, *shape = sizes[-1]
        self._proved.pop((shape[0], shape[1]), None)
        wanted = [self._bits(launch, partial(self._gpu.launch, launch)) for launch in products]
        for algorithm in self._cublas.algorithms(rows, *shape):
            if all(
                self._bits(launch, partial(self._multiply, algorithm, launch, size)) == bits
                for launch, size, bits in zip(products, sizes, wanted, strict=True)
            ):
                self._proved[shape[0], shape[1]] = algorithm
                return True
        return False

    def computes(self, launch: Launch) -> bool:
        """Compute a launch, if it is a product of a shape that was proved; return whether it was."""
        sizes = _sizes(launch)
        algorithm = None if sizes is None else self._proved.get(sizes[1:])
        if sizes is None or algorithm is None:
            return False
        self._multiply(algorithm, launch, sizes)
        return True

    def _multiply(self, algorithm: Algorithm, launch: Launch, sizes: tuple[int, int, int]) -> None:
        arrays = (arg for arg in launch.args if isinstance(arg, DeviceArray))
        out, x, weight, *_ = (self._gpu.addresses(array)[0] for array in arrays)
        self._cublas.multiply(algorithm, out, x, weight, sizes, int(self._gpu.stream.handle))

    def _bits(self, launch: Launch, compute: Callable[[], None]) -> bytes:
        """Return what a product writes."""
        out = launch.args[0]
        if not isinstance(out, DeviceArray):
            raise TypeError(f"{out} is not an array")
        self._gpu.write(out, np.full(out.shape, np.nan, np.float32))
        compute()
        return self._gpu.fetch(out).result().tobytes()


def _sizes(launch: Launch) -> tuple[int, int, int] | None:
    """Return rows, outputs and inputs of a product that the library can compute, None for other launches."""
    if launch.kernel != "product" or launch.constants["BIAS"]:
        return None
    _, x, *_ = (arg for arg in launch.args if isinstance(arg, DeviceArray))
    rows, outputs, inputs = (arg for arg in launch.args if isinstance(arg, int))
    return (rows, outputs, inputs) if x.dtype == _BFLOAT16 and rows >= LEAST_ROWS else None


def open_library(gpu: Gpu) -> Library | None:
    """Return cuBLAS for the current GPU, None where it is not installed or cannot be loaded."""
    if find_spec("nvmath") is None:
        return None
    try:
        from quire.backends.cuda.cublas import WORKSPACE_BYTES, Cublas

        workspace = gpu.allocate(WORKSPACE_BYTES)
        return Library(gpu, Cublas(gpu.addresses(workspace)[0]), workspace)
    except Exception as error:
        if not is_of_driver(error):
            raise
        _LOG.warning("cuBLAS is not used: %s (pip install 'quire[cublas]' installs it)", first_line(error))
        return None


Model = tuple[Program, Mapping[str, DeviceWeight]]


def prove_products(models: Sequence[Model], accelerator: Accelerator) -> str:
    """Let cuBLAS, where it is installed, compute the large products of programs in which it has equal bits.

    Each GPU compares it with the kernel, with one weight of each shape. Return in words what was found, ""
    if nothing was compared.
    """
    shapes: dict[tuple[int, ...], DeviceWeight] = {}
    for program, weights in models:
        for op in program:
            if isinstance(op, ops.Linear) and op.bias is None and op.x.count == "T":
                weight = weights[op.weight.name]
                if weight.format == "bf16" and not is_narrow(op.weight):
                    shapes.setdefault(op.weight.shape, weight)
    if not shapes:
        return ""
    proved, most, name = list[bool](), TRIED_ROWS[-1], ""
    some = np.random.default_rng(0).standard_normal(_RANDOM).astype(_BFLOAT16)
    for number, rank in enumerate(accelerator.ranks):
        if (library := rank.open_library()) is None:
            return ""
        none, name = rank.allocate(256).part(0, (1,), _FLOAT32), library.name
        outputs, inputs = map(max, zip(*shapes, strict=True))
        out, x = (rank.allocate(most * width * size) for width, size in ((outputs, 4), (inputs, 2)))
        for (outputs, inputs), weight in shapes.items():
            rows = x.part(0, (most, inputs), _BFLOAT16)
            rank.write(rows, np.resize(some, rows.shape))
            sums, matrix = out.part(0, (most, outputs), _FLOAT32), accelerator.on(number, weight.arrays[0])
            products = [float_product(sums.rows(0, n), rows.rows(0, n), matrix, none) for n in TRIED_ROWS]
            proved.append(library.prove(products))
    return f"{name} in {sum(proved)} of {len(proved)} shapes, from {LEAST_ROWS} rows on; else kernels"
