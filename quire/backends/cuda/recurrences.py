"""Short convolutions and recurrences as launches."""

from __future__ import annotations

import numpy as np

from quire.backends.cuda.accelerator import DeviceArray
from quire.backends.cuda.kernels.state_variants import KEY_DIMS, STATE_BLOCK, VALUE_BLOCK
from quire.backends.cuda.launch_list import At, LaunchList, activation_name
from quire.backends.cuda.scratch import carve, row_bytes
from quire.backends.cuda.states import LayerState, StateArrays
from quire.backends.cuda.step_arrays import StepArrays
from quire.errors import ConfigError
from quire.program import ops
from quire.program.caches import SlotState
from quire.program.program import Op

_ON_CPU = "use device='native'"
_FLOAT32 = np.dtype(np.float32)
Recurrence = ops.DeltaRule | ops.StateSpace


def short_convolution(op: ops.ShortConvolution, to: LaunchList) -> None:
    """Record a convolution over the tokens of a step and those that slots have kept."""
    state, taps, width = to.state(op.layer), op.weight.shape[-1], op.x.width
    out, x, weight, bias = to.at(op.out), to.at(op.x), to.array(op.weight), to.array(op.bias)
    group, table = state.group, to.groups[op.layer]

    def args(step: StepArrays) -> tuple[DeviceArray | int, ...]:
        own = _of(step)
        arrays = (out(step), group.ring, group.snapshot_ring, x(step), weight, bias)
        tokens = (step.positions, own.slots, own.earlier, own.saves[table])
        sizes = (group.num_slots, width, taps, group.spec.history, int(_is_direct(step)))
        return *arrays, *tokens, state.index, group.num_layers, *sizes

    to.add(
        "short_convolution",
        lambda step: (step.counts["T"], -(-width // STATE_BLOCK), 1),
        args,
        BIAS=op.bias is not None,
        ACTIVATION=activation_name(op.activation),
        BLOCK=STATE_BLOCK,
    )
    _keep(to, state, x)


def delta_rule(op: ops.DeltaRule, to: LaunchList) -> None:
    """Record the gated delta rule."""
    _, keys, _ = op.state.shape
    gates = (to.at(op.decay), to.at(op.beta))
    weights = (to.array(op.log_rate), to.array(op.bias), to.none)
    _recurrence(op, to, gates, weights, op.key_heads, op.key_heads * keys, (0.0, 0.0, keys**-0.5))


def state_space(op: ops.StateSpace, to: LaunchList) -> None:
    """Record Mamba-2's state space."""
    heads, _, dim = op.state.shape
    gates = (to.at(op.step), to.at(op.step))
    weights = (to.array(op.log_rate), to.array(op.bias), to.array(op.skip))
    _recurrence(op, to, gates, weights, op.groups, heads * dim, (*op.limits, 1.0))


def _recurrence(
    op: Recurrence,
    to: LaunchList,
    gates: tuple[At, At],
    weights: tuple[DeviceArray, ...],
    key_heads: int,
    keys_first: int,
    factors: tuple[float, float, float],
) -> None:
    state, (heads, key_size, value_size) = to.state(op.layer), op.state.shape
    group, table = state.group, to.groups[op.layer]
    out, x = to.at(op.out), to.at(op.x)
    to.rounded = None  # scratch memory is written

    def kept(step: StepArrays) -> DeviceArray:
        return group.ring if _is_direct(step) else carve(step.scratch, step.counts["T"], _parts(op.state))[0]

    def args(step: StepArrays) -> tuple[DeviceArray | int | float, ...]:
        own = _of(step)
        states = (group.borders, group.ring, group.snapshot_borders, group.snapshot_ring)
        rows = (step.positions, step.row_offsets, own.slots, own.saves[table])
        sizes = (heads, key_heads, key_size, value_size, op.x.width, keys_first, group.spec.history)
        return (
            *(out(step), kept(step), *states, x(step), *(gate(step) for gate in gates), *weights, *rows),
            *(state.index, group.num_layers, group.num_slots, *sizes, int(_is_direct(step)), *factors),
        )

    to.add(
        "recurrence",
        lambda step: (step.num_rows, heads, -(-value_size // VALUE_BLOCK)),
        args,
        DELTA=isinstance(op, ops.DeltaRule),
        KEYS=next(size for size in KEY_DIMS if size >= key_size),
        VALUES=VALUE_BLOCK,
    )
    _keep(to, state, kept)


def _keep(to: LaunchList, state: LayerState, kept: At) -> None:
    """Record the copy of what is kept of a step's tokens to their slots, if it is not there already."""
    group, width = state.group, state.group.spec.inputs

    def args(step: StepArrays) -> tuple[DeviceArray | int, ...]:
        own = _of(step)
        tokens = (step.positions, own.slots, own.later)
        return group.ring, kept(step), *tokens, state.index, group.num_slots, width, group.spec.history

    to.add(
        "keep_inputs",
        lambda step: (0 if _is_direct(step) else step.counts["T"], -(-width // STATE_BLOCK), 1),
        args,
        BLOCK=STATE_BLOCK,
    )


def _is_direct(step: StepArrays) -> bool:
    """Return whether each row has one token: then no launch reads of a slot what it writes there."""
    return step.num_rows == step.counts["T"]


def _of(step: StepArrays) -> StateArrays:
    if step.states is None:
        raise ValueError("this step was put for a program without states")
    return step.states


def _parts(state: SlotState) -> tuple[tuple[int, np.dtype[np.float32]]]:
    return ((state.inputs, _FLOAT32),)


def kept_row_bytes(op: Op) -> int:
    """Return the bytes of scratch memory that a token takes for what a recurrence keeps of it."""
    return row_bytes(_parts(op.state)) if isinstance(op, Recurrence) else 0


def require_recurrence(op: Recurrence) -> None:
    """Raise ConfigError for delta rules of other forms, and for keys that no kernel has registers for."""
    if isinstance(op, ops.DeltaRule) and (op.by_channel or op.apart or op.beta_factor != 1):
        form = "a decay for each channel" if op.by_channel else "separate inputs or negative eigenvalues"
        raise ConfigError(f"the cuda backend has no kernels for delta rules with {form}", _ON_CPU)
    most = KEY_DIMS[-2] if isinstance(op, ops.DeltaRule) else KEY_DIMS[-1]
    if (size := op.state.shape[1]) > most:
        problem = f"the cuda backend has no kernels for states of {size} numbers in a column"
        raise ConfigError(problem, f"they have {most} at most: {_ON_CPU}")
