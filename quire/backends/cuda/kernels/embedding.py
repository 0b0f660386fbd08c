"""Rows of tables: embeddings of tokens or positions, and the rows that need logits."""

# mypy: ignore-errors
import triton
import triton.language as tl


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
def gather_int8_rows(out, rows, values, scales, channels, count, width, BLOCK: tl.constexpr):
    """out[t] = channel * block scale * q of row rows[t], as GroupWeight.dense computes it.

    values int8 [count, width], scales int8 [count, groups of 32], channels float32 [count]. Grid as above.
    """
    token = tl.program_id(0)
    row = tl.load(rows + token)
    row = tl.where((row >= 0) & (row < count), row, 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    q = tl.load(values + row * width + column, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + row * tl.cdiv(width, 32) + column // 32, mask=inside, other=0).to(tl.float32)
    wide = (tl.load(channels + row) * scale) * q
    tl.store(out + token.to(tl.int64) * width + column, wide, mask=inside)


@triton.jit
def gather_int4_rows(out, rows, packed, scales, channels, count, width, BLOCK: tl.constexpr):
    """out[t] = channel * block scale * (q - 8) of row rows[t]: packed uint8 [count, ceil(width / 2)].

    Inputs 2i and 2i + 1 are in the low and high half of byte i. Otherwise as for int8.
    """
    token = tl.program_id(0)
    row = tl.load(rows + token)
    row = tl.where((row >= 0) & (row < count), row, 0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    byte = tl.load(packed + row * tl.cdiv(width, 2) + column // 2, mask=inside, other=0).to(tl.int32)
    q = ((byte >> ((column % 2) * 4)) & 15) - 8
    scale = tl.load(scales + row * tl.cdiv(width, 32) + column // 32, mask=inside, other=0).to(tl.float32)
    wide = (tl.load(channels + row) * scale) * q.to(tl.float32)
    tl.store(out + token.to(tl.int64) * width + column, wide, mask=inside)
