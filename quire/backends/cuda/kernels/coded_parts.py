"""Codes of weights of other formats: their planes, their numbers, the scales of their groups.

A weight [outputs, inputs] has codes of BITS bits in one plane or two (quire.backends.cuda.coded_packing):
2, 4 or 8 low bits and 1 or 2 high ones. 32 bytes of a plane of p bits are 8 / p groups of 32 inputs, group g
of them from bit p * g on, so that a group is a row of bytes with one shift. `group` inputs share a scale, and
with two levels `block` of them, whole spans of 128, its value; 2^30 stands for all of a row.

TABLE says what codes mean: "integers" (code - offset; of 8 bits int8 - offset), "iq4nl", "fp4" (here twice
the numbers, integers), "rows" (as integers), "e4m3", "e5m2", or "floats", by a table of 2^BITS of them.
SCALES: "16" (float16, or bfloat16 if `brain`), "32" (float32), "16x8" (float16 times int8), "nvfp4" and
"nvfp4 divided" (float32 times e4m3, e4m3 over float32). SHIFT: "", "minimums" in the form of the scales, or
"zeros" (uint8).
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from quire.backends.cuda.kernels.tiles import bits_of

GROUP = tl.constexpr(32)
GROUPS = tl.constexpr(4)  # of a span
SPAN = tl.constexpr(128)


@triton.jit
def plane_bytes(spans, BITS: tl.constexpr):
    """Return the bytes of a row of a plane of BITS bits; those of one bit are by 256 inputs."""
    return (spans * 4 * BITS + 7) // 8 * 32


@triton.jit
def plane_code(plane, column, inside, BITS: tl.constexpr):
    """Return the bits that a row of a plane has of some inputs."""
    together, group = 8 // BITS, column // 32
    byte = tl.load(plane + group // together * 32 + column % 32, mask=inside, other=0)
    if BITS == 8:
        return byte
    else:
        return (byte >> (group % together * BITS).to(tl.uint8)) & ((1 << BITS) - 1)


@triton.jit
def fp4_times_two(code):
    """Return twice the number that a 4-bit float means, an integer: magnitudes are in 32 bits, 4 each."""
    twice = (tl.full(code.shape, 0xC8643210, tl.uint32) >> ((code & 7) * 4).to(tl.uint32)) & 15
    return tl.where(code > 7, -twice.to(tl.int32), twice.to(tl.int32)).to(tl.int8)


@triton.jit
def iq4nl(code):
    """Return the numbers of codes of IQ4_NL: four words have four bytes each."""
    first = tl.where(code < 4, 0xBFAD9881, 0xF6EADDCF).to(tl.uint32)
    last = tl.where(code < 12, 0x26190D01, 0x71594535).to(tl.uint32)
    word = tl.where(code < 8, first, last)
    return ((word >> ((code & 3) * 8).to(tl.uint32)) & 255).to(tl.uint8).to(tl.int8, bitcast=True)


@triton.jit
def integers_of(code, offset, BITS: tl.constexpr, TABLE: tl.constexpr):
    """Return the integers int8 of codes; of 8 bits without their offset."""
    if TABLE == "fp4":
        return fp4_times_two(code)
    elif TABLE == "iq4nl":
        return iq4nl(code)
    elif BITS == 8:
        return code.to(tl.int8, bitcast=True)
    else:
        return code.to(tl.int8) - offset.to(tl.int8)


@triton.jit
def e4m3(code):
    """Return the numbers of 8-bit floats: as float16 their exponent is 8 lower."""
    half = ((code.to(tl.uint16) & 128) << 8) | ((code.to(tl.uint16) & 127) << 7)
    number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 127) == 127, float("nan"), number)


@triton.jit
def floats_of(code, table, TABLE: tl.constexpr):
    """Return the numbers float32 of codes that are not integers."""
    if TABLE == "e4m3":
        return e4m3(code)
    elif TABLE == "e5m2":
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.load(table + code.to(tl.int32))


@triton.jit
def _half(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _widened(bits, brain):
    """Return float16 numbers, or bfloat16 ones if `brain`, from their bits."""
    return tl.where(brain != 0, (bits << 16).to(tl.float32, bitcast=True), _half(bits))


@triton.jit
def values_of(values, column, n, n_in, outputs, how, SCALES: tl.constexpr):
    """Return the values of two levels, which whole spans share, for outputs n: float32; else anything."""
    if SCALES == "16" or SCALES == "32":
        return column
    elif SCALES == "16x8":
        return _half(bits_of(values, column // how[1], n, n_in, outputs, 2))
    else:
        return bits_of(values, column // how[1], n, n_in, outputs, 4).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(
    values, codes, value, column, n, n_in, outputs, how, TABLE: tl.constexpr, SCALES: tl.constexpr
):
    """Return the scales, or minimums, of the group of an input for outputs n: float32.

    `value` is that of values_of.
    """
    group, _, brain = how
    if SCALES == "16":
        found = _widened(bits_of(values, column // group, n, n_in, outputs, 2), brain)
    elif SCALES == "32":
        found = bits_of(values, column // group, n, n_in, outputs, 4).to(tl.float32, bitcast=True)
    else:
        code = bits_of(codes, column // group, n, n_in, outputs, 1)
        if SCALES == "16x8":
            found = value * code.to(tl.float32)
        elif SCALES == "nvfp4":
            found = value * e4m3(code & 255)
        else:
            found = tl.div_rn(e4m3(code & 255), value)
    if TABLE == "fp4":  # whose numbers are doubled
        found = found * 0.5
    return found
