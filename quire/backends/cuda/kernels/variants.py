"""The kernels that are compiled ahead of time: their types of arguments, constants, warps and stages.

Sizes of models are arguments, so that few variants serve all: constants are tiles, dims padded to powers of
two, formats, and names of activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from quire.backends.cuda.kernels.coded_variants import coded_constants_on, coded_variants
from quire.backends.cuda.kernels.image_variants import image_variants
from quire.backends.cuda.kernels.product_variants import (
    FLOATS,
    PRECISIONS,
    grouped_variants,
    product_variants,
)
from quire.backends.cuda.kernels.state_variants import latents_at_once, state_variants
from quire.backends.cuda.kernels.variant import (
    MOST_EXPERTS,
    ROW_BLOCKS,
    Constants,
    Variant,
    types_of,
)

TARGETS = (80, 89, 90, 100, 120)
# Integers that every launch has as multiples of 16, so that rows of weights and of caches are read 16 bytes
# at a time. Models with others are refused (quire.backends.cuda.refused).
ALIGNED, MULTIPLE = frozenset({"inputs", "dim", "value_dim"}), 16

CACHES = {"bf16": "bf16", "i8": "bf16", "fp16": "tf32", "fp32": "ieee"}  # of attention, by that of the cache
DIMS = (64, 128, 256, 512)
MOST_CHOSEN = 32  # experts of a token, a power of two
SORTED_BLOCK = 512  # pairs of token and expert that are sorted at once
LISTED_TOKENS = 256  # of a step whose segments of contexts are listed, at most
SAMPLING_BLOCK, LIST_BLOCK = 1024, 128  # of kernels over the vocabulary, and over lists
SURVEYED_PARTS = 512  # blocks of a row of logits, at most
MOST_LISTED = 32  # of the most likely tokens that a position lists, a power of two
# Targets whose kernels can begin before the one before them has ended; products that ask for weights by then,
# and for how many bytes of a row. With three programs on each multiprocessor of an H200 these are 13 MB, a
# quarter of its second-level cache, which take memory 3 microseconds.
DEPENDENT = frozenset({"sm_90", "sm_100", "sm_120"})
_READ_AHEAD = frozenset(
    f"{how}product"
    for how in ("", "gated_", "joined_", "quantized_", "quantized_gated_", "joined_quantized_")
)
_AHEAD_BYTES = 1024
ADAPTER_RANKS, ADAPTER_SEGMENT = 64, 512  # the largest rank, and the inputs that are summed apart
ADAPTER_TILE: Constants = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}


def attention_rows(decode: bool, cache: str, dim: int) -> int:
    """Return BLOCK_M of attention over a cache in a format: pairs of token and head of a program."""
    return 16 if decode or cache == "fp32" or dim > 256 else 64


def constants_on(variant: Variant, target: str) -> Constants:
    """Return constants that a target has beside those of a variant, which change no result."""
    if variant.kernel == "attend_latent":
        together = latents_at_once(variant, target)
        return {} if together == variant.constants["BLOCK_M"] else {"AT_ONCE": together}
    if variant.kernel in _READ_AHEAD and variant.constants["BLOCK_M"] == 16 and target in DEPENDENT:
        return {"AHEAD": _AHEAD_BYTES}
    return coded_constants_on(variant, target)


def stages_on(variant: Variant, target: str) -> int:
    """Return how many loads are in flight: fewer where a block has 99 KiB of shared memory at most."""
    latents = variant.kernel.startswith("attend_latent") and variant.constants["RANK"] == 512
    if latents and target == "sm_80" and not variant.constants["SCALED"]:  # it has 163 KiB
        return 3
    if target not in ("sm_89", "sm_120"):
        return variant.stages
    if latents:
        return 3
    if variant.kernel.endswith("product") and variant.types.get("x") == "*bf16":
        how, weights = variant.constants, 2 if "gated" in variant.kernel else 1
        stage_bytes = (how["BLOCK_M"] + weights * how["BLOCK_N"]) * how["BLOCK_K"] * 2
        return min(variant.stages, 1 + (96 << 10) // stage_bytes)  # the last one has no memory
    if "quantized" in variant.kernel and variant.constants["BLOCK_M"] > 16:
        return min(variant.stages, 4 if "gated" in variant.kernel else 5)
    if variant.kernel == "gated_product":
        return min(variant.stages, 5)
    wide = (
        variant.kernel == "attend" and variant.constants["DIM"] == 256 and variant.constants["BLOCK_M"] > 16
    ) or (variant.kernel in ("attend", "attend_segments") and variant.constants["DIM"] > 256)
    return 1 if wide else variant.stages


def most_stack_bytes(variant: Variant, target: str) -> int:
    """Return the budget of what does not fit the registers of a thread; heads of 256 need most.

    sm_100 has no instruction of a group of warps for integers: both operands of large tiles take registers.
    Weights of other formats have sums of floats beside their integers. Wide gated products apply the
    activation to 64 sums of a thread, after their loop.
    """
    if variant.kernel == "attend_latent" and variant.constants["BLOCK_M"] > 16:
        return 1300
    if variant.kernel.startswith("attend"):
        return 640
    if variant.kernel == "recurrence":  # all that a program knows is in its registers
        return 384
    if "TABLE" in variant.constants and variant.tensor_cores:
        return 384
    if variant.kernel == "gated_product" and variant.constants["BLOCK_N"] == 128:
        return 1400
    return 320 if variant.tensor_cores == "integer" and target == "sm_100" else 128


def variants() -> Iterator[Variant]:
    """Return everything that is compiled for each target."""
    yield from _rows()
    yield from _elementwise()
    yield from product_variants()
    yield from _rope_and_kv()
    yield from _attention()
    yield from _sampling()
    yield from _experts()
    yield from coded_variants()
    yield from _adapters()
    yield from state_variants()
    yield from image_variants()


def _rows() -> Iterator[Variant]:
    gather = "out:*fp32 rows:*i32 table:*{table} count:i32 width:i32"
    packed = "out:*fp32 rows:*i32 values:*{values} scales:*i8 channels:*fp32 count:i32 width:i32"
    pooled = "out:*fp32 x:*fp32 logit_rows:*i32 token_rows:*i32 row_offsets:*i32 width:i32 first_alone:i32"
    norm = "out:*fp32 total:*fp32 x:*fp32 y:*fp32 weight:*fp32"
    for block in ROW_BLOCKS:
        how: Constants = {"BLOCK": block}
        for table in FLOATS:
            yield Variant("gather_rows", types_of(gather, table=table), how)
        yield Variant("gather_int8_rows", types_of(packed, values="i8"), how)
        yield Variant("gather_int4_rows", types_of(packed, values="u8"), how)
        yield Variant("gather_states", types_of("out:*fp32 rows:*i32 states:*fp32 width:i32"), how)
        yield Variant("pool_rows", types_of(pooled), how)
        for add, weight in ((False, True), (True, True), (False, False)):
            own = how | {"ADD": add, "WEIGHT": weight}
            yield Variant("rms_norm", types_of(f"{norm} width:i32 eps:fp32 offset:fp32"), own)
        for add, bias in product((False, True), repeat=2):
            own = how | {"ADD": add, "WEIGHT": True, "BIAS": bias}
            yield Variant("layer_norm", types_of(f"{norm} bias:*fp32 width:i32 eps:fp32"), own)


def _elementwise() -> Iterator[Variant]:
    kernels = {
        "add": "x:*fp32 y:*fp32 width:i32",
        "scale": "x:*fp32 width:i32 factor:fp32",
        "scale_by_weight": "x:*fp32 weight:*fp32 width:i32 period:i32",
        "scale_by_position": "x:*fp32 positions:*i32 width:i32 beta:*fp64 period:i32 first:i32",
        "soft_cap": "x:*fp32 width:i32 cap:fp32",
        "xielu": "x:*fp32 rise:*fp32 fall:*fp32 width:i32 beta:fp32",
        "take_columns": "x:*fp32 width:i32 x_width:i32 first:i32",
        "join_columns": "x:*fp32 y:*fp32 width:i32 x_width:i32",
        "put_part": "x:*fp32 width:i32 stride:i32 rank:i32",
        "join_parts": "parts:*fp32 width:i32 stride:i32",
    }
    activated = {
        "unary": "x:*fp32 width:i32",
        "gated_activation": "gate:*fp32 up:*fp32 width:i32 gate_width:i32 limit:fp32",
    }
    names = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "sigmoid", "tanh")
    for block in ROW_BLOCKS:
        for kernel, args in kernels.items():
            yield Variant(kernel, types_of(f"out:*fp32 {args}"), {"BLOCK": block})
        for (kernel, args), name in product(activated.items(), names):
            yield Variant(kernel, types_of(f"out:*fp32 {args}"), {"BLOCK": block, "ACTIVATION": name})
        limited: Constants = {"BLOCK": block, "ACTIVATION": "limited"}
        yield Variant("gated_activation", types_of(f"out:*fp32 {activated['gated_activation']}"), limited)


def _adapters() -> Iterator[Variant]:
    rows = "adapters:*i32 table:*i64"
    down = types_of(f"partial:*fp32 x:*fp32 {rows} tokens:i32 tile_tokens:i32 inputs:i32")
    sizes = "tokens:i32 tile_tokens:i32 segments:i32 outputs:i32"
    up = types_of(f"out:*fp32 partial:*fp32 {rows} scales:*fp32 {sizes}")
    for precision in PRECISIONS.values():
        how: Constants = {"PRECISION": precision, "BLOCK_M": ADAPTER_TILE["BLOCK_M"]}
        yield Variant("adapter_down", down, how | {"BLOCK_K": ADAPTER_TILE["BLOCK_K"]}, stages=4)
        yield Variant("adapter_up", up, how | {"BLOCK_N": ADAPTER_TILE["BLOCK_N"]})


def _rope_and_kv() -> Iterator[Variant]:
    rotary = "out:*fp32 x:*fp32 cos:*fp32 sin:*fp32 heads:i32 dim:i32 rotated:i32"
    cache = "keys:*{kv} values:*{kv} key_scales:*fp32 value_scales:*fp32"
    where = "positions:*i32 token_rows:*i32 tables:*i32 table_stride:i32"
    write = f"{cache} k:*fp32 v:*fp32 {where} groups:i32 dim:i32 value_dim:i32 block_size:i32"
    for dim in DIMS:
        for rope in ("halves", "interleaved"):
            yield Variant("rotary", types_of(rotary), {"ROPE": rope, "DIM": dim}, warps=1)
        for kv in CACHES:
            written = {"DIM": dim, "VALUE_DIM": dim, "SCALED": kv == "i8"}
            yield Variant("write_kv", types_of(write, kv=kv), written, warps=1)
    inputs = "q:*fp32 k:*fp32 v:*fp32 q_weight:*fp32 k_weight:*fp32 cos:*fp32 sin:*fp32"
    sizes = "heads:i32 groups:i32 dim:i32 value_dim:i32 rotated:i32 block_size:i32 eps:fp32 offset:fp32"
    for kv, dim, norm in product(CACHES, DIMS, (False, True)):
        types = types_of(f"q_out:*fp32 {cache} {inputs} {where} {sizes}", kv=kv)
        own: Constants = {"NORM": norm, "ROPE": "halves", "DIM": dim, "VALUE_DIM": dim, "SCALED": kv == "i8"}
        yield Variant("rope_and_kv", types, own, warps=1)


def _attention_stages(block: int, dim: int) -> int:
    """Return the stages of attention: numbers of blocks come two partitions ahead, keys and values one.

    Where programs have few queries, and a step may have few programs, keys and values come two ahead.
    """
    return 5 if block == 16 and dim <= 128 else 3


def _attention() -> Iterator[Variant]:
    cache = "q:*fp32 keys:*{kv} values:*{kv} key_scales:*fp32 value_scales:*fp32"
    sizes = "heads:i32 groups:i32 dim:i32 value_dim:i32 block_size:i32 window:i32 chunked:i32"
    rows = "positions:*i32 token_rows:*i32 ends:*i32 context_lens:*i32 tables:*i32 table_stride:i32"
    flags = "has_ends:i32 has_sinks:i32 scale:fp32 softcap:fp32"
    whole = f"out:*fp32 {cache} sinks:*fp32 {rows} tiles:*i32 {sizes} {flags}"
    lists = "partial:*fp32 stats:*fp32 items:*i32 firsts:*i32"
    own_rows = "positions:*i32 token_rows:*i32 tables:*i32 table_stride:i32 tokens:i32"
    segment = f"{lists} {cache} {own_rows} {sizes} scale:fp32 softcap:fp32"
    for (kv, precision), dim in product(CACHES.items(), DIMS):
        if CACHES[kv] != "bf16" and dim > 128:  # their products fit neither all registers nor shared memory
            continue
        how: Constants = {"SCALED": kv == "i8", "PRECISION": precision, "DIM": dim, "VALUE_DIM": dim}
        caps = (False, True) if kv == "bf16" and 64 < dim <= 256 else (False,)
        for cap, block in product(
            caps, sorted({attention_rows(decode, kv, dim) for decode in (False, True)})
        ):
            own = how | {"CAP": cap, "BLOCK_M": block}
            warps = 4 if dim < 256 or (block == 16 and dim == 256) else 8
            stages = _attention_stages(block, dim) if precision == "bf16" else 2
            yield Variant("attend", types_of(whole, kv=kv), own, warps, stages)
        if precision == "bf16":
            own, stages = how | {"CAP": False, "BLOCK_M": 16}, _attention_stages(16, dim)
            yield Variant("attend_segments", types_of(segment, kv=kv), own, 4 if dim <= 256 else 8, stages)
    listed = "items:*i32 firsts:*i32 positions:*i32 tokens:i32 window:i32 chunked:i32"
    yield Variant("list_segments", types_of(listed), {"BLOCK": LISTED_TOKENS})
    merged = (
        "out:*fp32 partial:*fp32 stats:*fp32 firsts:*i32 sinks:*fp32 heads:i32 value_dim:i32 has_sinks:i32"
    )
    rows = "positions:*i32 token_rows:*i32 row_offsets:*i32 tokens:i32 heads:i32 groups:i32"
    biased = "keys:*fp32 values:*fp32 table:*{w} buckets:*i32"
    biased = f"out:*fp32 q:*fp32 {biased} {rows} dim:i32 value_dim:i32 longest:i32 reach:i32 scale:fp32"
    for weight in FLOATS:
        how = {"BLOCK_M": 16, "DIM": 64, "VALUE_DIM": 64}
        yield Variant("attend_with_distances", types_of(biased, w=weight), how, 4, 2)
    for dim in DIMS:
        yield Variant("merge_segments", types_of(merged), {"VALUE_DIM": dim}, warps=1)


def _sampling() -> Iterator[Variant]:
    block: Constants = {"BLOCK": SAMPLING_BLOCK}
    drawn = (
        "temperatures:*fp64 top_ks:*i32 top_ps:*fp64 min_ps:*fp64 seeds:*i64 sequences:*i32 positions:*i32"
    )
    scratch = "kept:*fp32 kept_ids:*i32 vocab:i32"
    surveyed = "raw_tops:*fp32 tops:*fp32 firsts:*i32"
    where = f"{surveyed} logits:*fp32 rows:*i32"
    chosen = types_of(f"tokens:*i32 faults:*i32 {where} {drawn} sums:*fp64 {scratch} parts:i32")
    yield Variant("choose_tokens", chosen, block | {"PARTS": SURVEYED_PARTS}, warps=8)
    survey = types_of("tops:*fp32 firsts:*i32 logits:*fp32 rows:*i32 vocab:i32")
    yield Variant("survey_logits", survey, block)
    weighed = f"sums:*fp64 tops:*fp32 firsts:*i32 {where.removeprefix(surveyed)}"
    weighed += " temperatures:*fp64 min_ps:*fp64 vocab:i32 parts:i32"
    yield Variant("weigh_logits", types_of(weighed), block | {"PARTS": SURVEYED_PARTS})
    masked = "out:*fp32 logits:*fp32 rows:*i32 masks:*u32 mask_rows:*i32 vocab:i32 words:i32"
    yield Variant("mask_logits", types_of(masked), block)
    biased = "logits:*fp32 rows:*i32 tokens:*i32 biases:*fp32 count:i32 vocab:i32"
    yield Variant("bias_logits", types_of(biased), {"BLOCK": LIST_BLOCK})
    counted = "seen:*i8 output_counts:*i32 slots:*i32"
    penalties = "drafted:*i32 firsts:*i32 repetitions:*fp64 frequencies:*fp32 presences:*fp32"
    penalized = f"logits:*fp32 slots:*i32 seen:*i8 output_counts:*i32 {penalties} vocab:i32"
    yield Variant("penalize_logits", types_of(penalized), block)
    yield Variant(
        "count_tokens", types_of(f"{counted} tokens:*i32 count:i32 vocab:i32"), {"BLOCK": LIST_BLOCK}
    )
    parts, found = {"PARTS": SURVEYED_PARTS}, "sums:*fp64 before:*i32 tops:*fp32 firsts:*i32"
    own = f"{found} tokens:*i32 logits:*fp32 rows:*i32 vocab:i32 parts:i32"
    yield Variant("rank_logits", types_of(own), block | parts)
    listed = f"logprobs:*fp32 ranks:*i32 faults:*i32 log_sums:*fp64 {own}"
    yield Variant("token_logprobs", types_of(listed), parts)
    top = f"logprobs:*fp32 tokens:*i32 log_sums:*fp64 tops:*fp32 logits:*fp32 rows:*i32 {scratch}"
    most = block | parts | {"MOST": MOST_LISTED}
    yield Variant("top_logprobs", types_of(f"{top} parts:i32 k:i32"), most, warps=8)
    fed = "tokens:*i32 sampled:*i32 count:i32"
    yield Variant("feed_tokens", types_of(fed), {"BLOCK": LIST_BLOCK})
    fitted = "out:*fp32 logits:*fp32 vocab:i32 width:i32"
    yield Variant("fit_logits", types_of(fitted), block)
    placed = "out:*i32 places:*i32 values:*i32 count:i32"
    yield Variant("place_entries", types_of(placed), {"BLOCK": LIST_BLOCK})


def _experts() -> Iterator[Variant]:
    chosen, all_in = "picked:*i32 shares:*fp32 scores:*fp32", {"EXPERTS": MOST_EXPERTS}
    routed = types_of(
        f"{chosen} bias:*fp32 factors:*fp32 experts:i32 chosen:i32 groups:i32 kept_groups:i32 "
        "scaling:*fp64 floor:*fp64"
    )
    soft = product((False,), (False, True), (False,), ("", "max"))
    sigmoids = product((True,), (False, True), (True,), ("", "top2"))
    others = ((False, True, True, ""), (True, False, False, ""))  # Ernie 4.5, Llama 4
    for sigmoid, normalized, bias, groups in (*soft, *sigmoids, *others):
        own = all_in | {"SIGMOID": sigmoid, "NORMALIZED": normalized, "BIAS": bias, "GROUPS": groups}
        yield Variant("route", routed, own | {"FACTORS": False})
    own = all_in | {"SIGMOID": False, "NORMALIZED": True, "BIAS": False, "GROUPS": "", "FACTORS": True}
    yield Variant("route", routed, own)  # Gemma 4
    apart = f"{chosen} factors:*fp32 experts:i32 chosen:i32 scaling:*fp64 margin:*fp64"
    yield Variant("route_apart", types_of(apart), all_in | {"FACTORS": False})
    listed = "order:*i32 offsets:*i32"
    yield Variant("sort_by_expert", types_of(f"{listed} picked:*i32 pairs:i32"), {"BLOCK": SORTED_BLOCK})
    scaled = types_of("out:*fp32 x:*fp32 shares:*fp32 width:i32 chosen:i32")
    summed = types_of("out:*fp32 x:*fp32 picked:*i32 shares:*fp32 width:i32 chosen:i32")
    ordered = types_of("out:*fp32 x:*fp32 order:*i32 picked:*i32 width:i32 pairs_of_row:i32 matrices:i32")
    for block in ROW_BLOCKS:
        yield Variant("scale_pairs", scaled, {"BLOCK": block})
        for picked in (False, True):
            yield Variant("order_inputs", ordered, {"PICKED": picked, "BLOCK": block})
        for weighted in (False, True):
            own = {"WEIGHTED": weighted, "CHOSEN": MOST_CHOSEN, "BLOCK": block}
            yield Variant("sum_experts", summed, own)
    yield from grouped_variants()
