"""Rotary position embedding as an op; the frequencies are in quire.program.rope."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.program.numerics import Array
from quire.program.program import Load, Op, Run, Value
from quire.program.rope import Rope


@dataclass(frozen=True, slots=True)
class Rotary(Op):
    """out = x [T, heads, head_dim] with the first rope.dim numbers of each head rotated by position.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin).
    """

    x: Value
    rope: Rope

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
        first, second = self._pairs()
        out = inputs[0].copy()
        a, b = inputs[0][..., first], inputs[0][..., second]
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        return out

    def _pairs(self) -> tuple[slice, slice]:
        dim = self.rope.dim
        if self.rope.interleaved:
            return slice(0, dim, 2), slice(1, dim, 2)
        return slice(0, dim // 2), slice(dim // 2, dim)
