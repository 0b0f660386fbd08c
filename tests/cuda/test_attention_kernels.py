"""Rotation, writes of keys and values, and attention in Triton's interpreter, against the references."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quire.backends.cuda import interpreter
from quire.backends.cuda.kernels import attention, rope_and_kv, segments
from quire.backends.cuda.step_arrays import row_tiles
from quire.program.ops.context import Context, attend
from quire.program.rope import Rope

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
INT8 = np.dtype(np.int8)
PRECISION = {BF16: "bf16", INT8: "bf16", F16: "tf32", F32: "ieee"}
BLOCK = 16


@dataclass
class Rows:
    """Rows of tokens over a paged cache with shuffled blocks, as a step has them."""

    context_lens: np.ndarray
    new: np.ndarray  # tokens of each row in this step

    def __post_init__(self) -> None:
        lens, new = self.context_lens, self.new
        self.token_rows = np.repeat(np.arange(len(new)), new).astype(np.int32)
        spans = [np.arange(end - count, end) for end, count in zip(lens, new, strict=True)]
        self.positions = np.concatenate(spans).astype(np.int32)
        self.offsets = np.concatenate([[0], np.cumsum(new)])
        stride = -(-int(lens.max()) // BLOCK)
        ids = np.random.default_rng(9).permutation(stride * len(new))
        self.tables = ids.reshape(len(new), stride).astype(np.int32)
        self.num_blocks = len(ids)


def rows_of(*pairs: tuple[int, int]) -> Rows:
    """Return rows given as (tokens in the cache after the step, tokens of the step)."""
    lens, new = zip(*pairs, strict=True)
    return Rows(np.array(lens, np.int32), np.array(new, np.int32))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


@pytest.mark.parametrize(
    ("dim", "rotated", "interleaved"), [(32, 32, False), (24, 16, False), (20, 12, True)]
)
def test_rotary(dim: int, rotated: int, interleaved: bool) -> None:
    rope, positions = Rope(rotated, 10000.0, interleaved), np.array([0, 5, 1000])
    cos, sin = rope.cos_sin(positions, np.zeros(3, np.int64))
    x, out = normal(0, 3, 2, dim), np.empty((3, 2, dim), np.float32)
    constants = {"ROPE": "interleaved" if interleaved else "halves", "DIM": padded(dim)}
    interpreter.run(rope_and_kv.rotary, (3, 2), [out, x, cos, sin, 2, dim, rotated], constants)
    assert (out == rotated_by(x, rope, cos, sin)).all()


def rotated_by(x: np.ndarray, rope: Rope, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Return what ops.Rotary does."""
    half, dim = rope.dim // 2, rope.dim
    first, second = (
        (slice(0, dim, 2), slice(1, dim, 2)) if rope.interleaved else (slice(half), slice(half, dim))
    )
    out, a, b = x.copy(), x[..., first], x[..., second]
    out[..., first] = a * cos[:, None] - b * sin[:, None]
    out[..., second] = b * cos[:, None] + a * sin[:, None]
    return out


def written(rows: Rows, k: np.ndarray, v: np.ndarray, dtype: np.dtype[Any]) -> tuple[np.ndarray, ...]:
    """Return caches filled by write_kv: keys, values and their scales."""
    groups, dim, value_dim = k.shape[1], k.shape[2], v.shape[2]
    keys = np.zeros((rows.num_blocks, BLOCK, groups, dim), dtype)
    values = np.zeros((rows.num_blocks, BLOCK, groups, value_dim), dtype)
    scales = np.zeros((2, rows.num_blocks, BLOCK, groups), np.float32)
    where = [rows.positions, rows.token_rows, rows.tables, rows.tables.shape[1]]
    args = [keys, values, scales[0], scales[1], k, v, *where, groups, dim, value_dim, BLOCK]
    constants = {"DIM": padded(dim), "VALUE_DIM": padded(value_dim), "SCALED": dtype == INT8}
    interpreter.run(rope_and_kv.write_kv, (len(k), groups), args, constants)
    return keys, values, scales[0], scales[1]


