"""The worked numbers of the founding documents: as published, recomputed, and why they differ.

Every figure is computed here from a formula, the catalogue of machines or the shape of a model. Symbols:
N parameters, b bytes a parameter, BW bandwidth in bytes/s, F operations/s, n prompt tokens, m output tokens,
B batch. The documents take an A100 at 2.0 TB/s (its data sheet says 2.039) and models of 8 and 70 billion
parameters with 2 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.roofline.machines import find

MS, TB, GB, TERA = 1e3, 1e12, 1e9, 1e12
A100_BANDWIDTH = 2.0 * TB
VOCABULARY = 128_256  # of Llama 3
EARLY_H100 = 500 * TERA  # operations/s: what the documents take for "closer to 500"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as the documents describe it."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    itemsize: int = 2

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.itemsize

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    def flops(self, num_tokens: float) -> float:
        """Return the operations of the products with weights: a multiply-add for each parameter."""
        return 2 * self.parameters * num_tokens


LLAMA_8B = ModelShape(8e9, 32, 32, 8)
LLAMA_70B = ModelShape(70e9, 80, 64, 8)


@dataclass(frozen=True, slots=True)
class WorkedNumber:
    """One row: `values` are the recomputed figures that `recomputed` prints."""

    number: int
    published: str
    recomputed: str
    values: tuple[float, ...]
    why: str


Row = tuple[str, str, tuple[float, ...], str]  # published, recomputed with {} for each value, values, why


def worked_numbers() -> tuple[WorkedNumber, ...]:
    """Return all rows in order, recomputed now."""
    rows = (*_memory_and_speed(), *_one_answer(), *_shapes_and_phases(), *_large_and_small())
    return tuple(
        WorkedNumber(number, published, recomputed.format(*values), values, why)
        for number, (published, recomputed, values, why) in enumerate(rows, 1)
    )


def expected_tokens(accepted: float, drafted: int) -> float:
    """Return the mean tokens of a speculative step: drafts are accepted one after the other."""
    return (1 - accepted ** (drafted + 1)) / (1 - accepted)


def _memory_and_speed() -> Iterator[Row]:
    """Yield rows 1 to 11."""
    h100, a100 = find("H100 SXM"), find("A100 SXM 80GB")
    small, large = LLAMA_8B, LLAMA_70B
    read, rate = small.weight_bytes / 0.01, small.flops(512) / 0.01
    shares = rate / h100.rate("bf16") * 100, read / h100.bandwidth * 100
    values: tuple[float, ...] = (rate / TERA, shares[0], read / TB, shares[1])
    told = "8B: {:.0f} TF/s = {:.0f}% of an H100; {:.1f} TB/s = {:.0f}%"
    yield "512 tokens in 10 ms: GPU 85%, bandwidth 30%", told, values, "the model is not named"
    values = tuple(0.9 * 0.025 * bandwidth / GB for bandwidth in (h100.bandwidth, A100_BANDWIDTH))
    told = "90% of 25 ms reads {:.0f} GB (H100), {:.0f} GB (A100)"
    yield "decode in 25 ms: GPU 15%, bandwidth 90%", told, values, "no one model and machine give 1 and 2"
    told = "2 L H D bytes: 8B {:,} B a token, 70B {:,}; 8B without GQA {:.0f} times that"
    values = small.kv_token_bytes, large.kv_token_bytes, small.heads / small.kv_heads
    yield "KV grows with sequence x layers x KV heads x head dim", told, values, "equal"
    values = (small.weight_bytes // small.kv_token_bytes,)
    yield "KV can exceed the weights", "8B in 16 bits: at {:,.0f} tokens", values, "equal"
    values = tuple(small.weight_bytes / batch / GB for batch in (1, 16))
    told = "N b / B + KV: {:.0f} GB a token alone, {:.0f} GB in a batch of 16"
    yield "1 or 16 outputs load the same weights", told, values, "equal per step, 1/B per token"
    values = tuple(_decode_rate(2 * batch) / _decode_rate(batch) for batch in (16, 64, 156))
    told = "8B on an A100: {:.1f} times at 16, {:.1f} at 64, {:.1f} at 156"
    yield "twice the batch, twice the tokens", told, values, "only while memory-bound"
    values = tuple(large.parameters * itemsize / GB for itemsize in (1, 2))
    told = "{:.0f} GB in int8, {:.0f} GB in fp16"
    yield "about 70 GB for Llama-2 70B", told, values, "the figure is that of int8"
    ridge = a100.rate("bf16") / A100_BANDWIDTH
    told = "n / {:.0f}: 10 times at {:,.0f} tokens, 20 at {:,.0f}"
    yield "10 to 20 times slower without a KV cache", told, (ridge, 10 * ridge, 20 * ridge), "it depends on n"
    values = tuple((1 - bits / 16) * 100 for bits in (8.5, 4.5))
    told = "with scales, 8.5 bits: {:.0f}% less; 4.5 bits: {:.0f}% less"
    yield "int8 half, int4 a quarter of the memory", told, values, "scales of groups of 32"
    values = tuple(16 / bits for bits in (8, 4, 8.5, 4.5))
    told = "at most {:.1f} and {:.1f} times ({:.2f} and {:.2f} with scales)"
    yield "int8 2-3 times, int4 3-4 times faster", told, values, "3 for int8 is more than its bytes allow"
    values = tuple(expected_tokens(accepted, 3) for accepted in (0.5, 0.6, 0.7, 0.8))
    told = "k = 3, accepted .5/.6/.7/.8: {:.2f}/{:.2f}/{:.2f}/{:.2f}"
    yield "speculation 2 to 3 times", told, values, "2 from an acceptance of .55; drafting costs extra"


def _decode_rate(batch: float) -> float:
    """Return tokens/s of the 8B on an A100."""
    peak = find("A100 SXM 80GB").rate("bf16")
    return batch / max(LLAMA_8B.weight_bytes / A100_BANDWIDTH, LLAMA_8B.flops(batch) / peak)


def _one_answer() -> Iterator[Row]:
    """Yield rows 12 to 21: an 8B on an A100, a prompt of 1,000 and an answer of 100."""
    peak, h100 = find("A100 SXM 80GB").rate("bf16"), find("H100 SXM")
    model, first = LLAMA_8B, "the prefill gives the first token"
    step, prefill = model.weight_bytes / A100_BANDWIDTH * MS, model.flops(1000) / peak * MS
    told = "pass of 1,000: {:.1f} ms ({:.3f} a token); decode step {:.1f} ms"
    values: tuple[float, ...] = (max(prefill, step), prefill / 1000, step)
    yield "the first token is faster than later ones", told, values, "true per token, false per pass"
    values = (h100.bandwidth / A100_BANDWIDTH,)
    yield "H100 against A100 by bandwidth", "{:.3f} for decode", values, "equal"
    values = model.weight_bytes / GB, model.weight_bytes * 100 / TB
    yield "16 GB a token, 100 tokens 1.6 TB", "{:.0f} GB; {:.1f} TB", values, "equal; weights only"
    yield "16/2000 = 8 ms, 125 tokens/s", "{:.0f} ms, {:.0f} tokens/s", (step, MS / step), "equal"
    rate = model.flops(1) / step * MS
    told = "16 GFLOP in 8 ms: {:.1f} TF/s = {:.2f}% = 1/{:.0f}"
    values = rate / TERA, rate / peak * 100, peak / rate
    why = "operations of a token taken as those of a second"
    yield "16 GFLOPS of 312 T = 0.005%: 99.995% idle", told, values, why
    yield "prefill of 1,000 in about 50 ms", "{:.1f} ms", (prefill,), "rounded"
    told = "{:.0f}; {:.1f}, or {:.1f} where the prefill gives the first token"
    values = 100 * step, prefill + 100 * step, prefill + 99 * step
    yield "100 x 8 = 800 ms, total 850", told, values, f"{first}: 99 steps follow"
    share = prefill / (prefill + 100 * step) * 100
    yield "6% and 94% of the time", "{:.1f}% and {:.1f}%", (share, 100 - share), "equal"
    told = "{:.0f} times fewer, in {:.1f} times the time"
    yield "10 times fewer tokens", told, (1000 / 100, 100 * step / prefill), "equal"
    yield "ridge of an A100: 156", "F / BW = {:.0f}", (peak / A100_BANDWIDTH,), "equal"


def _shapes_and_phases() -> Iterator[Row]:
    """Yield rows 22 to 27."""
    small, large = LLAMA_8B, LLAMA_70B
    values: tuple[float, ...] = (2 * 1 / small.itemsize, 2 * 1000 / small.itemsize)
    why = "weights only: the KV cache lowers both"
    yield "intensity about 1 and about 1000", "2 B / b = {:.0f}; n = {:,.0f}", values, why
    told, values = "{:.0f} to {:.0f} times", (0.01 / 0.001, 0.10 / 0.001)
    why = "prices, not computed from a machine"
    yield "5-20 ms, $0.001 against 100 ms-10 s, $0.01-0.10", told, values, why
    flops = 2 * 4096 * 4096
    values = 1000 * flops / 1e9, flops / 1e6, 4096 * 4096 * 2 / 1e6
    told = "{:.1f} GFLOP and {:.1f} MFLOP over the same {:.1f} MB"
    yield "[1000,4096] and [1,4096] times [4096,4096]", told, values, "equal; weights only"
    why = "the prefill gives the first token"
    yield "500 tokens, 500 steps", "{:.0f} steps and a prefill", (500 - 1,), why
    told, values = "{:.1f} with the demo's tokenizer on its own text", (_characters_a_token(),)
    yield "3.5 to 4 characters a token", told, values, "it depends on tokenizer and text"
    told = "8B {:.0f} layers of {:.0f}; 70B {:.0f} of {:.0f}; vocabulary {:,}"
    values = small.layers, small.width, large.layers, large.width, VOCABULARY
    yield "32/80/96 layers, vocabulary 128,256, widths 4096/8192", told, values, "96 layers are GPT-3's"


def _characters_a_token() -> float:
    from quire.text.tokenizer import need_tokenizer
    from quire.weights.hub import DEMO, open_model

    text = (DEMO.parent / "quality.txt").read_text()
    return len(text) / len(need_tokenizer(open_model("demo")).encode(text))


def _large_and_small() -> Iterator[Row]:
    """Yield rows 28 to 40: a 70B and an 8B on an H100."""
    h100, large, small = find("H100 SXM"), LLAMA_70B, LLAMA_8B
    bandwidth, peak, first = h100.bandwidth, h100.rate("bf16"), "the prefill gives the first token"
    read, early, dense = (
        large.weight_bytes / bandwidth * MS,
        large.flops(1) / EARLY_H100 * MS,
        large.flops(1) / peak * MS,
    )
    values: tuple[float, ...] = (large.weight_bytes / GB, read)
    why = "it does not fit one card of 80 GB"
    yield "70B fp16 140 GB; 140/3350 = 42 ms", "{:.0f} GB, {:.1f} ms", values, why
    told = "dense {:.0f} TF/s; ridge {:.0f} at 500, {:.0f} at 989"
    values = peak / TERA, EARLY_H100 / bandwidth, peak / bandwidth
    yield "1979 TF sparse, dense closer to 500", told, values, "sparse is twice dense: 989"
    yield "140 GFLOP / 500 T = 0.28 ms", "{:.2f} ms ({:.2f} at 989)", (early, dense), "equal at 500"
    told, values = "{:.0f} at 500, {:.0f} at 989", (read / early, read / dense)
    yield "reading takes over 150 times as long", told, values, "just under at 500"
    told, values = "{:.2f}% at 500, {:.2f}% at 989", (early / read * 100, dense / read * 100)
    yield "the units are busy less than half a percent", told, values, "true at 989 only"
    told = "{:.0f} times; linear to B* = {:.0f} ({:.0f} at 989)"
    values = 32 * read / max(read, 32 * early), read / early, read / dense
    yield "batch 32: 32 times", told, values, "until the KV cache is as large as the weights"
    values = small.weight_bytes / GB, small.flops(8) / 1e9
    yield "8 tokens: 16 GB, 128 GFLOP", "{:.0f} GB, 2 N n = {:.0f} GFLOP", values, "equal"
    floor, typical = small.weight_bytes / bandwidth * MS, 8.0
    told, values = "memory {:.1f} ms, compute {:.2f} ms", (floor, small.flops(8) / EARLY_H100 * MS)
    yield 'prefill about 5 ms, "dominated by compute"', told, values, "8 tokens are memory-bound"
    told, values = "floor {:.1f} ms: {:.0f}% of the roof", (floor, floor / typical * 100)
    yield "decode about 8 ms", told, values, "8 ms is a typical share, not the floor"
    prefill, outputs = 5, 30
    total = prefill + (outputs - 1) * typical
    told = "29 steps follow the prefill: {:.0f} ms"
    yield "5 + 30 x 8 = 245 ms", told, (total,), first
    yield "TTFT about 13 ms", "{:.0f} ms", (prefill,), f"{first}: no decode step before it"
    told, values = "(total - TTFT) / (m - 1) = {:.0f} ms", ((total - prefill) / (outputs - 1),)
    yield "ITL about 8 ms", told, values, "equal, over 29 gaps"
    told, values = "{:.1f} and {:.1f} ms on an H100", (floor, 160 * GB / bandwidth * MS)
    yield "16 or 160 GB sets the floor", told, values, "equal; 160 GB needs 2 cards"
