"""Tests of an op with states, on the native backend."""

from __future__ import annotations

from functools import cache

import numpy as np
from lowered import OneOp, distance, on_reference
from test_native_exactness import all_same
from test_native_state import chunked, new, sequences, step
from tiny import Sequence, same_bits

from quire.types import Snapshot


@cache
def alone(op: OneOp, isa: str) -> list[np.ndarray]:
    """Each sequence as one row, by one thread."""
    paged = new(op, isa, 1)
    return [step(paged, [(sequence, len(sequence.token_ids))])[0] for sequence in sequences(paged)]


def check_numbers(op: OneOp, isa: str) -> None:
    """Compare with the reference."""
    paged = on_reference(op.program, op.checkpoint(), "f32")
    rows = [(sequence, len(sequence.token_ids)) for sequence in sequences(paged)]
    for found, expected in zip(alone(op, isa), paged.step(rows), strict=True):
        assert distance(found, expected.reshape(found.shape)) < 1e-5


def check_schedules(op: OneOp, isa: str, seed: int) -> None:
    """Compare the bits of random chunks with those of whole rows."""
    assert all_same(chunked(new(op, isa, 2), seed), alone(op, isa))


def check_snapshots(op: OneOp, isa: str) -> None:
    """Take several of the same row, at its end too; restore each beside a row that takes its place."""
    borders = (16, 64, 80, 128, 144, 192, 200)
    paged, wanted = new(op, isa), alone(op, isa)
    first, other = sequences(paged)[3:][::-1]
    saved = tuple(Snapshot(first.slot, 0, border, i) for i, border in enumerate(borders))
    step(paged, [(first, 70)], saved=saved[:2])  # 80 has inputs of both steps
    assert same_bits(step(paged, [(first, 130)], saved=saved[2:])[0], wanted[4][70:])
    for i, border in enumerate(borders[:-1]):
        again = Sequence(first.token_ids, first.blocks, computed=border, slot=7)
        other.computed = 0
        replaced, restored = Snapshot(other.slot, 0, 16, i), Snapshot(7, 0, border, i)
        rows = [(other, 20), (again, 200 - border)]
        found = step(paged, rows, restored=(restored,), saved=(replaced,))
        assert all_same(found, [wanted[3][:20], wanted[4][border:]]), border
