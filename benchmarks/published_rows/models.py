"""The folded costs of the models in published measurements.

Most come from a public config.json. MiniMax-M2.5 has the shape of a Qwen3 mixture of experts. DeepSeek-V3
and R1 have latent attention, which Quire does not run: their costs are written down from public numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quire.models import read_model
from quire.program import ops
from quire.program.features import LEADING, TOKENS, Feature
from quire.program.passes import fuse
from quire.program.program import Op, WeightSpec
from quire.roofline.folded import FoldedCost, Part, fold

CONFIGS = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama--Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "Qwen/Qwen3-32B": "Qwen--Qwen3-32B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen--Qwen3-235B-A22B",
}
MINIMAX = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 196608,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class CostedModel:
    """A model as a plan needs it. Bytes of all weights, and of the cache of one token."""

    folded: FoldedCost
    layers: int
    weight_bytes: float
    kv_token_bytes: float


@cache
def costed(name: str, bits: float, configs: Path, arithmetic: str = "bf16") -> CostedModel:
    """Return a model whose matrices have `bits` a weight and are multiplied in a number format.

    Embedding, head, norms and cache have 16 bits, and so has attention.
    """
    if name.startswith("deepseek-ai/"):
        return _deepseek(bits / 8, arithmetic)
    raw = MINIMAX
    if name in CONFIGS:
        raw = json.loads((configs / CONFIGS[name] / "config.json").read_text())
    program = fuse(read_model(raw).program)

    def nbytes(spec: WeightSpec) -> int:
        quantized = spec.quantizable and spec.shape[0] != raw["vocab_size"]
        return int(spec.size * (bits / 8 if quantized else 2))

    def kind(op: Op) -> str:
        product = isinstance(op, ops.Linear | ops.GatedLinear | ops.Experts) and op.out.count == "T"
        return arithmetic if product else "bf16"

    folded = fold(program, nbytes, kv_itemsize=2, arithmetic=kind)
    return CostedModel(
        folded,
        len(program.caches),
        sum(map(nbytes, program.weights().values())),
        program.kv_token_bytes(2),
    )


def _deepseek(itemsize: float, arithmetic: str) -> CostedModel:
    """Cost DeepSeek-V3: 61 layers of latent attention, 3 dense, 58 with 8 of 256 experts and a shared one."""
    hidden, heads, layers, experts = 7168, 128, 61, 58 * 256 * 3 * 7168 * 2048
    attention = hidden * 1536 + 1536 * heads * 192 + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden
    dense = layers * attention + 3 * 3 * hidden * 18432 + 58 * 3 * hidden * 2048
    head = 129280 * hidden
    features = (*LEADING, Feature("positions"), Feature("pairs"), Feature("experts", 0, 8, 256))
    one, _, _, logits, positions, pairs, touched = range(len(features))

    def part(name: str, kind: str, flops: dict[int, float], read: dict[int, float], kv: float = 0) -> Part:
        row = [tuple(terms.get(i, 0.0) for i in range(len(features))) for terms in (flops, read)]
        kv_read = tuple(kv if i == positions else 0.0 for i in range(len(features)))
        kv_written = tuple(kv if i == TOKENS else 0.0 for i in range(len(features)))
        return Part(name, kind, row[0], row[1], kv_read, kv_written, (0.0,) * len(features))  # type: ignore[arg-type]

    weights = {one: dense * itemsize, touched: experts * itemsize}
    latent = layers * 576 * 2.0
    parts = (
        part("products", arithmetic, {TOKENS: 2 * (dense + experts * 8 / 256)}, weights),
        part("attention", "bf16", {pairs: layers * 2 * heads * (192 + 128)}, {}, latent),
        part("head", "bf16", {logits: 2 * head}, {one: head * 2.0}),
    )
    total = part("rest", "", {}, {one: dense * itemsize + head * 2, touched: experts * itemsize}, latent)
    nbytes = (dense + experts) * itemsize + 2 * head * 2
    return CostedModel(FoldedCost(features, parts, total), layers, nbytes, latent)
