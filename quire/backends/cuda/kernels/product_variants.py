"""The kernels of products with floats and integers that are compiled: their tiles and types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import ceil

from quire.backends.cuda.kernels.variant import (
    LARGE,
    MOST_EXPERTS,
    ROW_BLOCKS,
    SMALL,
    Constants,
    Variant,
    size_of,
    types_of,
)

FLOATS = ("bf16", "fp16", "fp32")
PRECISIONS = {"bf16": "stored", "fp16": "tf32", "fp32": "ieee"}  # of products, by the format of weights
INTEGERS = {"int8": ("i8", "i8"), "int4": ("u8", "i8")}  # weights, scales of groups
QUANTIZED_BLOCK = 256  # groups of a weight, or pairs of them, that a program rounds

# Sizes of products of more than MOST_SMALL rows: with few tiles, with enough of them, with enough wide ones.
MEDIUM, WIDE = "medium", "wide"
JOINED_ROWS = 256  # at most, of products that are launched together
_MEDIUM_ROWS, _MULTIPROCESSORS = 64, 128

# Tiles, warps and stages. All tiles of a format have one BLOCK_K. Small and medium ones have few outputs, so
# that 4,096 are a program for each multiprocessor, or for every other one, and load far ahead: about 30 KB
# for each must be on the way. Wide ones read three quarters of what large ones do from the second-level
# cache, which limits these.
_Tile = tuple[Constants, int, int]
_PRODUCT_TILES: dict[tuple[str, str], _Tile] = {
    (SMALL, "bf16"): ({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64}, 4, 8),
    (MEDIUM, "bf16"): ({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 10),
    (LARGE, "bf16"): ({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}, 8, 4),
    (WIDE, "bf16"): ({"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64}, 8, 4),
    (SMALL, "fp16"): ({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 4),
    (LARGE, "fp16"): ({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, 4, 2),
    (SMALL, "fp32"): ({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}, 4, 3),
    (LARGE, "fp32"): ({"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}, 4, 2),
}
_QUANTIZED_TILES: dict[str, _Tile] = {
    SMALL: ({"BLOCK_M": 16, "BLOCK_N": 32}, 4, 10),
    MEDIUM: ({"BLOCK_M": 64, "BLOCK_N": 64}, 4, 8),
    LARGE: ({"BLOCK_M": 64, "BLOCK_N": 128}, 8, 3),
}
_MEDIUM_GATED_STAGES = 6
# Types of activations: those that are rounded before. Others are float32.
_X_TYPES = {(size, "bf16"): "bf16" for size in (MEDIUM, LARGE, WIDE)}
_GATES = ("silu", "gelu_tanh")


def product_tile(rows: int, outputs: int, weight: str) -> Constants:
    """Return the tile of a product of so many rows and outputs with float weights of a format ("bf16")."""
    return _PRODUCT_TILES[_size(rows, outputs, _of_format(weight)), weight][0]


def gated_tile(rows: int, outputs: int, weight: str) -> Constants:
    """Return the tile of a gated product, which has two accumulators."""
    return _gated(_size(rows, 2 * outputs, _of_format(weight)), weight)


def quantized_tile(rows: int, outputs: int) -> Constants:
    """Return the tile of a product of so many rows and outputs with quantized weights."""
    return _QUANTIZED_TILES[_size(rows, outputs, _QUANTIZED_TILES)][0]


def grouped_tile(rows: int, weight: str) -> Constants:
    """Return the tile of a product of experts with about so many rows for each."""
    return _gated(size_of(rows), weight)


def grouped_quantized_tile(rows: int) -> Constants:
    """Return the same for quantized weights."""
    return _QUANTIZED_TILES[size_of(rows)][0]


def _of_format(weight: str) -> Mapping[str, _Tile]:
    return {size: tile for (size, own), tile in _PRODUCT_TILES.items() if own == weight}


def _size(rows: int, outputs: int, tiles: Mapping[str, _Tile]) -> str:
    """Return the size of a product, among those that have tiles.

    It is medium if most multiprocessors had no large tile, and wide if all have done it sooner so: each takes
    three quarters of the time for an output of a wide tile.
    """
    if (size := size_of(rows)) == SMALL:
        return size

    def turns(size: str) -> float:
        tile = tiles[size][0]
        return -(-rows // tile["BLOCK_M"]) * -(-outputs // tile["BLOCK_N"]) / _MULTIPROCESSORS

    if MEDIUM in tiles and rows <= _MEDIUM_ROWS and turns(LARGE) < 0.5:
        return MEDIUM
    return WIDE if WIDE in tiles and 3 * ceil(turns(WIDE)) <= 2 * ceil(turns(LARGE)) else LARGE


def _gated(size: str, weight: str) -> Constants:
    """Return the tile of a gated product of a size: with half the outputs where there are many sums."""
    tile = _PRODUCT_TILES[size, weight][0]
    return tile | {"BLOCK_N": max(min(tile["BLOCK_N"], 64), tile["BLOCK_N"] // 2)}


def tiles_on(variant: Variant, target: str) -> dict[str, tuple[int, int]]:
    """Return the tiles, rows and inputs, in which a unit of the target itself copies matrices, by argument.

    That are large products of what is stored in bfloat16, which take tensor descriptors there.
    """
    names, how = ("x", "weight", "gate", "up"), variant.constants
    if target in ("sm_80", "sm_89") or variant.kernel not in ("product", "gated_product"):
        return {}
    if variant.types["x"] != "*bf16":
        return {}
    return {
        name: (how["BLOCK_M" if name == "x" else "BLOCK_N"], how["BLOCK_K"])
        for name in names
        if name in variant.types
    }


def product_variants() -> Iterator[Variant]:
    """Return products but those of experts, and what rounds their rows and weights."""
    yield from _products()
    yield from _quantized()
    yield from _joined()


def _products() -> Iterator[Variant]:
    sizes = "rows:i32 outputs:i32 inputs:i32"
    plain = f"out:*fp32 x:*{{x}} weight:*{{w}} bias:*fp32 {sizes}"
    gated = f"out:*fp32 x:*{{x}} gate:*{{w}} up:*{{w}} {sizes}"
    yield from (
        Variant("round_rows", types_of("out:*bf16 x:*fp32 inputs:i32"), {"BLOCK": n}) for n in ROW_BLOCKS
    )
    for (size, weight), (tile, warps, stages) in _PRODUCT_TILES.items():
        x = _X_TYPES.get((size, weight), "fp32")
        cores = "float" if size != SMALL and weight == "bf16" else ""
        how: Constants = {"PRECISION": PRECISIONS[weight]} | tile
        for bias in (False, True):
            own = how | {"BIAS": bias}
            yield Variant("product", types_of(plain, x=x, w=weight), own, warps, stages, cores)
        how |= _gated(size, weight)
        stages = min(stages, _MEDIUM_GATED_STAGES) if size == MEDIUM else stages
        for name in _GATES:
            own, types = how | {"ACTIVATION": name}, types_of(gated, x=x, w=weight)
            yield Variant("gated_product", types, own, warps, stages, cores)


def _joined() -> Iterator[Variant]:
    """Return products of several weights."""
    outs, outputs = (
        "out_0:*fp32 out_1:*fp32 out_2:*fp32",
        "rows:i32 outputs_0:i32 outputs_1:i32 outputs_2:i32",
    )
    weights = " ".join(f"weight_{i}:*bf16 bias_{i}:*fp32" for i in range(3))
    floats = f"{outs} x:*{{x}} {weights} {outputs} inputs:i32"
    for (size, (tile, warps, stages)), bias in product(_of_format("bf16").items(), (False, True)):
        how: Constants = {"PRECISION": PRECISIONS["bf16"], "BIAS": bias}
        types = types_of(floats, x=_X_TYPES.get((size, "bf16"), "fp32"))
        cores = "" if size == SMALL else "float"
        yield Variant("joined_product", types, tile | how, warps, stages, cores)
    for (size, (tile, warps, stages)), kind in product(_QUANTIZED_TILES.items(), INTEGERS):
        cores, (codes, scales) = "" if size == SMALL else "integer", INTEGERS[kind]
        packed = (
            f"weight_{i}:*{codes} scales_{i}:*{scales} channels_{i}:*fp32 bias_{i}:*fp32" for i in range(3)
        )
        x = "x:*i8 x_blocks:*i32 x_scales:*fp32"
        types = types_of(f"{outs} {x} {' '.join(packed)} {outputs} spans:i32")
        for bias in (False, True):
            own = tile | {"KIND": kind, "BIAS": bias}
            yield Variant("joined_quantized_product", types, own, warps, stages, cores)


def _quantized() -> Iterator[Variant]:
    quantized = "q:*i8 block_scales:*i32 scales:*fp32 x:*fp32 width:i32"
    for scaled in (False, True):
        yield Variant("quantize_rows", types_of(quantized), {"BLOCK_SCALED": scaled}, warps=1)
    whole = "values:*{v} scales:*i8 channels:*fp32 x:*{x} first:i32 rows:i32 width:i32 outputs:i32 spans:i32"
    for x, (codes, bits) in product(FLOATS, (("i8", 8), ("u8", 4))):
        scaled_rows = types_of("channels:*fp32 x:*{x} first:i32 width:i32", x=x)
        yield Variant("scale_channels", scaled_rows, {"BITS": bits, "BLOCK": ROW_BLOCKS[1]})
        rounded: Constants = {"BITS": bits, "BLOCK": QUANTIZED_BLOCK}
        yield Variant("round_groups", types_of(whole, v=codes, x=x), rounded)
    head, sizes = (
        "out:*fp32 x:*i8 x_blocks:*i32 x_scales:*fp32",
        "rows:i32 outputs:i32 spans:i32",
    )
    plain = f"{head} weight:*{{w}} block_scales:*{{s}} channels:*fp32 bias:*fp32 {sizes}"
    parts = (f"{part}:*{{w}} {part}_scales:*{{s}} {part}_channels:*fp32" for part in ("gate", "up"))
    gated = f"{head} {' '.join(parts)} {sizes}"
    for (size, (tile, warps, stages)), kind in product(_QUANTIZED_TILES.items(), INTEGERS):
        cores, (weight, scales) = "" if size == SMALL else "integer", INTEGERS[kind]
        for bias in (False, True):
            own = tile | {"KIND": kind, "BIAS": bias}
            yield Variant("quantized_product", types_of(plain, w=weight, s=scales), own, warps, stages, cores)
        stages = min(stages, _MEDIUM_GATED_STAGES) if size == MEDIUM else stages
        for name in _GATES:
            own, types = tile | {"KIND": kind, "ACTIVATION": name}, types_of(gated, w=weight, s=scales)
            yield Variant("quantized_gated_product", types, own, warps, stages, cores)


def grouped_variants() -> Iterator[Variant]:
    """Return products of experts, and of matrices by head."""
    listed = "order:*i32 offsets:*i32"
    sizes = "outputs:i32 inputs:i32 experts:i32 chosen:i32"
    biases = "gate_bias:*fp32 up_bias:*fp32"
    for size in (SMALL, LARGE):
        rows = f"out:*fp32 x:*{_X_TYPES.get((size, 'bf16'), 'fp32')} {listed}"
        plain = types_of(f"{rows} weight:*bf16 bias:*fp32 {sizes}")
        gated = types_of(f"{rows} gate:*bf16 up:*bf16 {biases} {sizes} limit:fp32")
        _, warps, stages = _PRODUCT_TILES[size, "bf16"]
        tile = grouped_tile(1 if size == SMALL else 17, "bf16")
        tile |= {"EXPERTS": MOST_EXPERTS, "PRECISION": PRECISIONS["bf16"]}
        cores = "float" if size == LARGE else ""
        for bias in (False, True):
            own = tile | {"BIAS": bias}
            yield Variant("grouped_product", plain, own, warps, stages, cores)
        for name, bias in (("silu", False), ("gelu_tanh", False), ("limited", True)):
            own = tile | {"BIAS": bias, "ACTIVATION": name}
            yield Variant("grouped_gated_product", gated, own, warps, stages, cores)
    head = f"out:*fp32 x:*i8 x_blocks:*i32 x_scales:*fp32 {listed}"
    rest = "block_scales:*{s} channels:*fp32 bias:*fp32 outputs:i32 spans:i32 experts:i32 chosen:i32"
    for size, (kind, (weight, scales)) in product((SMALL, LARGE), INTEGERS.items()):
        tile, warps, stages = _QUANTIZED_TILES[size]
        types = types_of(f"{head} weight:*{{w}} {rest}", w=weight, s=scales)
        cores = "integer" if size == LARGE else ""
        for bias in (False, True):
            own = tile | {"KIND": kind, "BIAS": bias, "EXPERTS": MOST_EXPERTS}
            yield Variant("grouped_quantized_product", types, own, warps, stages, cores)
