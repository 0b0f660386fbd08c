"""Rotary position embedding as an op; the frequencies are in quire.program.rope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.numerics import Array
from quire.program.program import Load, Op, Run, Value
from quire.program.rope import Rope


@dataclass(frozen=True, slots=True)
class Rotary(Op):
    """out = x [T, heads, head_dim] with rope.dim numbers of each head, from `first` on, rotated by position.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin); with `inverse` it is rotated back, by sin negated.
    """

    x: Value
    rope: Rope
    first: int = 0
    inverse: bool = False

    def flops(self, load: Load) -> float:
        return 3 * load.size(self.out.count) * self.x.shape[0] * self.rope.dim

    def reference(self, run: Run, *inputs: np.ndarray) -> Array:
        batch = run.batch
        if self.rope not in batch.memo:
            variants = batch.variants[batch.token_rows]
            three = batch.rotary_positions if self.rope.sections else None
            batch.memo[self.rope] = self.rope.cos_sin(batch.positions if three is None else three, variants)
        rows = slice(None) if self.x.count == "T" else batch.logit_rows
        cos, sin = (part[rows, None, :] for part in batch.memo[self.rope])
        if self.inverse:
            sin = -sin
        first, second = self._pairs()
        out = inputs[0].copy()
        a, b = inputs[0][..., first], inputs[0][..., second]
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        return out

    def _pairs(self) -> tuple[slice, slice]:
        first, half = self.first, self.rope.dim // 2
        end = first + 2 * half
        if self.rope.interleaved:
            return slice(first, end, 2), slice(first + 1, end, 2)
        return slice(first, first + half), slice(first + half, end)
