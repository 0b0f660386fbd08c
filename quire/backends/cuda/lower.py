"""Lowering a program: each op becomes launches, recorded once at load and filled in for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any

import numpy as np

from quire.backends.cuda.accelerator import Constant, DeviceArray, Memory
from quire.backends.cuda.attention import attention, rotated_attention, shared_attention
from quire.backends.cuda.caches import LayerCache
from quire.backends.cuda.coded_launches import gather_coded
from quire.backends.cuda.encoders import copied_parts, embed_segments, pool_rows, row_attention
from quire.backends.cuda.exchanges import end_exchanges, exchange_row_bytes, gather_parts, take_part
from quire.backends.cuda.experts import experts, pair_parts
from quire.backends.cuda.fused import prepared
from quire.backends.cuda.image_arrays import ImageArrays
from quire.backends.cuda.image_ops import (
    TOKEN_PARTS,
    clip,
    join_rows,
    mean_of_rows,
    mixed_rows,
    patches,
    place_images,
    replaced_tokens,
    rotary_at,
    standardize,
)
from quire.backends.cuda.kernels.variant import row_block
from quire.backends.cuda.latent import by_head_parts, latent_attention, linear_by_head
from quire.backends.cuda.launch_list import At, LaunchList, Lowered, activation_name, padded_dim
from quire.backends.cuda.products import adapted_parts, gated_linear, linear, product_scratch_bytes
from quire.backends.cuda.recurrences import delta_rule, kept_row_bytes, short_convolution, state_space
from quire.backends.cuda.scratch import row_bytes
from quire.backends.cuda.states import LayerState
from quire.backends.cuda.step_arrays import StepMemory, rotations_of
from quire.backends.cuda.text_arrays import HIDDEN, TextArrays
from quire.backends.cuda.weights import DeviceWeight
from quire.errors import ConfigError
from quire.program import ops
from quire.program.caches import SlotState
from quire.program.passes import plan_buffers
from quire.program.program import Op, Program, Value


@singledispatch
def record(op: Op, to: LaunchList) -> None:
    """Record the launches of one op."""
    raise ConfigError(f"the cuda backend has no kernel for {type(op).__name__}", "use device='native'")


def is_lowered(op: Op) -> bool:
    """Return whether there are kernels for ops of this kind."""
    return record.dispatch(type(op)) is not record.dispatch(Op)


def lower(
    program: Program,
    weights: Mapping[str, DeviceWeight],
    caches: Sequence[LayerCache | LayerState],
    block_size: int,
    memory: Memory,
    halves: bool = False,
) -> Lowered:
    """Lower a program whose weights and caches are in the memory of an accelerator.

    With `halves`, attention within a step multiplies keys and values in bfloat16.
    """
    program = prepared(program)
    plan = plan_buffers(program)
    recording = LaunchList(program, weights, caches, plan, block_size, memory, halves)
    for op in program:
        record(op, recording)
    end_exchanges(recording)
    scratch = scratch_row_bytes(program, {name: weight.format for name, weight in weights.items()}, halves)
    output = plan.buffer[program.output.index]
    hidden = None if program.hidden is None else plan.buffer[program.hidden.index]
    tiles = tuple(recording.tiles)
    return Lowered(program, recording.launches, plan, output, hidden, scratch, recording.adapters, tiles)


def step_memory(lowered: Lowered, memory: Memory) -> StepMemory:
    """Return the memory of the steps of a program."""
    program = lowered.program
    exchanged = exchange_row_bytes(program).items()
    sizes = (*lowered.plan.sizes, *exchanged, ("T", lowered.scratch_row_bytes))
    rotations, texts, images = (
        rotations_of(program),
        TextArrays(program),
        ImageArrays(program, memory.num_ranks),
    )
    groups = program.cache_groups
    states = [group for group, spec in enumerate(groups) if isinstance(spec, SlotState)]
    return StepMemory(memory, sizes, rotations, lowered.adapters, texts, images, states, lowered.tiles)


def scratch_row_bytes(program: Program, formats: Mapping[str, str], halves: bool = False) -> int:
    """Return the bytes of scratch memory that a token may need at once, by the formats of weights."""
    return max((_scratch_row_bytes(op, formats, halves) for op in program), default=0)


def _scratch_row_bytes(op: Op, formats: Mapping[str, str], halves: bool) -> int:
    if isinstance(op, ops.Experts):
        return row_bytes(pair_parts(op, formats))
    if isinstance(op, ops.LinearByHead):
        return row_bytes(by_head_parts(op, formats[op.weight.name]))
    if isinstance(op, ops.Linear) and op.adapted:
        return row_bytes(adapted_parts(op, formats[op.weight.name]))
    if isinstance(op, ops.Linear | ops.GatedLinear):
        return product_scratch_bytes(op, formats)
    if isinstance(op, ops.RowAttention):
        return row_bytes(copied_parts(op, halves))
    if isinstance(op, ops.Embed) and op.replaced is not None:
        return row_bytes(TOKEN_PARTS)
    return kept_row_bytes(op)


# Parts of ranks

record.register(gather_parts)
record.register(take_part)


# Encoders

record.register(row_attention)
record.register(embed_segments)
record.register(pool_rows)

# Images

for _own in (patches, mixed_rows, rotary_at, join_rows, mean_of_rows, place_images, clip, standardize):
    record.register(_own)


# Embedding


@record.register
def _(op: ops.Embed, to: LaunchList) -> None:
    by_position = isinstance(op, ops.PositionEmbed)
    out, weight = to.at(op.out), to.weights[op.table.name]
    count, width = op.table.shape
    ids: At = (lambda step: step.positions) if by_position else (lambda step: step.token_ids)
    if op.replaced is not None:
        ids = replaced_tokens(op.replaced, to)
    if (form := weight.form) is not None:
        gather_coded(weight, form, out, ids, lambda step: step.counts["T"], to)
        return
    kernel = {"int8": "gather_int8_rows", "int4": "gather_int4_rows"}.get(weight.format, "gather_rows")
    to.add_by_row(kernel, "T", width, lambda step: (out(step), ids(step), *weight.arrays, count, width))


@record.register
def _(op: ops.SampledRows, to: LaunchList) -> None:
    out, x, width = to.at(op.out), to.at(op.x), op.x.width
    to.add_by_row(
        "gather_rows", "L", width, lambda step: (out(step), step.logit_rows, x(step), step.counts["T"], width)
    )


# Single numbers


@record.register
def _(op: ops.Add, to: LaunchList) -> None:
    _numbers(op, to, "add", (op.x, op.y))


@record.register
def _(op: ops.Unary, to: LaunchList) -> None:
    _numbers(op, to, "unary", (op.x,), ACTIVATION=activation_name(op.activation))


@record.register
def _(op: ops.Xielu, to: LaunchList) -> None:
    out, x, width = to.at(op.out), to.at(op.x), op.out.width
    rise, fall = map(to.array, op.weights())
    to.add_by_row("xielu", op.out.count, width, lambda step: (out(step), x(step), rise, fall, width, op.beta))


@record.register
def _(op: ops.GatedActivation, to: LaunchList) -> None:
    values = (op.gate, op.up)
    _numbers(
        op, to, "gated_activation", values, op.gate.width, 0.0, ACTIVATION=activation_name(op.activation)
    )


@record.register
def _(op: ops.Scale, to: LaunchList) -> None:
    _numbers(op, to, "scale", (op.x,), op.factor)


@record.register
def _(op: ops.ScaleByWeight, to: LaunchList) -> None:
    _numbers(op, to, "scale_by_weight", (op.x,), op.weight.size, weight=to.array(op.weight))


@record.register
def _(op: ops.ScaleParts, to: LaunchList) -> None:
    _numbers(op, to, "scale_by_weight", (op.x,), op.x.width, weight=to.constant(op.factors))


@record.register
def _(op: ops.ScaleByPosition, to: LaunchList) -> None:
    out, x, beta = to.at(op.out), to.at(op.x), to.constant(np.array([op.beta]))
    width = op.out.width
    to.add_by_row(
        "scale_by_position",
        op.out.count,
        width,
        lambda step: (out(step), x(step), step.positions, width, beta, op.period, op.first),
    )


@record.register
def _(op: ops.SoftCap, to: LaunchList) -> None:
    _numbers(op, to, "soft_cap", (op.x,), op.cap)


@record.register
def _(op: ops.Slice, to: LaunchList) -> None:
    _numbers(op, to, "take_columns", (op.x,), op.x.width, op.first)


@record.register
def _(op: ops.PreviousHidden, to: LaunchList) -> None:
    out, width = to.at(op.out), op.out.width
    to.add_by_row(
        "take_columns", op.out.count, width, lambda step: (out(step), step.texts[HIDDEN], width, width, 0)
    )


@record.register
def _(op: ops.Join, to: LaunchList) -> None:
    _numbers(op, to, "join_columns", (op.x, op.y), op.x.width)


def _numbers(
    op: Op,
    to: LaunchList,
    kernel: str,
    values: tuple[Value, ...],
    *rest: int | float,
    weight: DeviceArray | None = None,
    **constants: Constant,
) -> None:
    """Record a kernel with the arguments (out, values, the weight if there is one, width of out, rest)."""
    out, sources, width = to.at(op.out), [to.at(value) for value in values], op.out.width
    weights = () if weight is None else (weight,)
    to.add_by_row(
        kernel,
        op.out.count,
        width,
        lambda step: (out(step), *(at(step) for at in sources), *weights, width, *rest),
        **constants,
    )


# Products

record.register(linear)
record.register(gated_linear)
record.register(experts)


# Norms


@record.register
def _(op: ops.RMSNorm | ops.LayerNorm, to: LaunchList) -> None:
    _norm(to, op, op.x, None, op.out)


@record.register
def _(op: ops.AddNorm, to: LaunchList) -> None:
    _norm(to, op.norm, op.x, op.y, op.total)


def _norm(to: LaunchList, op: ops.RMSNorm | ops.LayerNorm, x: Value, y: Value | None, total: Value) -> None:
    """Record a norm of x, or of x + y, which is kept as `total`."""
    width, weight, count = x.shape[-1], to.array(op.weight), x.count
    heads = x.width // width
    arrays = [to.at(value) for value in (op.out, total, x, y or x)]
    how: dict[str, Constant] = {"ADD": y is not None, "WEIGHT": op.weight is not None}
    rest: tuple[Any, ...] = (weight, width, op.eps)
    if isinstance(op, ops.RMSNorm):
        kernel, rest = "rms_norm", (*rest, op.offset)
    else:
        kernel, rest = "layer_norm", (weight, to.array(op.bias), width, op.eps)
        how["BIAS"] = op.bias is not None
    to.add(
        kernel,
        lambda step: (step.counts[count] * heads, 1, 1),
        lambda step: (*(at(step) for at in arrays), *rest),
        **how,
        BLOCK=row_block(width),
    )


@record.register
def _(op: ops.GatedRMSNorm, to: LaunchList) -> None:
    width, weight, count = op.x.shape[-1] // op.groups, to.array(op.weight), op.x.count
    arrays = [to.at(value) for value in (op.out, op.x, op.gate)]
    parts = op.x.width // width
    to.add(
        "gated_rms_norm",
        lambda step: (step.counts[count] * parts, 1, 1),
        lambda step: (*(at(step) for at in arrays), weight, width, op.groups, op.eps),
        ACTIVATION=activation_name(op.activation),
        GATE_FIRST=op.gate_first,
        BLOCK=row_block(width),
    )


@record.register
def _(op: ops.MatchMagnitude, to: LaunchList) -> None:
    out, x, like, count = to.at(op.out), to.at(op.x), to.at(op.like), op.x.count
    width, floor = op.x.width, to.constant(np.array([op.floor]))
    to.add(
        "match_magnitude",
        lambda step: (step.counts[count], 1, 1),
        lambda step: (out(step), x(step), like(step), floor, width),
        BLOCK=row_block(width),
    )


@record.register
def _(op: ops.AboveCutoff, to: LaunchList) -> None:
    out, x, count = to.at(op.out), to.at(op.x), op.x.count
    width, deviations = op.x.width, to.constant(np.array([op.deviations]))
    to.add(
        "above_cutoff",
        lambda step: (step.counts[count], 1, 1),
        lambda step: (out(step), x(step), deviations, width),
        BLOCK=row_block(width),
    )


# States

record.register(short_convolution)
record.register(delta_rule)
record.register(state_space)


# Attention


@record.register
def _(op: ops.Rotary, to: LaunchList) -> None:
    (heads, dim), rope, count = op.x.shape, op.rope, op.x.count
    out, x = to.at(op.out), to.at(op.x)
    to.add(
        "rotary",
        lambda step: (step.counts[count], heads, 1),
        lambda step: (out(step), x(step), *step.rotations[rope, count], heads, dim, rope.dim),
        ROPE="interleaved" if rope.interleaved else "halves",
        DIM=padded_dim(dim),
    )


record.register(attention)
record.register(rotated_attention)
record.register(shared_attention)
record.register(linear_by_head)
record.register(latent_attention)
