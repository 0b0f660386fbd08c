"""Latent attention as launches: products by head, the write of latents, and sums over the context."""

from __future__ import annotations

import numpy as np

from quire.backends.cuda.accelerator import Argument, Constant, DeviceArray, Launch
from quire.backends.cuda.attention import cache_kind
from quire.backends.cuda.grouped import GroupedProducts, is_ordered
from quire.backends.cuda.kernels.state_variants import LATENT_ROWS
from quire.backends.cuda.kernels.variants import CACHES, LIST_BLOCK
from quire.backends.cuda.launch_list import LaunchList, padded_dim
from quire.backends.cuda.rounding import rounded_row
from quire.backends.cuda.scratch import Part, carve, row_bytes
from quire.backends.cuda.segments import NOTHING, SegmentShape
from quire.backends.cuda.step_arrays import StepArrays
from quire.program import ops
from quire.quantize.groups import ceil_div

_FEW, _MANY = LATENT_ROWS
_PROGRAMS = 64  # of many rows that take no longer than four times as many of few


def by_head_parts(op: ops.LinearByHead, format: str) -> tuple[Part, Part, Part]:
    """Return what scratch memory has of each token: quantized activations of its heads, its pairs, inputs.

    `format` is that of the weight. Only inputs that are put into another order are kept.
    """
    heads, _, inputs = op.weight.shape
    rounded = row_bytes(rounded_row(format, inputs))
    ordered = heads * inputs if is_ordered(format) else 0
    return (
        (heads * rounded, np.dtype(np.int8)),
        (heads, np.dtype(np.int32)),
        (ordered, np.dtype(np.float32)),
    )


def linear_by_head(op: ops.LinearByHead, to: LaunchList) -> None:
    """Record products with a matrix for each head, as those of experts: a head is the expert of its pairs."""
    heads, count = op.weight.shape[0], op.x.count
    parts = by_head_parts(op, to.weights[op.weight.name].format)
    offsets = to.constant(np.zeros(heads + 1, np.int32))

    def listed(step: StepArrays) -> tuple[DeviceArray, DeviceArray]:
        return carve(step.scratch, step.counts[count], parts)[1], offsets

    def pairs(step: StepArrays) -> int:
        return step.counts[count] * heads

    to.add(
        "list_by_head",
        lambda step: (-(-max(pairs(step), heads + 1) // LIST_BLOCK) if pairs(step) else 0, 1, 1),
        lambda step: (*listed(step), step.counts[count], heads),
        BLOCK=LIST_BLOCK,
    )
    products, x = GroupedProducts(to, heads, pairs, listed), to.at(op.x)
    if products.is_ordered(op.weight):

        def in_order(step: StepArrays) -> DeviceArray:
            return carve(step.scratch, step.counts[count], parts)[2]

        products.order_inputs(in_order, x, 1, op.weight)
        x = in_order
    products.multiply(to.at(op.out), x, 1, op.weight)
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
    constants: dict[str, Constant] = {"SCALED": scaled, "PRECISION": CACHES[kind]}
    constants |= {"ROPE": padded_dim(rope), "RANK": padded_dim(rank)}
    (tokens_of_many, many), (tokens_of_few, few) = (_tile(heads, block) for block in (_MANY, _FEW))
    tiles_of_many, tiles_of_few = to.tiled("T", tokens_of_many), to.tiled("T", tokens_of_few)
    groups = ceil_div(heads, few)
    shape, by_segments = SegmentShape(table, 0, False, heads, groups, rank), CACHES[kind] == "bf16"
    sizes = (heads, rope, rank, to.block_size, op.scale)

    def attended(step: StepArrays) -> Launch:
        if by_segments and to.segments.most(shape, step):
            return NOTHING
        block, of_heads, tiles = _MANY, many, tiles_of_many(step)
        if (tiles.shape[0] - 1) * ceil_div(heads, many) < _PROGRAMS:
            block, of_heads, tiles = _FEW, few, tiles_of_few(step)
        grid = (tiles.shape[0] - 1, ceil_div(heads, of_heads), 1)
        args = (out(step), q(step), q_rope(step), *arrays, *places(step), tiles, of_heads, *sizes)
        return Launch("attend_latent", grid, args, constants | {"BLOCK_M": block})

    to.launches.append(attended)
    if by_segments:
        to.launches += to.segments.launches(
            shape,
            "attend_latent_segments",
            constants | {"BLOCK_M": _FEW},
            padded_dim(rank),
            lambda step: (
                *(q(step), q_rope(step), *arrays, *places(step)),
                *(step.counts["T"], few, *sizes),
            ),
            lambda step: (out(step), to.none, 0),
        )


def _tile(heads: int, block: int) -> tuple[int, int]:
    """Return how many tokens and heads a program of attend_latent has, of at most `block` pairs."""
    of_heads = ceil_div(heads, ceil_div(heads, block))
    return block // of_heads, of_heads
