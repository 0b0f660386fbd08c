"""Mamba-2's state space on the native backend: numbers of the reference, the same bits in every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import test_state
import test_state_space
from lowered import ISAS, OneOp, distance, on_reference
from test_native_exactness import all_same
from test_native_state import SPOILT, chunked, new, sequences, step, used_driver
from test_state_space import (  # noqa: F401  # run here with this backend
    test_a_snapshot_continues_like_the_sequence_it_was_taken_of,
)
from tiny import Sequence, same_bits

from quire.backends.native.backend import NativeBackend
from quire.program import Names
from quire.types import Snapshot

W = Names("w")
# (groups, heads, numbers of a state for each channel, channels of a head)
SHAPES = ((1, 1, 1, 1), (2, 4, 3, 5), (1, 9, 17, 16), (2, 2, 16, 33), (1, 10, 30, 64), (1, 1, 64, 130))


@cache
def one_op(shape: tuple[int, int, int, int]) -> OneOp:
    groups, heads, state_dim, dim = shape
    rng, width = np.random.default_rng(shape), heads * dim + 2 * groups * state_dim
    x, length = (rng.standard_normal((SPOILT + 1, n)).astype(np.float32) for n in (width, heads))
    x[SPOILT] = length[SPOILT] = np.nan
    return OneOp([x, length], lambda b, x, s: b.state_space(x, s, W, groups, state_dim, (0.05, 1.5)))


@cache
def alone(shape: tuple[int, int, int, int], isa: str) -> list[np.ndarray]:
    """Each sequence as one row, by one thread."""
    paged = new(one_op(shape), isa, 1)
    return [step(paged, [(sequence, len(sequence.token_ids))])[0] for sequence in sequences(paged)]


@pytest.mark.parametrize("isa", ISAS)
def test_numbers_are_those_of_the_reference(isa: str) -> None:
    for shape in SHAPES:
        paged = on_reference(one_op(shape).program, one_op(shape).checkpoint(), "f32")
        rows = [(sequence, len(sequence.token_ids)) for sequence in sequences(paged)]
        for found, expected in zip(alone(shape, isa), paged.step(rows), strict=True):
            assert distance(found, expected) < 1e-5, shape


@pytest.mark.parametrize("isa", ISAS)
def test_bits_are_the_same_in_any_schedule(isa: str) -> None:
    for seed, shape in enumerate(SHAPES):
        assert all_same(chunked(new(one_op(shape), isa, 2), seed), alone(shape, isa)), shape


@pytest.mark.parametrize("isa", ISAS)
def test_snapshots_of_one_row(isa: str) -> None:
    """Several of the same row, at its end too; each is then restored beside a row that takes its place."""
    borders = (16, 64, 80, 128, 144, 192, 200)
    for shape in SHAPES[1:3]:
        paged, wanted = new(one_op(shape), isa), alone(shape, isa)
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


@pytest.fixture(autouse=True, scope="module")
def _on_native() -> Iterator[None]:
    """Let tests of the reference drive this backend."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (test_state, test_state_space):
            patch.setattr(module, "drive", used_driver)
        yield


def test_what_is_imported_runs_here() -> None:
    assert isinstance(test_state_space.drive(test_state_space.hybrid()).backend, NativeBackend)
