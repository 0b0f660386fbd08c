"""Delta rules that decay by channel on the native backend: numbers of the reference, the same bits in every
schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import test_delta
import test_delta_by_channel
import test_state
from lowered import ISAS, OneOp
from state_ops import check_numbers, check_schedules, check_snapshots
from test_delta import (  # noqa: F401  # run here with this backend
    test_a_snapshot_continues_like_the_sequence_it_was_taken_of,
    test_any_chunking_gives_the_same_bits,
    test_rejected_drafts_leave_no_trace,
)
from test_native_state import SPOILT, used_driver

from quire.backends.native.backend import NativeBackend
from quire.program import Builder, Names, Value

W = Names("w")
# (heads of keys, heads of values, numbers of a key, of a value)
SHAPES = ((1, 1, 2, 1), (2, 4, 3, 5), (1, 3, 17, 16), (2, 2, 16, 33), (1, 2, 30, 64), (1, 1, 64, 130))


@cache
def one_op(shape: tuple[int, int, int, int]) -> OneOp:
    """Of some channels nothing is left after a position, of others most after a chunk."""
    key_heads, heads, dk, dv = shape
    rng, keys = np.random.default_rng(shape), key_heads * dk
    widths = (keys, keys, heads * dv, heads * dk, heads)
    q, k, v, decay, beta = (rng.standard_normal((SPOILT + 1, n)).astype(np.float32) for n in widths)
    decay = decay * 3 + np.linspace(-9, 60, heads * dk, dtype=np.float32)
    for x in (q, k, v, decay, beta):
        x[SPOILT] = np.nan

    def record(b: Builder, q: Value, k: Value, v: Value, decay: Value, beta: Value) -> Value:
        by_channel = b.slice(decay, 0, (heads, dk))
        return b.delta_rule((q, k, v), by_channel, beta, W, key_heads, dk, beta_factor=2.0)

    return OneOp([q, k, v, decay, beta], record)


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


# Whole programs


@pytest.fixture(autouse=True, scope="module")
def _on_native() -> Iterator[None]:
    """Let tests of the reference drive this backend, with programs that decay by channel."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (test_state, test_delta):
            patch.setattr(module, "drive", used_driver)
        patch.setattr(test_delta, "hybrid", test_delta_by_channel.hybrid)
        yield


def test_what_is_imported_runs_here() -> None:
    assert isinstance(test_delta.drive(test_delta.hybrid()).backend, NativeBackend)
    assert test_delta.hybrid() == test_delta_by_channel.hybrid()
