"""Attention over cached latents, in formats of caches and weights: see test_whole_models.py for families."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from lowered import distance, rounding_to_bf16
from on_accelerator import interpreted, wide
from test_attention_kernels import BF16, BLOCK, F32, INT8, PRECISION, Rows, normal, placed, rows_of
from test_whole_models import TOKENS, in_parts, stored
from tiny import Paged, same_bits

from quire.backends.cuda import interpreter
from quire.backends.cuda.kernels import latent, segments
from quire.backends.cuda.latent import _tile
from quire.backends.cuda.step_arrays import row_tiles
from quire.program.ops.context import Context, attend
from quire.program.passes import fuse

HEADS, ROPE, RANK, SCALE = 20, 24, 40, 0.2
MIXED = rows_of((1100, 2), (513, 1), (70, 6), (3, 3))


@pytest.mark.parametrize(
    ("cache", "format", "most"),
    [("bfloat16", "bf16", 3e-2), ("int8", "int8", 8e-2), ("float32", "int4", 2e-5)],
)
def test_formats(cache: str, format: str, most: float) -> None:
    """Numbers near those of the reference, and the same bits in chunks beside another row."""
    program = fuse(wide("minicpm3").program)
    weights, prompts = stored(program, format), [TOKENS[:9], TOKENS[40:43]]
    with rounding_to_bf16(format == "bf16"):
        reference = Paged(program, weights, kv_cache_dtype="bfloat16" if cache == "bfloat16" else "float32")
        wanted = reference.prefill(reference.sequence(prompts[0]))
    whole = Paged(program, weights, kv_cache_dtype=cache, make=interpreted)
    first = whole.prefill(whole.sequence(prompts[0]))
    apart = distance(first, wanted)
    assert apart < most
    assert (apart > 1e-4) == (cache != "float32")
    parts = Paged(program, weights, kv_cache_dtype=cache, block_size=4, make=interpreted, seed=1)
    chunked, _ = in_parts(parts, prompts, [(3, 1, 5), (1, 1, 1)])
    assert same_bits(chunked, first)


class Case:
    """Queries over cached latents of some rows, and the results of kernels and of the definition."""

    def __init__(self, rows: Rows, dtype: np.dtype[Any]) -> None:
        self.rows, self.dtype = rows, dtype
        past = Rows(rows.context_lens, rows.context_lens)  # the same blocks, written in one go
        count = len(past.positions)
        self.caches = placed(past, normal(1, count, 1, ROPE), normal(2, count, 1, RANK), dtype)
        self.q, self.q_rope = (
            normal(0, len(rows.positions), HEADS, RANK),
            normal(3, len(rows.positions), HEADS, ROPE),
        )

    def wanted(self) -> np.ndarray:
        ropes, latents, rope_scales, latent_scales = (cache.astype(np.float32) for cache in self.caches)
        if self.dtype == INT8:
            ropes, latents = ropes * rope_scales[..., None], latents * latent_scales[..., None]
        keys, q = np.concatenate([latents, ropes], -1), np.concatenate([self.q, self.q_rope], -1)
        q = q if PRECISION[self.dtype] != "bf16" else q.astype(BF16).astype(np.float32)
        out = np.empty_like(self.q)
        for row, (begin, end) in enumerate(pairwise(self.rows.offsets.tolist())):
            context = Context(keys, latents, self.rows.tables[row], int(self.rows.context_lens[row]))
            out[begin:end] = attend(q[begin:end], self.rows.positions[begin:end].astype(int), context, SCALE)
        return out

    @property
    def _where(self) -> list[Any]:
        rows = self.rows
        place = [rows.positions, rows.token_rows, rows.tables, rows.tables.shape[1]]
        return [self.q, self.q_rope, *self.caches, *place]

    @property
    def _constants(self) -> dict[str, Any]:
        kind = {"SCALED": self.dtype == INT8, "PRECISION": PRECISION[self.dtype]}
        return kind | {"ROPE": 32, "RANK": 64}

    def attended(self, block: int, tokens: int, heads: int, **how: int) -> np.ndarray:
        """Return the result of programs of so many rows, which have these tokens and heads."""
        out = np.full_like(self.q, np.nan)
        tiles = row_tiles(self.rows.token_rows, tokens).astype(np.int32)
        sizes = [tiles, heads, HEADS, ROPE, RANK, BLOCK, SCALE]
        grid = (len(tiles) - 1, -(-HEADS // heads))
        constants = self._constants | {"BLOCK_M": block} | how
        interpreter.run(latent.attend_latent, grid, [out, *self._where, *sizes], constants)
        return out

    def by_segments(self, programs: int) -> np.ndarray:
        """Return the result of segments computed by so many programs, and merged."""
        rows, count = self.rows, len(self.q)
        most = count * (int(rows.context_lens.max()) // 512 + 1)
        items, firsts = np.zeros((most, 2), np.int32), np.zeros(count + 1, np.int32)
        interpreter.run(
            segments.list_segments, (1,), [items, firsts, rows.positions, count, 0, 0], {"BLOCK": 16}
        )
        partial, stats = (np.full((most, HEADS, width), np.nan, np.float32) for width in (RANK, 2))
        args = [partial, stats, items, firsts, *self._where, count, 10, HEADS, ROPE, RANK, BLOCK, SCALE]
        constants = self._constants | {"BLOCK_M": 16}
        interpreter.run(latent.attend_latent_segments, (programs, 2), args, constants)
        out = np.full_like(self.q, np.nan)
        args = [out, partial, stats, firsts, np.zeros(1, np.float32), HEADS, RANK, 0]
        interpreter.run(segments.merge_segments, (count, HEADS), args, {"VALUE_DIM": 64})
        return out


@pytest.mark.parametrize(("dtype", "most"), [(F32, 2e-6), (BF16, 0.02), (INT8, 0.02)], ids=str)
def test_rows_of_several_sequences(dtype: np.dtype[Any], most: float) -> None:
    """Tiles of tokens and heads, in programs of any size: equal bits, those of one token."""
    case = Case(MIXED, dtype)
    found = case.attended(64, 3, 20)
    assert np.abs(found - case.wanted()).max() < most
    assert (case.attended(16, 1, 10) == found).all()
    assert (case.attended(16, 1, 16) == found).all()
    assert (case.attended(64, 3, 20, AT_ONCE=16) == found).all()


def test_segments_apart_give_the_bits_of_one_program() -> None:
    case = Case(rows_of((1100, 1), (513, 1), (512, 1), (7, 1)), BF16)
    together = case.attended(16, 1, 10)
    assert np.abs(together - case.wanted()).max() < 0.02
    assert (case.by_segments(programs=1) == together).all()
    assert (case.by_segments(programs=3) == together).all()


@pytest.mark.parametrize(
    ("heads", "many", "few"),
    [(5, (12, 5), (3, 5)), (16, (4, 16), (1, 16)), (20, (3, 20), (1, 10)), (128, (1, 64), (1, 16))],
)
def test_tiles(heads: int, many: tuple[int, int], few: tuple[int, int]) -> None:
    """All heads of some tokens, or equal parts of the heads of one."""
    assert (_tile(heads, 64), _tile(heads, 16)) == (many, few)
