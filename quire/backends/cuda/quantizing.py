"""Weights that are rounded to integers on the accelerator while they are loaded."""

from __future__ import annotations

import numpy as np

from quire.backends.cuda.accelerator import Accelerator, DeviceArray, HostCopy, Launch
from quire.backends.cuda.kernels.product_variants import QUANTIZED_BLOCK
from quire.backends.cuda.kernels.variant import ROW_BLOCKS
from quire.backends.cuda.uploads import UploadRing
from quire.errors import ConfigError, quoted
from quire.program.program import WeightSpec
from quire.quantize.groups import ceil_div
from quire.quantize.kinds import Array
from quire.weights.plan import WeightPlan

STAGED_BYTES = 64 << 20  # of floats that are on the accelerator at once
_BITS = {"int8": 8, "int4": 4}


def is_rounded(plan: WeightPlan, name: str) -> bool:
    """Return whether a weight is rounded from floats while it is loaded."""
    return plan.storage[name].kind in _BITS and plan.stored[name].is_float


class Quantizer:
    """Rounds weights on an accelerator, whose `ring` copies their floats to it, part by part."""

    def __init__(self, accelerator: Accelerator, ring: UploadRing) -> None:
        self._accelerator, self._ring = accelerator, ring
        self._staged: DeviceArray | None = None
        self._channels: list[tuple[WeightSpec, HostCopy]] = []

    def put(self, spec: WeightSpec, floats: Array, kind: str, arrays: tuple[DeviceArray, ...]) -> None:
        """Round [out, in] or [experts, out, in] to the arrays of a packed weight, which `spec` names."""
        outputs, width = floats.shape[-2:]
        height = max(1, min(outputs, STAGED_BYTES // max(1, width * floats.itemsize)))
        for number, matrix in enumerate(floats.reshape(-1, outputs, width) if floats.ndim < 3 else floats):
            for start in range(0, outputs, height):
                rows = matrix[start : start + height]
                staged = self._stage(rows)
                self._ring.put(staged, rows)
                self._ring.flush()
                self._round(staged, number * outputs + start, outputs, _BITS[kind], arrays)
        self._channels.append((spec, self._accelerator.fetch(arrays[2])))

    def _stage(self, rows: Array) -> DeviceArray:
        """Return a place for rows; what is there is read by launches before."""
        if self._staged is None or self._staged.num_bytes < rows.nbytes:
            self._staged = self._accelerator.allocate(max(rows.nbytes, 1))
        return self._staged.part(0, rows.shape, rows.dtype)

    def _round(
        self, staged: DeviceArray, first: int, outputs: int, bits: int, arrays: tuple[DeviceArray, ...]
    ) -> None:
        (rows, width), (values, scales, channels) = staged.shape, arrays
        spans = scales.shape[-2] // 4
        pieces = rows * spans * (4 if bits == 8 else 2)
        args = (channels, staged, first, width)
        self._accelerator.launch(
            Launch("scale_channels", (rows, 1, 1), args, {"BITS": bits, "BLOCK": ROW_BLOCKS[1]})
        )
        self._accelerator.launch(
            Launch(
                "round_groups",
                (ceil_div(pieces, QUANTIZED_BLOCK), 1, 1),
                (values, scales, channels, staged, first, rows, width, outputs, spans),
                {"BITS": bits, "BLOCK": QUANTIZED_BLOCK},
            )
        )

    def finish(self) -> None:
        """Wait for the scales of all weights. Raises ConfigError for numbers that are not finite."""
        for spec, copy in self._channels:
            finite = np.isfinite(channels := copy.result()).reshape(-1, channels.shape[-1]).all(axis=1)
            if not finite.all():
                several = len(spec.sources) > 1
                source = spec.sources[int(np.argmin(finite))] if several else spec.sources[0]
                raise ConfigError(
                    f"tensor {quoted(source)} cannot be quantized: it holds numbers that are not finite",
                    "load it without quantization, or fetch the checkpoint again",
                )
        self._channels = []
