"""Compressed attention (DeepSeek-V4), to a window and entries of several tokens, and attention to all tokens.

    python benchmarks/compressed_attention.py
    python benchmarks/compressed_attention.py --heads 128 --number 1024 --contexts 16384 262144

The native core alone, by turns: one layer of --heads heads over bf16 caches of vectors of 512 numbers, with
the sizes of DeepSeek-V4-Flash. "all" attends to a vector of every token, "window" to the last 128, "by 128"
to these and all entries of 128 tokens, "by 4" to these and the best --number entries of 4 tokens, which it
chooses. "choice" is that part of it; "entries" is what making them takes. All without the products before.
Medians of --rounds; numbers are random.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from latent_attention import BLOCK, attention_s

from quire.backends.native import _core

DIM, INDEX_DIM, WINDOW = 512, 128, 128
SHORT, LONG = 4, 128  # tokens of an entry
Record = Callable[["Layer"], object]


@dataclass
class Layer:
    """A program of one layer, with caches for the longest context."""

    options: argparse.Namespace
    native: _core.Native
    groups: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.out = self.native.buffer("T", self.options.heads * DIM)

    def cache(self, dim: int, every: int = 1, rank: int = 0, format: str = "bfloat16") -> _core.KVCache:
        """Return a cache of vectors, filled, in a group of its own."""
        blocks, apart = -(-max(self.options.contexts) // BLOCK), max(1, every // BLOCK)
        size = (blocks, max(1, BLOCK // every), 0, dim, rank or dim, every, apart)
        made = _core.KVCache(self.groups, format, 1, *size)
        self.groups += 1
        for array in made.blocks(blocks):
            if format == "float32":
                array.view(np.float32)[:] = self.rng.standard_normal(array.size // 4, np.float32).reshape(
                    len(array), -1
                )
            else:
                bits = self.rng.standard_normal(array.size // 2, np.float32).view(np.uint32) >> 16
                array.reshape(-1).view(np.uint16)[:] = bits
        return made

    def random(self, width: int) -> int:
        """Return a buffer whose rows are all the same random numbers."""
        out, table = self.native.buffer("T", width), self.rng.standard_normal((1, width), np.float32)
        self.native.embed_stored(out, table, "f32", False, -1, -1)
        return out

    def attend_all(self) -> None:
        q = self.random(self.options.heads * DIM)
        self.native.attend_latents(self.out, q, q, self.cache(DIM), 0, self.options.heads, 0.04)

    def choose(self) -> int:
        """Choose entries; return the buffer of their lists."""
        heads, number = self.options.index_heads, self.options.number
        lists, keys = self.native.buffer("T", number), self.cache(INDEX_DIM, SHORT)
        q, factors = self.random(heads * INDEX_DIM), self.random(heads)
        self.native.choose_positions(lists, q, factors, keys, 0, heads, number)
        return lists

    def attend(self, window: int, every: int = 0, chosen: int = -1) -> None:
        """Attend to a window, and to entries of so many tokens."""
        q, vectors = self.random(self.options.heads * DIM), self.cache(DIM)
        entries = self.cache(DIM, every) if every else None
        lists = (chosen, self.options.number if chosen >= 0 else 0)
        how = (self.options.heads, 0.04, window, None, entries, 0, *lists)
        self.native.attend_vectors(self.out, q, vectors, 0, *how)

    def compress(self) -> None:
        """Make the entries of 4 tokens, and those by which they are chosen."""
        for dim in (DIM, INDEX_DIM):
            rows, bias = self.cache(4 * dim, 1, 2 * dim, "float32"), np.zeros(SHORT * 2 * dim, np.float32)
            values, gates = self.random(2 * dim), self.random(2 * dim)
            out = self.native.buffer("T", dim)
            self.native.compress(out, values, gates, rows, 0, bias, SHORT, dim)

    def seconds(self, tokens: int, context: int) -> float:
        """Compute the last `tokens` of `context` positions."""
        return attention_s(self.native, self.out, 1, tokens, context, groups=self.groups)


LAYERS: dict[str, Record] = {
    "all": Layer.attend_all,
    "window": lambda layer: layer.attend(WINDOW),
    "by 128": lambda layer: layer.attend(WINDOW, LONG),
    "by 4": lambda layer: layer.attend(WINDOW, SHORT, layer.choose()),
    "choice": Layer.choose,
    "entries": Layer.compress,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", type=int, default=64, help="query heads (default: 64)")
    parser.add_argument("--index-heads", type=int, default=64, help="heads of the indexer (default: 64)")
    parser.add_argument("--number", type=int, default=512, help="entries to choose (default: 512)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 16384, 65536])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64], help="computed at once")
    parser.add_argument("--threads", type=int, default=2, help="threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    options = parser.parse_args()
    pool, layers = _core.Native(_core.isas()[0], options.threads), []
    for record in LAYERS.values():
        layers.append(Layer(options, _core.Native(_core.isas()[0], pool)))
        record(layers[-1])
    print(f"{'':28}" + "".join(f"{name:>9}" for name in LAYERS) + "   milliseconds of a layer")
    for tokens in options.tokens:
        for context in options.contexts:
            samples = [[one.seconds(tokens, context) for one in layers] for _ in range(options.rounds)]
            medians = map(statistics.median, zip(*samples, strict=True))
            name = f"{tokens} tokens, context {context}"
            print(f"{name:28}" + "".join(f"{1e3 * seconds:9.2f}" for seconds in medians))


if __name__ == "__main__":
    main()
