"""The kernels that are compiled for weights of other formats: their kinds, tiles and types."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from quire.backends.cuda.coded_form import CodedKind
from quire.backends.cuda.kernels.variant import (
    LARGE,
    MOST_EXPERTS,
    SMALL,
    Constants,
    Variant,
    size_of,
    types_of,
)

GATHERED_BLOCK = 1024  # numbers of a row of a table that a program holds
WHOLE_ROW_BLOCK = 1024  # inputs of a row that are quantized at once
_ROWS = CodedKind(8, "rows", 128, "32")
_POINTERS = {"uint8": "u8", "int8": "i8", "uint16": "u16", "float32": "fp32"}

# Tiles, warps and stages: of integers, of 8-bit floats, of tables of floats, which no tensor core multiplies.
_TILES: dict[tuple[str, str], tuple[Constants, int, int]] = {
    (SMALL, "integers"): ({"BLOCK_M": 16, "BLOCK_N": 32}, 4, 10),
    (LARGE, "integers"): ({"BLOCK_M": 64, "BLOCK_N": 64}, 8, 3),
    (SMALL, "float8"): ({"BLOCK_M": 16, "BLOCK_N": 32}, 4, 6),
    (LARGE, "float8"): ({"BLOCK_M": 64, "BLOCK_N": 64}, 4, 3),
    (SMALL, "floats"): ({"BLOCK_M": 16, "BLOCK_N": 32}, 4, 3),
    (LARGE, "floats"): ({"BLOCK_M": 32, "BLOCK_N": 32}, 4, 2),
}


def coded_tile(rows: int, kind: CodedKind) -> Constants:
    """Return the tile of a product of so many rows, for each expert, with a weight of a kind."""
    return _TILES[size_of(rows), _family(kind)][0]


def coded_constants_on(variant: Variant, target: str) -> Constants:
    """Return constants that a target has beside those of a product with codes.

    A step of the loop over units of 16 has so many groups of inputs that their scales fit the registers.
    Without instructions of a group of warps, the products take registers, too.
    """
    if variant.constants.get("UNIT") != 16 or not variant.tensor_cores:
        return {}
    divided, halved = variant.constants["SCALES"] == "nvfp4 divided", {"AT_ONCE": 2}
    if target in ("sm_89", "sm_120"):
        return {"AT_ONCE": 1} if divided or variant.constants["SHIFT"] else halved
    wide = {"sm_80": variant.constants["TABLE"] == "fp4", "sm_90": divided}
    return halved if wide.get(target) else {}


def _stages(kind: CodedKind, most: int) -> int:
    """Return the stages of a small product: `most`, or fewer if a step has many loads.

    The compiler's time grows with the square of the loads that are on the way.
    """
    loads = 7 + 128 // kind.unit * (3 if kind.shift else 1)
    return max(3, min(most, 140 // loads))


def _family(kind: CodedKind) -> str:
    return "integers" if not kind.is_float else "floats" if kind.table == "floats" else "float8"


def _integers(bits: int, *units: int, scales: str = "16", shift: str = "") -> Iterator[CodedKind]:
    for unit in units:
        yield CodedKind(bits, "integers", unit, scales, shift)


# By kind, whether tables of embeddings have it too.
_KINDS: dict[CodedKind, bool] = {
    **dict.fromkeys(
        (
            *_integers(4, 32, 64, 128),  # Q4_0, GPTQ, compressed-tensors
            *_integers(4, 32, 64, 128, shift="zeros"),  # AWQ, GPTQ, compressed-tensors
            *_integers(4, 32, 64, 128, shift="minimums"),  # Q4_1, MLX
            *_integers(4, 32, scales="16x8", shift="minimums"),  # Q4_K
            *_integers(5, 32),  # Q5_0
            *_integers(5, 32, scales="16x8", shift="minimums"),  # Q5_K
            *_integers(6, 16, scales="16x8"),  # Q6_K
            *_integers(3, 16, scales="16x8"),  # Q3_K
            *_integers(2, 16, scales="16x8", shift="minimums"),  # Q2_K
            *_integers(8, 32),  # Q8_0, GPTQ, compressed-tensors
            *_integers(8, 32, shift="minimums"),  # MLX
            *_integers(5, 32, shift="minimums"),  # Q5_1
            *(kind for bits in (2, 3, 5, 6) for kind in _integers(bits, 64, shift="minimums")),  # MLX
            *(CodedKind(4, "iq4nl", 32, scales) for scales in ("16", "16x8")),  # IQ4_NL, IQ4_XS
            CodedKind(4, "fp4", 32, "16"),  # MXFP4
            *(CodedKind(4, "fp4", 16, scales) for scales in ("nvfp4", "nvfp4 divided")),
            CodedKind(8, "e4m3", 128, "32"),  # FP8
            CodedKind(8, "e4m3", 32, "16"),  # MXFP8
        ),
        True,
    ),
    **dict.fromkeys(
        (
            _ROWS,  # W8A8
            *_integers(8, 32, scales="32"),  # bitsandbytes
            *_integers(8, 32, shift="zeros"),
            *(kind for bits in (2, 3) for kind in _integers(bits, 128)),  # GPTQ, BitNet
            *(kind for bits in (2, 3) for kind in _integers(bits, 128, shift="zeros")),  # TQ1_0, TQ2_0
            CodedKind(8, "e5m2", 128, "32"),
            *(CodedKind(4, "floats", unit, "32") for unit in (64, 128)),  # bitsandbytes
        ),
        False,
    ),
}


def coded_variants() -> Iterator[Variant]:
    """Return what is compiled for weights of other formats."""
    rounded = "q:*i8 sums:*i32 scales:*fp32 x:*fp32 order:*i32 width:i32 ordered:i32"
    integers = [kind for kind in _KINDS if not kind.is_float and kind != _ROWS]
    for span, unit in dict.fromkeys((32 if kind.bits == 8 else 128, kind.unit) for kind in integers):
        how: Constants = {"SPAN_INPUTS": span, "UNIT": unit}
        yield Variant("quantize_coded_rows", types_of(rounded), how, warps=1)
    whole = types_of("q:*i8 scales:*fp32 x:*fp32 width:i32 spans:i32")
    yield Variant("quantize_whole_rows", whole, {"BLOCK": WHOLE_ROW_BLOCK})
    for kind, size in product(_KINDS, (SMALL, LARGE)):
        yield from _products(kind, size)
    gathers = dict[str, Variant]()  # kinds that differ in their units alone share one
    for kind in (kind for kind, gathered in _KINDS.items() if gathered):
        own = kind.constants()
        own |= {"SHIFT": kind.shift, "BLOCK": GATHERED_BLOCK}
        del own["UNIT"]
        sizes = "table:*fp32 count:i32 width:i32 group:i32 block:i32 brain:i32 offset:i32"
        one = Variant("gather_coded_rows", types_of(f"out:*fp32 rows:*i32 {_arrays(kind)} {sizes}"), own)
        gathers[one.key] = one
    yield from gathers.values()


def _products(kind: CodedKind, size: str) -> Iterator[Variant]:
    tile, warps, stages = _TILES[size, _family(kind)]
    if size == SMALL:
        stages = _stages(kind, stages)
    own, listed = tile | kind.constants(), "order:*i32 offsets:*i32"
    how = "group:i32 block:i32 brain:i32"
    if kind.is_float:
        x, sizes, name = "x:*fp32", "outputs:i32 inputs:i32", "coded_float_product"
        arrays = f"{_arrays(kind, minimums=False)} table:*fp32 bias:*fp32"
        cores = "float" if size == LARGE and kind.table != "floats" else ""
    else:
        x, sizes, name = "q:*i8 sums:*i32 x_scales:*fp32", "outputs:i32 spans:i32", "coded_product"
        arrays, how = f"{_arrays(kind)} bias:*fp32", f"{how} offset:i32"
        cores = "integer" if size == LARGE else ""
    types = types_of(f"out:*fp32 {x} {arrays} rows:i32 {sizes} {how} biased:i32")
    yield Variant(name, types, own, warps, stages, cores)
    if size == SMALL:
        outs, several = "out_0:*fp32 out_1:*fp32 out_2:*fp32", "outputs_0:i32 outputs_1:i32 outputs_2:i32"
        three = " ".join(part.replace(":", f"_{i}:") for i in range(3) for part in arrays.split())
        length = sizes.partition(" ")[2]
        types = types_of(f"{outs} {x} {three} rows:i32 {several} {length} {how} biased:i32")
        yield Variant(f"joined_{name}", types, own, warps, stages)
    types = types_of(f"out:*fp32 {x} {listed} {arrays} {sizes} experts:i32 chosen:i32 {how} biased:i32")
    yield Variant(f"grouped_{name}", types, own | {"EXPERTS": MOST_EXPERTS}, warps, stages, cores)


def _arrays(kind: CodedKind, minimums: bool = True) -> str:
    """Return the types of the arrays of weights of a kind."""
    named = kind.pointers().items()
    return " ".join(f"{n}:*{_POINTERS[t.name]}" for n, t in named if minimums or "minimum" not in n)
