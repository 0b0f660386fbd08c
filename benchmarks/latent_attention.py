"""Latent attention (MLA) in its absorbed form, beside attention over the same keys and values written out.

    python benchmarks/latent_attention.py
    python benchmarks/latent_attention.py --heads 128 --tokens 1024

The native core alone, by turns: one layer of --heads heads over a bf16 cache, with the sizes of DeepSeek-V2
and V3. "absorbed" reads latents of 576 numbers; "written out" has keys of 192 and values of 128 for each
head, and keeps them all. "expansion" is what a prompt would pay to compute these from latents, once for each
chunk: the product of the whole context with kv_b_proj. Medians of --rounds; zeros for numbers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from quire.backends.native import _core

RANK, ROTATED, PLAIN, VALUES = 512, 64, 128, 128
BLOCK = 16


class Form:
    """A program of one attention op, computed by the threads of `pool`."""

    def __init__(self, latent: bool, heads: int, pool: _core.Native, positions: int) -> None:
        self.native = _core.Native(_core.isas()[0], pool)
        widths = [heads * RANK, heads * ROTATED, RANK, ROTATED]
        dims = (0, RANK + ROTATED, RANK)
        if not latent:
            widths = [heads * (PLAIN + ROTATED), heads * (PLAIN + ROTATED), heads * VALUES]
            dims = (heads, PLAIN + ROTATED, VALUES)
        blocks = -(-positions // BLOCK)
        cache = _core.KVCache(0, "bfloat16", 1, blocks, BLOCK, *dims)
        for array in cache.blocks(blocks):
            array.fill(0)  # unwritten memory would be one page of the system's
        inputs = [self.native.buffer("T", width) for width in widths]
        self.out = self.native.buffer("T", heads * (RANK if latent else VALUES))
        if latent:
            q, rest, c, r = inputs
            self.native.write_kv(r, c, cache, 0)
            self.native.attend_latents(self.out, q, rest, cache, 0, heads=heads, scale=0.1)
        else:
            q, k, v = inputs
            self.native.write_kv(k, v, cache, 0)
            how = {"scale": 0.1, "window": 0, "chunked": False, "softcap": 0.0, "sinks": None, "causal": True}
            self.native.attend("T", self.out, q, cache, 0, heads=heads, **how)

    def seconds(self, rows: int, tokens: int, context: int) -> float:
        """Compute the last `tokens` of `context` positions, in each of `rows` sequences."""
        return attention_s(self.native, self.out, rows, tokens, context)


def attention_s(
    native: _core.Native, out: int, rows: int, tokens: int, context: int, groups: int = 1
) -> float:
    """Return the seconds that a program takes for the last `tokens` of `context` positions of sequences."""
    count, blocks = rows * tokens, -(-context // BLOCK)
    tables = np.arange(rows * blocks).reshape(rows, blocks)
    begin = time.perf_counter()
    native.run(
        np.zeros(count, np.int64),
        np.tile(np.arange(context - tokens, context), rows),
        np.arange(0, count + 1, tokens),
        [tables] * groups,
        np.arange(rows),
        np.zeros(rows, np.int64),
        np.zeros(0, np.int64),
        [],
        [],
        out,
        1,
        [],
        None,
    )
    return time.perf_counter() - begin


def expansion(heads: int, pool: _core.Native, context: int) -> Callable[[], float]:
    """Return a measure of the product of a context with kv_b_proj, in bf16."""
    native = _core.Native(_core.isas()[0], pool)
    weight = _core.Matrix("bf16", 1, heads * (PLAIN + VALUES), RANK)
    x, out = native.buffer("T", RANK), native.buffer("T", heads * (PLAIN + VALUES))
    native.pack("T", x, RANK, weight)
    native.products("T")
    native.linear(out, weight, None)
    one = np.zeros(1, np.int64)

    def seconds() -> float:
        ids, offsets = np.zeros(context, np.int64), np.array([0, context])
        begin = time.perf_counter()
        native.run(ids, ids, offsets, [], one, one, one[:0], [], [], out, 1, [], None)
        return time.perf_counter() - begin

    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", type=int, default=16, help="query heads (default: 16)")
    parser.add_argument("--tokens", type=int, default=512, help="of a chunk of a prompt (default: 512)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    options = parser.parse_args()
    heads, pool = options.heads, _core.Native(_core.isas()[0], options.threads)
    latent, written = (Form(form, heads, pool, 16 * 4096) for form in (True, False))
    print(f"{'':32}{'absorbed':>10}{'written out':>14}{'expansion':>12}   milliseconds of a layer")
    chunks = [(1, options.tokens, context) for context in (options.tokens, 2048, 4096)]
    for rows, tokens, context in [*chunks, (1, 1, 512), (1, 1, 4096), (16, 1, 512), (16, 1, 4096)]:
        measures = [
            lambda shape=(rows, tokens, context): latent.seconds(*shape),
            lambda shape=(rows, tokens, context): written.seconds(*shape),
            expansion(heads, pool, context) if tokens > 1 else lambda: 0.0,
        ]
        samples = [[measure() for measure in measures] for _ in range(options.rounds)]
        found = [1e3 * statistics.median(column) for column in zip(*samples, strict=True)]
        name = f"{rows} x {tokens} tokens, context {context}"
        print(f"{name:32}{found[0]:10.2f}{found[1]:14.2f}{found[2]:12.2f}")


if __name__ == "__main__":
    main()
