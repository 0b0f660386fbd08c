"""Encoders as launches: attention within the texts of a step, embedding of segments, pooling."""

from __future__ import annotations

from quire.backends.cuda.accelerator import Argument, Constant, Launch
from quire.backends.cuda.kernels.variants import CACHES, attention_rows, row_block
from quire.backends.cuda.launch_list import LaunchList, padded_dim
from quire.backends.cuda.step_arrays import StepArrays
from quire.backends.cuda.text_arrays import TABLE, ends_of, segments_of
from quire.errors import ConfigError
from quire.program import ops


def row_attention(op: ops.RowAttention, to: LaunchList) -> None:
    """Record attention over the keys and values of a step, as a cache whose blocks have one token each."""
    out, q, k, v = (to.at(value) for value in (op.out, op.q, op.k, op.v))
    (heads, dim), (groups, _), (_, value_dim) = op.q.shape, op.k.shape, op.v.shape
    shared, padded = heads // groups, padded_dim(dim, value_dim)
    block = attention_rows(False, "fp32", padded)
    if shared > block:
        problem = f"the cuda backend has no kernel for {shared} query heads that share a key head"
        raise ConfigError(problem, f"at most {block} may, in an encoder: use device='native'")
    tokens, window = block // shared, 0 if op.reach is None else op.reach + 1
    how: dict[str, Constant] = {"CAP": False, "SCALED": False, "PRECISION": CACHES["fp32"]}
    how |= {"DIM": padded, "VALUE_DIM": padded}

    def launch(step: StepArrays) -> Launch:
        ends, table, count = step.texts[ends_of(op)], step.texts[TABLE], step.counts["T"]
        cache: tuple[Argument, ...] = (k(step), v(step), to.none, to.none, to.none)
        where = (step.positions, step.token_rows, ends, step.context_lens, table, table.shape[1])
        sizes = (count, tokens, heads, groups, dim, value_dim, 1, window, 0)
        args = (out(step), q(step), *cache, *where, *sizes, 1, 0, op.scale, 0.0)
        return Launch("attend", (-(-count // tokens), groups, 1), args, {**how, "BLOCK_M": block})

    to.launches.append(launch)


def embed_segments(op: ops.EmbedSegments, to: LaunchList) -> None:
    """Record the rows of the segments' table."""
    out, weight, (count, width) = to.at(op.out), to.weights[op.table.name], op.table.shape
    block = row_block(width)
    to.add(
        "gather_rows",
        lambda step: (step.counts["T"], -(-width // block), 1),
        lambda step: (out(step), step.texts[segments_of(op)], *weight.arrays, count, width),
        BLOCK=block,
    )


def pool_rows(op: ops.PoolRows, to: LaunchList) -> None:
    """Record the mean of the tokens of a text, or its first."""
    out, x, width, block = to.at(op.out), to.at(op.x), op.x.width, row_block(op.x.width)
    to.add(
        "pool_rows",
        lambda step: (step.counts["L"], -(-width // block), 1),
        lambda step: (
            *(out(step), x(step), step.logit_rows, step.token_rows, step.row_offsets),
            *(width, int(op.method == "cls")),
        ),
        BLOCK=block,
    )
