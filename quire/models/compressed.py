"""Recording compressed attention (DeepSeek-V4): entries of several tokens, and attention to them."""

from __future__ import annotations

from quire.errors import ConfigError
from quire.program import Builder, Names, PagedVectors, Value, WeightSpec
from quire.program.caches import PagedInputs
from quire.program.ops import ChoosePositions, Compress, CompressedAttention


def compress(
    b: Builder, values: Value, gates: Value, bias: Names, every: int, *, overlapping: bool = False
) -> Value:
    """Record the entries of `every` tokens each (see the op) in the rows of their last tokens, [T, 1, dim].

    `bias` names a weight [every, width].
    """
    width = values.width
    if gates.width != width or width % (2 if overlapping else 1):
        raise ConfigError(f"values {values.shape} and gates {gates.shape} cannot become entries")
    weight = WeightSpec(bias, (every, width), (bias,))
    layer = b.cache(PagedInputs(2 * width, every * (2 if overlapping else 1)))
    out = b.value((1, width // 2 if overlapping else width))
    return b.record(Compress(out, values, gates, weight, layer)).out


def choose_entries(b: Builder, q: Value, factors: Value, k: Value, every: int, number: int) -> Value:
    """Record the choice of `number` entries by index keys k [T, 1, dim] in the rows of their last tokens."""
    if q.shape[1:] != k.shape[1:] or factors.width != q.shape[0]:
        raise ConfigError(f"shapes differ: queries {q.shape}, factors {factors.shape}, keys {k.shape}")
    lists = b.value((number,), dtype="int32")
    layer = b.cache(PagedVectors(k.width, every))
    return b.record(ChoosePositions(lists, q, factors, k, layer, every)).out


def compressed_attention(
    b: Builder,
    q: Value,
    k: Value,
    entries: Value | None = None,
    every: int = 0,
    *,
    window: int,
    scale: float,
    sinks: Names | None = None,
    chosen: Value | None = None,
) -> Value:
    """Record attention of q [T, heads, dim] to vectors k [T, 1, dim] of a window, and to entries."""
    heads, dim = q.shape
    if any(value.shape != (1, dim) for value in (k, entries) if value is not None):
        raise ConfigError(f"shapes differ: queries {q.shape}, vectors {k.shape}, entries {entries}")
    op = CompressedAttention(
        b.value(q.shape),
        q,
        k,
        layer=b.cache(PagedVectors(dim, window=window)),
        window=window,
        scale=scale,
        sinks=None if sinks is None else WeightSpec(sinks, (heads,), (sinks,)),
        entries=entries,
        every=every,
        entry_layer=-1 if entries is None else b.cache(PagedVectors(dim, every)),
        chosen=chosen,
    )
    return b.record(op).out