def placed(rows: Rows, k: np.ndarray, v: np.ndarray, dtype: np.dtype[Any]) -> tuple[np.ndarray, ...]:
    """Return what `written` does of finite numbers, without the kernel."""
    parts = [rounded(x) if dtype == INT8 else (x.astype(dtype), np.zeros(x.shape[:2], "f4")) for x in (k, v)]
    caches = []
    for part in (parts[0][0], parts[1][0], parts[0][1], parts[1][1]):
        cache = np.zeros((rows.num_blocks, BLOCK, *part.shape[1:]), part.dtype)
        cache[rows.tables[rows.token_rows, rows.positions // BLOCK], rows.positions % BLOCK] = part
        caches.append(cache)
    return tuple(caches)


def gathered(rows: Rows, cache: np.ndarray) -> np.ndarray:
    """Return what a cache has for each token."""
    block = rows.tables[rows.token_rows, rows.positions // BLOCK]
    return cache[block, rows.positions % BLOCK]


@pytest.mark.parametrize("dtype", [F32, BF16, F16, INT8], ids=str)
def test_write_kv(dtype: np.dtype[Any]) -> None:
    rows = rows_of((20, 20), (5, 5))
    k, v = normal(0, 25, 2, 24), normal(1, 25, 2, 20)
    v[3, 0, 2], v[7, 1, 0], k[9, 1, 1] = np.nan, np.inf, np.nan
    caches = written(rows, k, v, dtype)
    keys, values, key_scales, value_scales = (gathered(rows, cache) for cache in caches)
    lost = np.zeros((25, 2), bool)
    lost[3, 0] = lost[7, 1] = True
    if dtype == INT8:
        k, v = k.copy(), np.where(lost[..., None], 0, v)
        wanted_keys, wanted_scales = rounded(k)
        unusable = lost | ~np.isfinite(k).all(-1)
        assert np.isnan(key_scales[unusable]).all()
        assert (keys[unusable] == 0).all()
        assert (keys == wanted_keys)[~unusable].all()
        assert (key_scales == wanted_scales)[~unusable].all()
        wanted_values, wanted_scales = rounded(v)
        assert (values == wanted_values).all()
        assert (value_scales == wanted_scales).all()
        return
    assert np.isnan(keys[lost].astype(np.float32)).all()
    assert (values[lost] == 0).all()
    for found, wanted in ((keys, k), (values, v)):
        assert np.array_equal(
            found[~lost].astype("f4"), wanted.astype(dtype)[~lost].astype("f4"), equal_nan=True
        )


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 vectors and their scales, largest / 127."""
    largest = np.abs(x).max(-1)
    with np.errstate(all="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
        return np.rint(x * inverse[..., None]).astype(np.int8), (largest / np.float32(127)).astype(np.float32)


@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_kv_in_one(norm: bool) -> None:
    rows, rope = rows_of((18, 2), (3, 3)), Rope(24, 10000.0)
    cos, sin = rope.cos_sin(rows.positions, np.zeros(5, np.int64))
    q, k, v = normal(0, 5, 4, 24), normal(1, 5, 2, 24), normal(2, 5, 2, 16)
    q_weight, k_weight = normal(3, 24), normal(4, 24)
    keys = np.zeros((rows.num_blocks, BLOCK, 2, 24), BF16)
    values, out = np.zeros((rows.num_blocks, BLOCK, 2, 16), BF16), np.empty_like(q)
    where = [rows.positions, rows.token_rows, rows.tables, rows.tables.shape[1]]
    args = [out, keys, values, keys, values, q, k, v, q_weight, k_weight, cos, sin, *where]
    constants = {"NORM": norm, "ROPE": "halves", "DIM": 32, "VALUE_DIM": 16, "SCALED": False}
    sizes = [4, 2, 24, 16, 24, BLOCK, 1e-6, 1.0]
    interpreter.run(rope_and_kv.rope_and_kv, (5, 6), [*args, *sizes], constants)
    if norm:
        q, k = (normed(x, w) for x, w in ((q, q_weight), (k, k_weight)))
    wanted = rotated_by(q, rope, cos, sin)
    assert np.abs(out - wanted).max() <= (4e-6 if norm else 0)
    turned = rotated_by(k, rope, cos, sin)
    found = gathered(rows, keys).astype(np.float32)
    assert np.abs(found - turned).max() <= 0.02 if norm else (found == turned.astype(BF16)).all()
    assert (gathered(rows, values) == v.astype(BF16)).all()


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(1e-6)) * (weight + 1)


@dataclass(frozen=True)
class How:
    """Parameters of an attention."""

    window: int = 0
    chunked: bool = False
    softcap: float = 0.0
    sinks: bool = False


@dataclass
class Case:
    """Queries over a cache with everything written, and the result of the reference."""

    rows: Rows
    how: How
    dtype: np.dtype[Any]
    heads: int = 6
    groups: int = 2
    dim: int = 24
    value_dim: int = 20

    def __post_init__(self) -> None:
        rows, (heads, groups) = self.rows, (self.heads, self.groups)
        past = Rows(rows.context_lens, rows.context_lens)  # the same blocks, written in one go
        count = len(past.positions)
        self.k, self.v = normal(1, count, groups, self.dim), normal(2, count, groups, self.value_dim)
        self.caches = placed(past, self.k, self.v, self.dtype)
        self.q = normal(0, len(rows.positions), heads, self.dim)
        self.sinks = normal(3, heads)

    def wanted(self) -> np.ndarray:
        keys, values, key_scales, value_scales = (cache.astype(np.float32) for cache in self.caches)
        if self.dtype == INT8:
            keys, values = keys * key_scales[..., None], values * value_scales[..., None]
        q = self.q if PRECISION[self.dtype] != "bf16" else self.q.astype(BF16).astype(np.float32)
        out, how = np.empty((*self.q.shape[:2], self.value_dim), np.float32), self.how
        for row, (begin, end) in enumerate(pairwise(self.rows.offsets.tolist())):
            context = Context(keys, values, self.rows.tables[row], int(self.rows.context_lens[row]))
            sinks = self.sinks if how.sinks else None
            args = (0.2, how.window or None, how.softcap or None, sinks, how.chunked)
            out[begin:end] = attend(q[begin:end], self.rows.positions[begin:end].astype(int), context, *args)
        return out

    @property
    def _sizes(self) -> list[Any]:
        widths = [self.heads, self.groups, self.dim, self.value_dim, BLOCK]
        return [*widths, self.how.window, int(self.how.chunked)]

    @property
    def _constants(self) -> dict[str, Any]:
        dims = {"DIM": padded(self.dim), "VALUE_DIM": padded(self.value_dim)}
        kind = {"SCALED": self.dtype == INT8, "PRECISION": PRECISION[self.dtype]}
        return {"CAP": self.how.softcap > 0} | kind | dims

    def attended(self, tokens: int) -> np.ndarray:
        """Return the result of `attend` with so many tokens a program."""
        rows, out, how = self.rows, np.empty((len(self.q), self.heads, self.value_dim), np.float32), self.how
        tiles = row_tiles(rows.token_rows, tokens).astype(np.int32)
        where = [rows.positions, rows.token_rows, rows.positions, rows.context_lens, rows.tables]
        flags = [0, int(how.sinks), 0.2, how.softcap]
        args = [out, self.q, *self.caches, self.sinks, *where, rows.tables.shape[1], tiles]
        grid = (len(tiles) - 1, self.groups)
        interpreter.run(
            attention.attend, grid, [*args, *self._sizes, *flags], self._constants | {"BLOCK_M": 16}
        )
        return out

    def by_segments(self, programs: int) -> np.ndarray:
        """Return the result of segments computed by so many programs, and merged."""
        rows, count, how = self.rows, len(self.q), self.how
        most = count * (int(rows.context_lens.max()) // 512 + 1)
        items, firsts = np.zeros((most, 2), np.int32), np.zeros(count + 1, np.int32)
        listed = [items, firsts, rows.positions, count, how.window, int(how.chunked)]
        interpreter.run(segments.list_segments, (1,), listed, {"BLOCK": 16})
        partial = np.full((most, self.heads, self.value_dim), np.nan, np.float32)
        stats = np.full((most, self.heads, 2), np.nan, np.float32)
        where = [rows.positions, rows.token_rows, rows.tables, rows.tables.shape[1], count]
        args = [partial, stats, items, firsts, self.q, *self.caches, *where, *self._sizes, 0.2, how.softcap]
        constants = self._constants | {"BLOCK_M": 16}
        interpreter.run(segments.attend_segments, (programs, self.groups), args, constants)
        out = np.empty((count, self.heads, self.value_dim), np.float32)
        args = [out, partial, stats, firsts, self.sinks, self.heads, self.value_dim, int(how.sinks)]
        interpreter.run(
            segments.merge_segments, (count, self.heads), args, {"VALUE_DIM": padded(self.value_dim)}
        )
        return out


HOWS = [How(), How(window=40), How(window=96, chunked=True), How(softcap=2.0), How(window=70, sinks=True)]


@pytest.mark.parametrize(
    ("how", "dtype"),
    [*((how, F32) for how in HOWS), (How(), BF16), (How(softcap=2.0), BF16), (HOWS[-1], INT8)],
    ids=str,
)
def test_attend_mixed_rows(how: How, dtype: np.dtype[Any]) -> None:
    """A decode row, a chunk and a whole prompt in one step."""
    case = Case(rows_of((100, 1), (70, 6), (3, 3), (65, 2)), how, dtype)
    most = 2e-6 if dtype == F32 else 0.02
    assert np.abs(case.attended(tokens=4) - case.wanted()).max() < most


@pytest.mark.parametrize(
    ("rows", "most", "tiles"),
    [
        ([0, 0, 0, 0, 0, 1, 2, 2], 2, [0, 2, 4, 5, 6, 8]),
        ([3, 1, 2], 16, [0, 1, 2, 3]),
        ([0, 0, 4, 4], 9, [0, 2, 4]),
        ([], 4, [0]),
    ],
)
def test_tiles_have_tokens_of_one_row(rows: list[int], most: int, tiles: list[int]) -> None:
    assert row_tiles(np.array(rows, int), most).tolist() == tiles


def test_tokens_of_an_image_see_its_end() -> None:
    case = Case(rows_of((40, 6)), How(), F32)
    ends = case.rows.positions + 1
    ends[1:4] = 38  # positions 35 to 37
    out, rows = np.empty((6, 6, 20), np.float32), case.rows
    where = [
        rows.positions,
        rows.token_rows,
        ends,
        rows.context_lens,
        rows.tables,
        rows.tables.shape[1],
        np.array([0, 4, 6], np.int32),
    ]
    args = [out, case.q, *case.caches, case.sinks, *where, *case._sizes, 1, 0, 0.2, 0.0]
    interpreter.run(attention.attend, (2, 2), args, case._constants | {"BLOCK_M": 16})
    context = Context(case.caches[0], case.caches[1], rows.tables[0], 40)
    wanted = attend(case.q, rows.positions.astype(int), context, 0.2, ends=ends)
    assert np.abs(out - wanted).max() < 2e-6


def test_attend_over_segments() -> None:
    case = Case(rows_of((1100, 2), (513, 1)), How(sinks=True), F32)
    assert np.abs(case.attended(tokens=4) - case.wanted()).max() < 2e-6


@pytest.mark.parametrize("how", [How(), How(window=600, sinks=True)], ids=str)
def test_segments_apart_give_the_bits_of_one_program(how: How) -> None:
    case = Case(rows_of((1100, 1), (513, 1), (512, 1), (7, 1)), how, BF16)
    together = case.attended(tokens=1)
    assert np.abs(together - case.wanted()).max() < 0.02
    assert (case.by_segments(programs=1) == together).all()
    assert (case.by_segments(programs=3) == together).all()


def test_nan_is_seen_by_those_that_see_it() -> None:
    case = Case(rows_of((70, 8)), How(), F32)
    clean = case.attended(tokens=4)
    keys = case.caches[0]
    block = case.rows.tables[0, 66 // BLOCK]
    keys[block, 66 % BLOCK, 1] = np.nan  # position 66, group 1
    found = case.attended(tokens=4)
    seen = np.zeros(found.shape, bool)
    seen[case.rows.positions >= 66, 3:] = True  # heads 3 to 5 read group 1
    assert np.isnan(found[seen]).all()
    assert (found[~seen] == clean[~seen]).all()
