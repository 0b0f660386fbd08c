"""The kernels of single families that are compiled: states, and norms. variants.py has all others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from quire.backends.cuda.kernels.variant import Variant, types_of

STATE_BLOCK = 256  # of kernels that copy what slots keep, and of convolutions
KEY_DIMS = (64, 128, 256)  # to which keys of matrix states are padded
VALUE_BLOCK = 32  # columns of a matrix state that a program has
LATENT_ROWS = (16, 64)  # of a program of attention over latents: pairs of a token and a head


def latents_at_once(variant: Variant, target: str) -> int:
    """Return how many rows of a program of attend_latent are computed together: as many as memory is for."""
    rows, rank = variant.constants["BLOCK_M"], variant.constants["RANK"]
    narrow = target in ("sm_89", "sm_120") or (target == "sm_80" and rank == 512)
    return min(rows, LATENT_ROWS[0]) if narrow and rank > 64 else rows


def state_variants() -> Iterator[Variant]:
    """Return all of them."""
    block = {"BLOCK": STATE_BLOCK}
    of_tokens = "positions:*i32 slots:*i32 {}:*i32"
    convolved = (
        f"out:*fp32 ring:*fp32 snapshots:*fp32 x:*fp32 weight:*fp32 bias:*fp32 {of_tokens.format('earlier')} "
        "saves:*i32 layer:i32 layers:i32 num_slots:i32 width:i32 taps:i32 history:i32 direct:i32"
    )
    for bias, name in product((False, True), ("linear", "silu")):
        yield Variant("short_convolution", types_of(convolved), {"BIAS": bias, "ACTIVATION": name} | block)
    normed = "out:*fp32 x:*fp32 gate:*fp32 weight:*fp32 width:i32 groups:i32 eps:fp32"
    for width, first in product((128, 1024), (False, True)):
        how = {"ACTIVATION": "silu", "GATE_FIRST": first, "BLOCK": width}
        yield Variant("gated_rms_norm", types_of(normed), how)
    for width in (128, 1024):
        lanes = {"BLOCK": width}
        likened = "out:*fp32 x:*fp32 like:*fp32 floor:*fp64 width:i32"
        yield Variant("match_magnitude", types_of(likened), lanes)
        yield Variant("above_cutoff", types_of("out:*fp32 x:*fp32 deviations:*fp64 width:i32"), lanes)
    for weight in ("bf16", "fp16", "fp32"):
        narrow = f"out:*fp32 x:*fp32 weight:*{weight} bias:*fp32 outputs:i32 width:i32"
        yield Variant("narrow_product", types_of(narrow), {"BIAS": False, "BLOCK": 128}, 1)
    for width in (128, 1024):  # of LFM2, whose gates have no activation
        gated = "out:*fp32 gate:*fp32 up:*fp32 width:i32 gate_width:i32 limit:fp32"
        yield Variant("gated_activation", types_of(gated), {"BLOCK": width, "ACTIVATION": "linear"})
    yield Variant("list_by_head", types_of("order:*i32 offsets:*i32 tokens:i32 heads:i32"), {"BLOCK": 128})
    for kv, rank in product(("bf16", "i8"), (64, 256, 512)):
        cache = f"q:*fp32 q_rope:*fp32 ropes:*{kv} latents:*{kv} rope_scales:*fp32 latent_scales:*fp32"
        where = "positions:*i32 token_rows:*i32 tables:*i32 table_stride:i32"
        sizes = "tile_heads:i32 heads:i32 dim:i32 value_dim:i32 block_size:i32 scale:fp32"
        how = {"SCALED": kv == "i8", "PRECISION": "bf16", "ROPE": 64, "RANK": rank}
        few, many = ({"BLOCK_M": rows} for rows in LATENT_ROWS)
        warps = 8 if rank == 512 or (rank == 256 and kv == "i8") else 4
        types = types_of(f"out:*fp32 {cache} {where} tiles:*i32 {sizes}")
        yield Variant("attend_latent", types, how | few, warps, stages=5)
        yield Variant("attend_latent", types, how | many, 4 if rank == 64 else 8)
        lists = "partial:*fp32 stats:*fp32 items:*i32 firsts:*i32"
        types = types_of(f"{lists} {cache} {where} tokens:i32 {sizes}")
        yield Variant("attend_latent_segments", types, how | few, warps, stages=5)
    kept = f"ring:*fp32 kept:*fp32 {of_tokens.format('later')}"
    yield Variant("keep_inputs", types_of(f"{kept} layer:i32 num_slots:i32 width:i32 history:i32"), block)
    states = "borders:*fp32 ring:*fp32 snapshot_borders:*fp32 snapshot_ring:*fp32"
    sizes = "num_slots:i32 size:i32 width:i32 reach:i32 history:i32"
    yield Variant("restore_states", types_of(f"{states} restored:*i32 {sizes}"), block | {"CHUNK": 64})
    rows = "positions:*i32 row_offsets:*i32 slots:*i32 saves:*i32"
    where = "layer:i32 layers:i32 num_slots:i32"
    of_matrices = (
        f"out:*fp32 kept:*fp32 {states} x:*fp32 decays:*fp32 betas:*fp32 rates:*fp32 biases:*fp32 "
        f"skips:*fp32 {rows} {where} heads:i32 key_heads:i32 key_size:i32 value_size:i32 x_width:i32 "
        "keys_first:i32 history:i32 direct:i32 low:fp32 high:fp32 scale:fp32"
    )
    of_kinds = [*product((False,), KEY_DIMS), *product((True,), KEY_DIMS[:-1])]
    for delta, keys in of_kinds:  # two products with the state of 256 would not fit the registers
        how = {"DELTA": delta, "KEYS": keys, "VALUES": VALUE_BLOCK}
        yield Variant("recurrence", types_of(of_matrices), how, 8)
