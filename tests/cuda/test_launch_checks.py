"""The checks of launches find what they are for (launch_checks)."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
import pytest
from launch_checks import LaunchChecks

from quire.backends.cuda import interpreter

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def sum_neighbours(out, x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(x + at + 1, mask=inside), mask=inside)


@triton.jit
def turn(out, x, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + at, tl.load(x + BLOCK - 1 - at))


@triton.jit
def put(out, places, values, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.load(places + at), tl.load(values + at))


@triton.jit
def pass_on(x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at + BLOCK, tl.load(x + at) + 1)


def launch(kernel: object, grid: int, *args: object, **constants: object) -> None:
    interpreter.run(kernel, (grid, 1, 1), args, {"BLOCK": 4, **constants})


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    LaunchChecks(monkeypatch)


def numbers(*found: int) -> np.ndarray:
    return np.array(found, np.int32)


def test_an_access_beyond_an_array() -> None:
    x, out = np.arange(9, dtype=np.int32), np.zeros(8, np.int32)
    launch(sum_neighbours, 2, out, x, 8)
    assert out.tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
    with pytest.raises(Exception, match="sum_neighbours accesses memory that is in none of its arrays"):
        launch(sum_neighbours, 2, out, x[:8].copy(), 8)
    with pytest.raises(Exception, match="none of its arrays"):
        launch(sum_neighbours, 2, out[:7].copy(), x, 8)


def test_what_other_threads_wrote_is_behind_a_barrier() -> None:
    x, out = numbers(1, 2, 3, 4), np.zeros(4, np.int32)
    launch(turn, 1, out, x, BARRIER=True)
    assert out.tolist() == [5, 4, 3, 2]
    with pytest.raises(Exception, match="turn reads what its program wrote, without a barrier between"):
        launch(turn, 1, out, x, BARRIER=False)


@pytest.mark.parametrize(
    ("places", "who"), [((0, 1, 2, 2, 4, 5, 6, 7), "threads"), ((0, 1, 2, 3, 3, 5, 6, 7), "programs")]
)
def test_one_place_has_one_value(places: tuple[int, ...], who: str) -> None:
    out, same = np.zeros(8, np.int32), np.ones(8, np.int32)
    launch(put, 2, out, numbers(*places), same)
    with pytest.raises(Exception, match=f"{who} write different values to one place, in put"):
        launch(put, 2, out, numbers(*places), np.arange(8, dtype=np.int32))


def test_programs_do_not_read_what_others_write() -> None:
    with pytest.raises(Exception, match="a program of pass_on reads what another one writes"):
        launch(pass_on, 2, np.zeros(12, np.int32))
    launch(pass_on, 1, np.zeros(8, np.int32))
