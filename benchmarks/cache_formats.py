"""Attention over keys and values in each format of the cache: what a format's fewer bytes gain or cost.

    python benchmarks/cache_formats.py
    python benchmarks/cache_formats.py --context 16384 --heads 16 --groups 8 --dim 128

The native core alone: --layers layers of attention, by turns over caches of each format, written with zeros
(memory that was never written is read from one page of the system, so from a cache); the time does not depend
on numbers. Columns: one token, eight sequences of one token each with an eighth of the context, and a
prompt's last 512 tokens; medians of --rounds, in microseconds a layer. QUIRE_ISA chooses an instruction set.
"""

from __future__ import annotations

import argparse
import statistics

from latent_attention import BLOCK, attention_s

from quire.backends.native import _core
from quire.backends.native.device import usable_cores
from quire.environment import instruction_set

FORMATS = ("float32", "float16", "bfloat16", "int8")


class Layers:
    """Layers of attention over one cache, computed by the threads of `pool`."""

    def __init__(self, format: str, given: argparse.Namespace, isa: str, pool: _core.Native) -> None:
        self.native = _core.Native(isa, pool)
        heads, groups, dim = given.heads, given.groups, given.dim
        blocks = -(-given.context // BLOCK) + 8
        cache = _core.KVCache(0, format, given.layers, blocks, BLOCK, groups, dim, dim)
        for array in cache.blocks(blocks):
            array.fill(0)
        q, k, v = (self.native.buffer("T", width * dim) for width in (heads, groups, groups))
        self.out = self.native.buffer("T", heads * dim)
        how = {
            "scale": dim**-0.5,
            "window": 0,
            "chunked": False,
            "softcap": 0.0,
            "sinks": None,
            "causal": True,
        }
        for layer in range(given.layers):
            self.native.write_kv(k, v, cache, layer)
            self.native.attend("T", self.out, q, cache, layer, heads=heads, **how)

    def seconds(self, rows: int, tokens: int, context: int) -> float:
        """Compute the last `tokens` of `context` positions, in each of `rows` sequences."""
        return attention_s(self.native, self.out, rows, tokens, context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in {"heads": 32, "groups": 8, "dim": 64, "layers": 16, "context": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cores())
    given = parser.parse_args()
    isa = instruction_set() or _core.isas()[0]
    pool = _core.Native(isa, given.threads)
    made = {format: Layers(format, given, isa, pool) for format in FORMATS}
    cases = {
        "1 token": (1, 1, given.context),
        "8 x 1": (8, 1, given.context // 8),
        "512 tokens": (1, 512, given.context),
    }
    print(f"{isa}, {given.threads} threads, {given.heads} heads on {given.groups} of {given.dim} numbers")
    print(f"{'us a layer':12}" + "".join(f"{name:>14}" for name in cases))
    times: dict[tuple[str, str], list[float]] = {}
    for name, case in cases.items():
        for _ in range(given.rounds + 1 if case[1] == 1 else 3):
            for format, layers in made.items():
                times.setdefault((format, name), []).append(layers.seconds(*case) / given.layers * 1e6)
    for format in FORMATS:
        medians = [statistics.median(times[format, name][1:]) for name in cases]
        print(f"{format:12}" + "".join(f"{median:14,.0f}" for median in medians))


if __name__ == "__main__":
    main()
