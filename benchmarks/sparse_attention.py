"""Attention over latents to positions that an indexer chooses (DeepSeek Sparse Attention), and to all.

    python benchmarks/sparse_attention.py
    python benchmarks/sparse_attention.py --heads 128 --index-heads 64 --contexts 4096 65536

The native core alone, by turns: one layer of --heads heads over a bf16 cache of latents of 576 numbers, with
the sizes of GLM-5. "all" attends to every position, "chosen" to the best --number of them, "choice" is what
choosing them takes, without the products that make index queries and keys. Medians of --rounds; numbers are
random.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from latent_attention import BLOCK, RANK, ROTATED, attention_s

from quire.backends.native import _core

INDEX_DIM = 128


class Layer:
    """A program that chooses `number` positions and attends to them; to all without `number`.

    One that does not `attend` only chooses.
    """

    def __init__(
        self, options: argparse.Namespace, pool: _core.Native, number: int, attend: bool = True
    ) -> None:
        heads, index_heads, positions = options.heads, options.index_heads, max(options.contexts)
        self.native, blocks = _core.Native(_core.isas()[0], pool), -(-positions // BLOCK)
        index = _core.KVCache(0, "bfloat16", 1, blocks, BLOCK, 1, INDEX_DIM, 0)
        latents = _core.KVCache(1, "bfloat16", 1, blocks, BLOCK, 0, RANK + ROTATED, RANK)
        rng = np.random.default_rng(0)
        for cache in (index, latents):
            for array in cache.blocks(blocks):
                bits = rng.standard_normal(array.size // 2, np.float32).view(np.uint32) >> 16
                array.reshape(-1).view(np.uint16)[:] = bits
        widths = [heads * RANK, heads * ROTATED, index_heads * INDEX_DIM, index_heads]
        q, rest, index_q, factors = (self._random(width, rng) for width in widths)
        self.out, chosen = self.native.buffer("T", heads * RANK), -1
        if number:
            chosen = self.native.buffer("T", number)
            self.native.choose_positions(chosen, index_q, factors, index, 0, index_heads, number)
        if attend:
            self.native.attend_latents(self.out, q, rest, latents, 0, heads, 0.1, chosen, number)

    def _random(self, width: int, rng: np.random.Generator) -> int:
        """Return a buffer whose rows are all the same random numbers."""
        out, table = self.native.buffer("T", width), rng.standard_normal((1, width), np.float32)
        self.native.embed_stored(out, table, "f32", False, -1, -1)
        return out

    def seconds(self, tokens: int, context: int) -> float:
        """Compute the last `tokens` of `context` positions."""
        return attention_s(self.native, self.out, 1, tokens, context, groups=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", type=int, default=64, help="query heads (default: 64)")
    parser.add_argument("--index-heads", type=int, default=32, help="heads of the indexer (default: 32)")
    parser.add_argument("--number", type=int, default=2048, help="positions to choose (default: 2048)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 16384, 65536])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64], help="computed at once")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    options = parser.parse_args()
    pool = _core.Native(_core.isas()[0], options.threads)
    layers = [Layer(options, pool, number, attend) for number, attend in ((0, True), (options.number, True))]
    layers.append(Layer(options, pool, options.number, attend=False))
    print(f"{'':32}{'all':>10}{'chosen':>10}{'choice':>10}   milliseconds of a layer")
    for tokens in options.tokens:
        for context in options.contexts:
            samples = [[one.seconds(tokens, context) for one in layers] for _ in range(options.rounds)]
            whole, both, choice = (1e3 * statistics.median(column) for column in zip(*samples, strict=True))
            name = f"{tokens} tokens, context {context}"
            print(f"{name:32}{whole:10.2f}{both - choice:10.2f}{choice:10.2f}")


if __name__ == "__main__":
    main()
