"""K-EXAONE (LG AI Research, 2026): EXAONE 4's attention, and DeepSeek-V3's experts, in blocks with norms
before each part.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config import ModelConfig
from quire.models.deepseek import experts_or_mlp
from quire.models.exaone4 import attention
from quire.models.layers import embed_tokens, head
from quire.models.moe import biased_routing
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops.experts import Routing


def exaone_moe(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, attention(b, cfg, i, h, p / "self_attn"))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, experts_or_mlp(b, cfg, i, h, p / "mlp", _routing))
    return head(b, cfg, x, w)


def _routing(cfg: ModelConfig, p: Names) -> Routing:
    name = p / "e_score_correction_bias"
    return replace(biased_routing(cfg, p), bias=WeightSpec(name, (cfg.num_experts,), (name,)))
