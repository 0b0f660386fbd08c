"""Which rows and outputs a program of a product has, and how rows of scales lie."""

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
