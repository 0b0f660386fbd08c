"""Which rows and outputs a program of a product has, how rows of scales lie, and what is asked for early."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def row_tile():
    """Return the tile of rows of a program in a grid (tiles of rows, tiles of outputs, groups of the former).

    Programs that run at the same time are neighbours in it, so they read the same weights, and few rows:
    weights come from memory once for a group, not for each tile of rows (launch_list.product_grid).
    """
    return tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def padded(outputs):
    """Return the length of a row of scales, a multiple of 16: what is beyond the outputs is never used."""
    return tl.cdiv(outputs, 16) * 16


@triton.jit
def bits_of(scales, row, n, inside, outputs, BYTES: tl.constexpr):
    """Return BYTES bytes of each of the outputs n in a row of scales [rows, padded(outputs)], as integers.

    Words of 4 bytes are loaded, by each of the outputs in them: fewer bytes cannot be copied to shared memory
    ahead, so a program would wait for them in each step of its loop.
    """
    each: tl.constexpr = 4 // BYTES
    words = scales.to(tl.pointer_type(tl.int32), bitcast=True)
    at = row.to(tl.int64) * (padded(outputs) // each) + n // each
    word = tl.load(words + at, mask=inside, other=0)
    if BYTES == 4:
        return word
    else:
        return word << (32 - 8 * BYTES - (n % each).to(tl.int32) * (8 * BYTES)) >> (32 - 8 * BYTES)


# Every fourth thread has a row: a warp asks once for each, one after the other. Nobody waits for the answer.
_ASK = tl.constexpr("""{
    .reg .pred own;
    .reg .b32 thread, rest;
    .reg .b64 row;
    mov.u32 thread, %tid.x;
    and.b32 rest, thread, 3;
    shr.u32 thread, thread, 2;
    setp.eq.u32 own, rest, 0;
    setp.lt.and.u32 own, thread, $3, own;
    mad.wide.u32 row, thread, $2, $1;
    @own cp.async.bulk.prefetch.L2.global [row], $4;
    mov.u32 $0, 0;
}""")


@triton.jit
def read_ahead(weight, n, outputs, inputs, BLOCK_N: tl.constexpr, BYTES: tl.constexpr):
    """Load the first BYTES of rows n to n + 32 of a weight [outputs, inputs] into the second-level cache.

    Of BLOCK_N rows, if that is less, and none if BYTES is 0. A kernel that begins with this does it before it
    waits for the one before it (scripts/cubins.py), while memory may be idle: norms and attention of one
    token read little. Rows have a multiple of 16 bytes. Changes no result.
    """
    if BYTES > 0:
        row_bytes = inputs * (weight.dtype.element_ty.primitive_bitwidth // 8)
        first = weight.to(tl.int64) + n.to(tl.int64) * row_bytes
        rows, size = tl.minimum(outputs - n, BLOCK_N), tl.minimum(row_bytes, BYTES)
        tl.inline_asm_elementwise(
            _ASK,
            constraints="=r,l,r,r,r",
            args=[first, row_bytes, rows, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
