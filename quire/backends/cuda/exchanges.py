"""Exchanges of parts of values among the ranks of a group, as launches."""

from __future__ import annotations

from quire.backends.cuda.accelerator import ALIGNMENT, ByRank, DeviceArray, RankExchange
from quire.backends.cuda.divided import GatherParts, TakePart
from quire.backends.cuda.kernels.variant import row_block
from quire.backends.cuda.launch_list import At, LaunchList
from quire.backends.cuda.step_arrays import StepArrays
from quire.program import ops
from quire.program.program import Count, Op, Program

_FLOAT_BYTES = 4
_HALVES = 2  # of the memory: see `gather`


def gather_parts(op: GatherParts, to: LaunchList) -> None:
    """Record that the parts of a value are put side by side."""
    count, width = op.x.count, op.x.width
    gather(to, count, 1, width, op.out.width // width, to.at(op.x), to.at(op.out))


def take_part(op: TakePart, to: LaunchList) -> None:
    """Record that a rank takes its part of a value."""
    out, x, width, whole = to.at(op.out), to.at(op.x), op.out.width, op.x.width
    to.add_by_row(
        "take_columns", op.x.count, width, lambda step: (out(step), x(step), width, whole, ByRank(width))
    )


def gather(to: LaunchList, count: Count, rows: int, width: int, ranks: int, x: At, out: At) -> None:
    """Record that `out` gets the parts `x` of all ranks, of `width` numbers, side by side in each row.

    There are so many rows for each token or logit row. Exchanges use one half of the memory and the other in
    turns: so a rank may put its next part there while others still copy the one before.
    """
    half, block, numbers = to.num_exchanges % _HALVES, row_block(width), _padded_bytes(width) // _FLOAT_BYTES
    to.num_exchanges += 1

    def total(step: StepArrays) -> int:
        return step.counts[count] * rows

    def parts(step: StepArrays) -> DeviceArray:
        memory = step.exchanged[count]
        first = half * (memory.num_bytes // _HALVES)
        return memory.part(first, (ranks, total(step) * numbers))

    def grid(step: StepArrays, across: int) -> tuple[int, int, int]:
        return total(step), -(-width // block), across

    to.add(
        "put_part",
        lambda step: grid(step, 1),
        lambda step: (parts(step), x(step), width, total(step) * numbers, ByRank(1)),
        BLOCK=block,
    )
    to.launches.append(lambda step: RankExchange(parts(step)))
    to.add(
        "join_parts",
        lambda step: grid(step, ranks),
        lambda step: (out(step), parts(step), width, total(step) * numbers),
        BLOCK=block,
    )


def end_exchanges(to: LaunchList) -> None:
    """Record the end of a step of a group: a next one of another size divides the memory elsewhere."""
    if to.num_exchanges:
        to.launches.append(lambda step: RankExchange(step.exchanged["T"].part(0, (0,))))


def exchange_row_bytes(program: Program) -> dict[Count, int]:
    """Return the bytes that exchanges take for each token, and for each logit row."""
    found: dict[Count, int] = {"T": 0, "L": 0}
    for op in program:
        found[op.out.count] = max(found[op.out.count], _HALVES * _exchanged_bytes(op))
    return found


def _exchanged_bytes(op: Op) -> int:
    """Return the bytes that all parts of what an op exchanges take for each of its rows."""
    if isinstance(op, GatherParts):
        return op.out.width // op.x.width * _padded_bytes(op.x.width)
    if isinstance(op, ops.Experts) and (ranks := num_ranks(op)) > 1:
        return ranks * op.routing.chosen * _padded_bytes(op.experts.up.shape[1])
    return 0


def num_ranks(op: ops.Experts) -> int:
    """Return among how many ranks experts are divided: each has a part of what `down` multiplies."""
    return op.experts.down.shape[2] // op.experts.up.shape[1]


def _padded_bytes(width: int) -> int:
    """Return the bytes of a row of floats, up to where kernels can take an array."""
    return -(-width * _FLOAT_BYTES // ALIGNMENT) * ALIGNMENT
