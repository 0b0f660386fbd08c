"""Attention over cached latents, in formats of caches and weights: see test_whole_models.py for families."""

from __future__ import annotations

import pytest
from lowered import distance, rounding_to_bf16
from on_accelerator import interpreted, wide
from test_whole_models import TOKENS, in_parts, stored
from tiny import Paged, same_bits

from quire.program.passes import fuse


@pytest.mark.parametrize(
    ("cache", "format", "most"),
    [("bfloat16", "bf16", 3e-2), ("int8", "int8", 8e-2), ("float32", "int4", 2e-5)],
)
def test_formats(cache: str, format: str, most: float) -> None:
    """Numbers near those of the reference, and the same bits in chunks beside another row."""
    program = fuse(wide("minicpm3").program)
    weights, prompts = stored(program, format), [TOKENS[:9], TOKENS[40:43]]
    with rounding_to_bf16(format == "bf16"):
        reference = Paged(program, weights, kv_cache_dtype="bfloat16" if cache == "bfloat16" else "float32")
        wanted = reference.prefill(reference.sequence(prompts[0]))
    whole = Paged(program, weights, kv_cache_dtype=cache, make=interpreted)
    first = whole.prefill(whole.sequence(prompts[0]))
    apart = distance(first, wanted)
    assert apart < most
    assert (apart > 1e-4) == (cache != "float32")
    parts = Paged(program, weights, kv_cache_dtype=cache, block_size=4, make=interpreted, seed=1)
    chunked, _ = in_parts(parts, prompts, [(3, 1, 5), (1, 1, 1)])
    assert same_bits(chunked, first)
