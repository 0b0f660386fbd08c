"""One op with a state by itself: its rows in any chunks, and its cost against what it reads and keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import pairwise

import numpy as np
from tiny import Sequence, batch_of, same_bits

from quire.program import Builder, Load, Names, Value
from quire.program.ops.slot_states import States
from quire.program.program import Run

W = Names("w")
NUM_TOKENS = 300


class OneOp:
    """One op over inputs that are fixed by position, [NUM_TOKENS, n] each. Its states are empty at first."""

    def __init__(
        self,
        record: Callable[..., Value],
        inputs: list[np.ndarray],
        weights: Mapping[str, np.ndarray],
    ) -> None:
        b = Builder()
        h = b.embed(W / "e", 4, 4)
        program = b.program(
            record(b, *(b.linear(h, W / f"{i}", array.shape[1]) for i, array in enumerate(inputs)))
        )
        self.op = program.ops[-1]
        self.inputs, self.weights = inputs, weights
        self.states = States.empty(program.caches[0], 2, 2)

    def run(self, start: int, count: int) -> np.ndarray:
        sequence = Sequence([0] * NUM_TOKENS, [0] * 5, computed=start, slot=0)
        run = Run(batch_of([(sequence, count)], 64), self.weights, [self.states], [0])
        return self.op.reference(run, *(array[start : start + count] for array in self.inputs))


def check_ends(make: Callable[[], OneOp], ends: list[int]) -> None:
    """Compare rows that end anywhere with one row."""
    one = make()
    parts = [one.run(start, end - start) for start, end in pairwise([0, *ends])]
    assert same_bits(np.concatenate(parts), make().run(0, NUM_TOKENS))


def check_kv_bytes(one: OneOp, row: tuple[int, int]) -> None:
    """Numbers are read when NaN in their place shows in the output, and kept when they change."""
    read = 0
    if row[0]:
        one.run(0, row[0])
    before = deepcopy(one.states)
    for name in ("borders", "inputs"):
        for place in range(getattr(before, name).shape[1]):
            one.states = deepcopy(before)
            spoilt = getattr(one.states, name)[0, place]
            spoilt[:] = np.nan
            read += spoilt.nbytes * bool(np.isnan(one.run(*row)).any())
    one.states = deepcopy(before)
    one.run(*row)
    pairs = ((before.borders, one.states.borders), (before.inputs, one.states.inputs))
    written = sum(4 * np.count_nonzero(old != new) for old, new in pairs)
    assert one.op.kv_bytes(Load((row,), 1)) == (read, written)
