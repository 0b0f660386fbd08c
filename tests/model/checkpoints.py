"""Reads the safetensors of a folder as a program wants them: plain, in float32, for tests."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes  # noqa: F401  bfloat16 for NumPy
import numpy as np
from safetensors import safe_open
from tiny import Dense

from quire.program import Program


def read_weights(folder: Path, program: Program) -> dict[str, Dense]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    weights = {}
    for name, spec in program.weights().items():
        parts = [tensors[source] for source in spec.sources]
        array = np.stack(parts) if len(parts) > 1 or len(spec.shape) > parts[0].ndim else parts[0]
        if spec.transposed:
            array = np.swapaxes(array, -1, -2)
        if spec.interleaved:
            first, step = spec.interleaved
            array = array[:, first::step]
        assert array.shape == spec.shape, name
        weights[name] = Dense(np.ascontiguousarray(array, np.float32))
    return weights
