"""Encoders as launches: attention within the texts of a step, embedding of segments, pooling."""

from __future__ import annotations

import numpy as np

from quire.backends.cuda.accelerator import Argument, Constant, Launch
from quire.backends.cuda.kernels.image_variants import HEAD_BLOCK
from quire.backends.cuda.kernels.variants import CACHES, MULTIPLE, attention_rows
from quire.backends.cuda.launch_list import At, LaunchList, padded_dim
from quire.backends.cuda.scratch import Part, carve
from quire.backends.cuda.step_arrays import StepArrays
from quire.backends.cuda.text_arrays import WINDOWS, ends_of, segments_of, table_of
from quire.errors import ConfigError
from quire.program import ops
from quire.program.ops.attention import Distances
from quire.quantize.kinds import DTYPES

_FLOAT32 = np.dtype(np.float32)
_TOKENS = 16  # of a program of attend_with_distances


def copied_parts(op: ops.RowAttention, halves: bool) -> tuple[Part, ...]:
    """Return the copies of q, k, v and out that an attention has in scratch memory, none if it needs none.

    Heads are padded to multiples of 16 numbers; of `halves`, keys and values are in bfloat16.
    """
    (heads, dim), (groups, value_dim) = op.q.shape, op.v.shape
    wide, value_wide = _padded(dim), _padded(value_dim)
    if not halves and (wide, value_wide) == (dim, value_dim):
        return ()
    kind = DTYPES["bf16" if halves else "f32"]
    sizes = ((heads * wide, _FLOAT32), (groups * wide, kind), (groups * value_wide, kind))
    return (*sizes, (heads * value_wide, _FLOAT32))


def _padded(dim: int) -> int:
    return -(-dim // MULTIPLE) * MULTIPLE


def row_attention(op: ops.RowAttention, to: LaunchList) -> None:
    """Record attention over the keys and values of a step, as a cache whose blocks have one token each."""
    out, q, k, v = (to.at(value) for value in (op.out, op.q, op.k, op.v))
    if not (parts := copied_parts(op, to.halves)):
        _attend(op, to, out, q, k, v)
        return
    (heads, dim), (groups, value_dim) = op.q.shape, op.v.shape

    def copy(number: int) -> At:
        return lambda step: carve(step.scratch, step.counts["T"], parts)[number]

    for x, number, rows, size in ((q, 0, heads, dim), (k, 1, groups, dim), (v, 2, groups, value_dim)):
        _resize(to, copy(number), x, rows, size, _padded(size))
    _attend(op, to, copy(3), *(copy(number) for number in range(3)))
    _resize(to, out, copy(3), heads, _padded(value_dim), value_dim)
    to.rounded = None  # scratch memory was written


def _resize(to: LaunchList, out: At, x: At, heads: int, width: int, new_width: int) -> None:
    to.add(
        "resize_rows",
        lambda step: (step.counts["T"] * heads, -(-new_width // HEAD_BLOCK), 1),
        lambda step: (out(step), x(step), width, new_width),
        BLOCK=HEAD_BLOCK,
    )


def _attend_with_distances(
    op: ops.RowAttention, distances: Distances, to: LaunchList, out: At, q: At, k: At, v: At
) -> None:
    (heads, dim), (groups, value_dim) = op.q.shape, op.v.shape
    dim, value_dim = _padded(dim), _padded(value_dim)
    table, buckets = to.array(distances.table), to.constant(distances.buckets().astype(np.int32))
    sizes = (heads, groups, dim, value_dim, distances.longest, op.reach or 0)
    padded = padded_dim(dim, value_dim)
    to.add(
        "attend_with_distances",
        lambda step: (-(-step.counts["T"] // _TOKENS), heads, 1),
        lambda step: (
            *(out(step), q(step), k(step), v(step), table, buckets),
            *(step.positions, step.token_rows, step.row_offsets, step.counts["T"], *sizes, op.scale),
        ),
        BLOCK_M=_TOKENS,
        DIM=padded,
        VALUE_DIM=padded,
    )


def _attend(op: ops.RowAttention, to: LaunchList, out: At, q: At, k: At, v: At) -> None:
    if op.distances is not None:
        _attend_with_distances(op, op.distances, to, out, q, k, v)
        return
    kind = "bf16" if to.halves else "fp32"
    (heads, dim), (groups, value_dim) = op.q.shape, op.v.shape
    dim, value_dim = _padded(dim), _padded(value_dim)
    shared, padded = heads // groups, padded_dim(dim, value_dim)
    block = attention_rows(False, kind, padded)
    if shared > block:
        problem = f"the cuda backend has no kernel for {shared} query heads that share a key head"
        raise ConfigError(problem, f"at most {block} may, in an encoder: use device='native'")
    windowed, window = op.window is not None, 0 if op.reach is None else op.reach + 1
    tiles = to.tiled("T", block // shared, windowed)
    how: dict[str, Constant] = {"CAP": False, "SCALED": False, "PRECISION": CACHES[kind]}
    how |= {"DIM": padded, "VALUE_DIM": padded}

    def launch(step: StepArrays) -> Launch:
        ends, table, of_step = step.texts[ends_of(op)], step.texts[table_of(op)], tiles(step)
        own = step.positions, step.token_rows, step.context_lens
        positions, rows, lengths = (step.texts[name] for name in WINDOWS) if windowed else own
        cache: tuple[Argument, ...] = (k(step), v(step), to.none, to.none, to.none)
        where = (positions, rows, ends, lengths, table, table.shape[1])
        sizes = (of_step, heads, groups, dim, value_dim, 1, window, 0)
        args = (out(step), q(step), *cache, *where, *sizes, 1, 0, op.scale, 0.0)
        grid = (of_step.shape[0] - 1, groups, 1)
        return Launch("attend", grid, args, {**how, "BLOCK_M": block})

    to.launches.append(launch)


def embed_segments(op: ops.EmbedSegments, to: LaunchList) -> None:
    """Record the rows of the segments' table."""
    out, weight, (count, width) = to.at(op.out), to.weights[op.table.name], op.table.shape
    to.add_by_row(
        "gather_rows",
        "T",
        width,
        lambda step: (out(step), step.texts[segments_of(op)], *weight.arrays, count, width),
    )


def pool_rows(op: ops.PoolRows, to: LaunchList) -> None:
    """Record the mean of the tokens of a text, or its first."""
    out, x, width = to.at(op.out), to.at(op.x), op.x.width
    to.add_by_row(
        "pool_rows",
        "L",
        width,
        lambda step: (
            *(out(step), x(step), step.logit_rows, step.token_rows, step.row_offsets),
            *(width, int(op.method == "cls")),
        ),
    )
