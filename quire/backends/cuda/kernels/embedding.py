"""Rows of tables: embeddings of tokens or positions, and the rows that need logits."""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.coded_parts import (
    floats_of,
    integers_of,
    numbers_of,
    plane_bytes,
    plane_code,
    values_of,
)
from quire.backends.cuda.kernels.tiles import bits_of, padded


@triton.jit
def gather_rows(out, rows, table, count, width, BLOCK: tl.constexpr):
    """out[t] = table[rows[t]], converted to the format of out: table [count, width], rows int32 [T].

    A row beyond the table is row 0. Grid (T, width / BLOCK). Reads and writes each number once; no sums.
    """
    token = tl.program_id(0)
    row = tl.load(rows + token)
    row = tl.where((row >= 0) & (row < count), row, 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(table + row * width + column, mask=inside).to(tl.float32)
    tl.store(out + token.to(tl.int64) * width + column, values, mask=inside)


@triton.jit
def _scaled(q, scales, channels, row, column, inside, count):
    """Return channel * block scale * q, in this order, as GroupWeight.dense does."""
    at = (column // 32).to(tl.int64) * padded(count) + row
    scale = tl.load(scales + at, mask=inside, other=0).to(tl.float32)
    return (tl.load(channels + row) * scale) * q.to(tl.float32)


@triton.jit
def gather_int8_rows(out, rows, values, scales, channels, count, width, BLOCK: tl.constexpr):
    """out[t] = row rows[t] of an Int8 weight in the layout of its products (packing.PackedIntegers).

    values int8 [count, spans * 128], scales int8 [spans * 4, padded(count)], channels float32 [count].
    Grid as above.
    """
    token = tl.program_id(0)
    row = tl.load(rows + token)
    row = tl.where((row >= 0) & (row < count), row, 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    q = tl.load(values + row * (tl.cdiv(width, 128) * 128) + column, mask=inside, other=0)
    wide = _scaled(q, scales, channels, row, column, inside, count)
    tl.store(out + token.to(tl.int64) * width + column, wide, mask=inside)


@triton.jit
def gather_int4_rows(out, rows, values, scales, channels, count, width, BLOCK: tl.constexpr):
    """out[t] = row rows[t] of an Int4 weight: values uint8 [count, spans * 64], by pairs of groups."""
    token = tl.program_id(0)
    row = tl.load(rows + token)
    row = tl.where((row >= 0) & (row < count), row, 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = values + row * (tl.cdiv(width, 128) * 64) + column // 64 * 32 + column % 32
    byte = tl.load(at, mask=inside, other=0).to(tl.int32)
    q = ((byte >> (column % 64 // 32 * 4)) & 15) - 8
    wide = _scaled(q, scales, channels, row, column, inside, count)
    tl.store(out + token.to(tl.int64) * width + column, wide, mask=inside)


@triton.jit
def gather_coded_rows(
    out,
    rows,
    low,
    high,
    scales,
    scale_codes,
    minimums,
    minimum_codes,
    table,
    count,
    width,
    group,
    block,
    brain,
    offset,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    SCALES: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = row rows[t] of a weight of another format, in the order of Coded.dense (see coded_parts)."""
    LOW: tl.constexpr = 8 if BITS == 8 else (4 if BITS >= 4 else 2)
    token, spans = tl.program_id(0), tl.cdiv(width, 128)
    row = tl.load(rows + token)
    row = tl.where((row >= 0) & (row < count), row, 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    code = plane_code(low + row * plane_bytes(spans, LOW), column, inside, LOW)
    if BITS > LOW:
        above = plane_code(high + row * plane_bytes(spans, BITS - LOW), column, inside, BITS - LOW)
        code = code | (above << LOW)
    if TABLE == "e4m3" or TABLE == "e5m2" or TABLE == "floats":
        number = floats_of(code, table, TABLE)
    elif BITS == 8:
        number = code.to(tl.int8, bitcast=True).to(tl.float32) - offset.to(tl.float32)
    else:
        number = integers_of(code, offset, BITS, TABLE).to(tl.float32)
    if TABLE == "fp4":  # they were doubled, and 0 has a sign
        number = tl.where(code > 7, tl.abs(number) * -0.5, number * 0.5)
    how = (group, block, brain)
    where = (column, row, inside, count, how)
    value = values_of(scales, *where, SCALES)
    scale = numbers_of(scales, scale_codes, value, *where, "", SCALES)
    if SHIFT == "zeros":
        zeros = bits_of(minimums, column // group, row, inside, count, 1) & 255
        number = number - zeros.to(tl.float32)
    number = scale * number
    if SHIFT == "minimums":
        value = values_of(minimums, *where, SCALES)
        number += numbers_of(minimums, minimum_codes, value, *where, "", SCALES)
    tl.store(out + token.to(tl.int64) * width + column, number, mask=inside)


@triton.jit
def pool_rows(out, x, logit_rows, token_rows, row_offsets, width, first_alone, BLOCK: tl.constexpr):
    """out[l] = the mean of x [T, width] over the tokens of logit row l's row, or the first if first_alone.

    Sums are in float64, in the order of the tokens. Grid (L, width / BLOCK). Reads each number once.
    """
    row = tl.load(token_rows + tl.load(logit_rows + tl.program_id(0)))
    begin, end = tl.load(row_offsets + row), tl.load(row_offsets + row + 1)
    end = tl.where(first_alone > 0, begin + 1, end)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, sums = column < width, tl.zeros((BLOCK,), tl.float64)
    first = x + begin.to(tl.int64) * width + column
    for token in range(begin, end):
        sums += tl.load(first + (token - begin) * width, mask=inside, other=0.0).to(tl.float64)
    mean = sums / (end - begin).to(tl.float64)
    tl.store(out + tl.program_id(0).to(tl.int64) * width + column, mean.to(tl.float32), mask=inside)


@triton.jit
def gather_states(out, rows, states, width, BLOCK: tl.constexpr):
    """out[t] = states[rows[t]], rounded to bfloat16: [T, width] and [L, width] float32, rows int32 [T].

    Grid (T, width / BLOCK). Reads and writes each number once; no sums.
    """
    token = tl.program_id(0)
    row = tl.load(rows + token).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(states + row * width + column, mask=inside).to(tl.bfloat16)
    tl.store(out + token.to(tl.int64) * width + column, values.to(tl.float32), mask=inside)
