"""The kernels of images that are compiled. variants.py has all others."""

from __future__ import annotations

from collections.abc import Iterator

from quire.backends.cuda.kernels.variant import Variant, types_of

HEAD_BLOCK = 128  # numbers of a head that a program copies
TOKEN_BLOCK = 128  # tokens of which a program replaces some
HALVES = (32, 64, 128)  # to which pairs of a head are padded


def image_variants() -> Iterator[Variant]:
    """Return all of them."""
    kernels = {
        "mean_rows": "x:*fp32 width:i32 number:i32",
        "place_images": "x:*fp32 addresses:*i64 width:i32 first:i32 added:i32",
        "clip": "x:*fp32 low:*fp32 high:*fp32 width:i32",
        "standardize": "x:*fp32 bias:*fp32 factors:*fp32 width:i32",
    }
    for block in (128, 1024):
        for kernel, args in kernels.items():
            yield Variant(kernel, types_of(f"out:*fp32 {args}"), {"BLOCK": block})
        for table in ("bf16", "fp16", "fp32"):
            args = f"out:*fp32 places:*fp32 table:*{table} width:i32 number:i32"
            yield Variant("mixed_rows", types_of(args), {"BLOCK": block})
    for kind in ("bf16", "fp32"):
        args = f"out:*{kind} x:*fp32 width:i32 new_width:i32"
        yield Variant("resize_rows", types_of(args), {"BLOCK": HEAD_BLOCK}, 1)
    args = "out:*fp32 x:*fp32 places:*fp32 frequencies:*fp32 heads:i32 size:i32 axes:i32"
    for half in HALVES:
        yield Variant("rotate_at", types_of(args), {"HALF": half}, 1)
    args = "out:*i32 tokens:*i32 count:i32 replaced:i32 same:i32"
    yield Variant("replace_tokens", types_of(args), {"BLOCK": TOKEN_BLOCK})
    for weight in ("bf16", "fp16", "fp32"):  # of patches with numbers that are no multiple of 16
        args = f"out:*fp32 x:*fp32 weight:*{weight} bias:*fp32 outputs:i32 width:i32"
        yield Variant("narrow_product", types_of(args), {"BIAS": True, "BLOCK": 128}, 1)
