"""Latent attention as launches: products by head, the write of latents, and sums over the context."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.backends.cuda.accelerator import Argument, Constant, DeviceArray, Launch
from quire.backends.cuda.attention import cache_kind
from quire.backends.cuda.kernels.variant import MOST_EXPERTS
from quire.backends.cuda.kernels.variants import (
    CACHES,
    LIST_BLOCK,
    PRECISIONS,
    grouped_tile,
    quantized_tile,
)
from quire.backends.cuda.launch_list import LaunchList, padded_dim
from quire.backends.cuda.products import FLOAT_TYPES, QUANTIZED, quantized_row, quantized_rows
from quire.backends.cuda.scratch import Part, carve, row_bytes
from quire.backends.cuda.step_arrays import StepArrays
from quire.backends.cuda.weights import spans_of
from quire.program import ops

_HEADS = 16  # of a program of attend_latent


def by_head_parts(op: ops.LinearByHead) -> tuple[Part, Part]:
    """Return what scratch memory has of each token: quantized activations of its heads, and its pairs."""
    heads, _, inputs = op.weight.shape
    return (heads * row_bytes(quantized_row(inputs)), np.dtype(np.int8)), (heads, np.dtype(np.int32))


def linear_by_head(op: ops.LinearByHead, to: LaunchList) -> None:
    """Record products with a matrix for each head, as those of experts: a head is the expert of its pairs."""
    weight, (heads, outputs, inputs) = to.weights[op.weight.name], op.weight.shape
    out, x, count = to.at(op.out), to.at(op.x), op.x.count
    offsets = to.constant(np.zeros(heads + 1, np.int32))

    def listed(step: StepArrays) -> tuple[DeviceArray, DeviceArray]:
        return carve(step.scratch, step.counts[count], by_head_parts(op))[1], offsets

    def pairs(step: StepArrays) -> int:
        return step.counts[count] * heads

    to.add(
        "list_by_head",
        lambda step: (-(-max(pairs(step), heads + 1) // LIST_BLOCK) if pairs(step) else 0, 1, 1),
        lambda step: (*listed(step), step.counts[count], heads),
        BLOCK=LIST_BLOCK,
    )
    how: dict[str, Constant] = {"BIAS": False, "EXPERTS": MOST_EXPERTS}
    is_quantized = weight.format in QUANTIZED
    if is_quantized:
        kernel, size, how["KIND"] = "grouped_quantized_product", spans_of(inputs), weight.format
        rows = quantized_rows(to, x, pairs, inputs, weight.format == "int8")
    else:
        kernel, size, how["PRECISION"] = "grouped_product", inputs, PRECISIONS[FLOAT_TYPES[weight.format]]

    def tile(tokens: int) -> Mapping[str, Constant]:
        return quantized_tile(tokens) if is_quantized else grouped_tile(tokens, FLOAT_TYPES[weight.format])

    def launch(step: StepArrays) -> Launch:
        own, number = tile(step.counts[count]), pairs(step)
        tiles = min(number, number // int(own["BLOCK_M"]) + heads)
        of: tuple[DeviceArray, ...] = rows(step) if is_quantized else (x(step),)
        args: tuple[Argument, ...] = (
            out(step),
            *of,
            *listed(step),
            *weight.arrays,
            to.none,
            outputs,
            size,
            heads,
            1,
        )
        return Launch(kernel, (-(-outputs // int(own["BLOCK_N"])), tiles, 1), args, {**how, **own})

    to.launches.append(launch)
    to.rounded = None  # scratch memory was written


def latent_attention(op: ops.LatentAttention, to: LaunchList) -> None:
    """Record the write of latents, and the attention over those of the context.

    A latent is cached as the value of one head, and its rotated part as the key.
    """
    cache, table, (heads, rank), rope = to.paged(op.layer), to.groups[op.layer], op.q.shape, op.r.width
    scaled, kind = cache.key_scales is not None, cache_kind(cache)
    arrays = (cache.keys, cache.values, cache.key_scales or to.none, cache.value_scales or to.none)
    out, q, q_rope, c, r = (to.at(value) for value in (op.out, op.q, op.q_rope, op.c, op.r))
    padded = padded_dim(rank, rope)

    def places(step: StepArrays) -> tuple[Argument, ...]:
        blocks = step.block_tables[table]
        return step.positions, step.token_rows, blocks, blocks.shape[1]

    to.add(
        "write_kv",
        lambda step: (step.counts["T"], 1, 1),
        lambda step: (*arrays, r(step), c(step), *places(step), 1, rope, rank, to.block_size),
        DIM=padded,
        VALUE_DIM=padded,
        SCALED=scaled,
    )
    to.add(
        "attend_latent",
        lambda step: (step.counts["T"], -(-heads // _HEADS), 1),
        lambda step: (
            *(out(step), q(step), q_rope(step), *arrays, *places(step)),
            *(heads, rope, rank, to.block_size, op.scale),
        ),
        SCALED=scaled,
        PRECISION=CACHES[kind],
        ROPE=padded_dim(rope),
        RANK=padded_dim(rank),
    )
