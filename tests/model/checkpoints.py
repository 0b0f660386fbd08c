"""Reads the tensors of a folder as a program wants them: plain, in float32, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tiny import Dense

from quire.program import Program, WeightSpec
from quire.weights.load import pull_source
from quire.weights.plan import as_stored, plan
from quire.weights.safetensors import Checkpoint


def read_weights(folder: Path, program: Program) -> dict[str, Dense]:
    specs = program.weights()
    planned = plan(specs, Checkpoint.open(folder), ignored=program.ignored, left_out=program.left_out)
    tensors = planned.need_tensors()
    weights = {}
    for name, spec in specs.items():
        parts = [pull_source(spec, source, tensors).floats() for source in spec.sources]
        shape = _before_heads(spec)
        array = np.stack(parts) if len(parts) > 1 or len(shape) > parts[0].ndim else parts[0]
        if as_stored(spec, pull_source(spec, spec.sources[0], tensors)).transposed:
            array = np.swapaxes(array, -1, -2)
        if spec.rows:
            outputs = max(len(shape) - 2, 0)  # of those that are all taken, in another order
            axis = next((i for i, size in enumerate(shape) if size != array.shape[i]), outputs)
            array = np.take(array, np.r_[spec.rows.of(array.shape[axis])], axis)
        if spec.by_head:
            array = array.reshape(spec.shape[0], -1, array.shape[-1])
            array = array if spec.by_head == "outputs" else array.swapaxes(1, 2)
        if spec.stored:
            array = array.reshape(spec.shape)
        assert array.shape == spec.shape, name
        weights[name] = Dense(np.ascontiguousarray(array, np.float32))
    return weights


def _before_heads(spec: WeightSpec) -> tuple[int, ...]:
    """Return the shape of a weight before it is split by head."""
    if not spec.by_head:
        return spec.shape
    heads, rows, width = spec.shape
    return (heads * rows, width) if spec.by_head == "outputs" else (heads * width, rows)
