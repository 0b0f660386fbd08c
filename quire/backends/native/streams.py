"""Lowering of hyper-connections (quire.program.ops.streams) to the native core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from quire.backends.native import _core
from quire.program import ops
from quire.program.program import Value

StreamOp = ops.RepeatStreams | ops.StreamWeights | ops.CollapseStreams | ops.MixStreams


def record_streams(
    op: StreamOp,
    native: _core.Native,
    at: Callable[[Value], int],
    vectors: Mapping[str, np.ndarray],
) -> None:
    """Record one op, of values in the buffers `at` and weights that are `vectors`."""
    count, out, x = op.out.count, at(op.out), at(op.x)
    if isinstance(op, ops.RepeatStreams):
        return native.repeat_streams(count, out, x, *op.out.shape)
    streams, hidden = op.x.shape
    if isinstance(op, ops.StreamWeights):
        base, scale = vectors[op.base.name], vectors[op.scale.name]
        how: dict[str, Any] = {"eps": op.eps, "floor": op.floor, "rounds": op.rounds}
        return native.stream_weights(count, out, x, at(op.mixed), streams, hidden, base, scale, **how)
    if isinstance(op, ops.CollapseStreams):
        return native.collapse_streams(count, out, x, at(op.w), op.w.width, streams, hidden)
    return native.mix_streams(out, x, at(op.y), at(op.w), streams, hidden)
