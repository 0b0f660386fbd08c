"""Integers of a step: tokens that the step before it sampled, and entries of tables that stay on the GPU."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def feed_tokens(tokens, sampled, count, BLOCK: tl.constexpr):
    """tokens[i] = sampled[-1 - tokens[i]] where it is negative, in place; all int32.

    So a step is launched before the host knows what the step before it sampled. Grid (count / BLOCK,).
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    token = tl.load(tokens + entry, mask=inside, other=0)
    unknown = inside & (token < 0)
    tl.store(tokens + entry, tl.load(sampled + (-1 - token), mask=unknown, other=0), mask=unknown)


@triton.jit
def place_entries(out, places, values, count, BLOCK: tl.constexpr):
    """out[places[i]] = values[i] for `count` different places; all int32. Grid (count / BLOCK,)."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    place = tl.load(places + entry, mask=inside, other=0)
    tl.store(out + place, tl.load(values + entry, mask=inside, other=0), mask=inside)
