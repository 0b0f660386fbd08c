"""Mamba-2's state space on the native backend: numbers of the reference, the same bits in every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import test_state
import test_state_space
from lowered import ISAS, OneOp
from state_ops import check_numbers, check_schedules, check_snapshots
from test_native_state import SPOILT, used_driver
from test_state_space import (  # noqa: F401  # run here with this backend
    test_a_snapshot_continues_like_the_sequence_it_was_taken_of,
)

from quire.backends.native.backend import NativeBackend
from quire.program import Names

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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_are_those_of_the_reference(shape: tuple[int, int, int, int], isa: str) -> None:
    check_numbers(one_op(shape), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_the_same_in_any_schedule(shape: tuple[int, int, int, int], isa: str) -> None:
    check_schedules(one_op(shape), isa, SHAPES.index(shape))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_snapshots_of_one_row(shape: tuple[int, int, int, int], isa: str) -> None:
    check_snapshots(one_op(shape), isa)


@pytest.fixture(autouse=True, scope="module")
def _on_native() -> Iterator[None]:
    """Let tests of the reference drive this backend."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (test_state, test_state_space):
            patch.setattr(module, "drive", used_driver)
        yield


def test_what_is_imported_runs_here() -> None:
    assert isinstance(test_state_space.drive(test_state_space.hybrid()).backend, NativeBackend)
