"""dots.llm1 (arXiv:2506.05767) and Solar Open (Upstage, 2026): DeepSeek-V3's experts in blocks with the
attention of Qwen3, or that of Llama.
"""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.deepseek import experts_or_mlp, mixture
from quire.models.layers import embed_tokens, head, project_qkv, rotate
from quire.models.moe import biased_routing
from quire.models.qwen3 import attention
from quire.program import Builder, Names, Value


def dots1(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    rope, x = cfg.rope(), embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, attention(b, cfg, i, h, p / "self_attn", rope))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, experts_or_mlp(b, cfg, i, h, p / "mlp", biased_routing))
    return head(b, cfg, x, w)


def solar_open(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    rope, x = cfg.rope(), embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=cfg.flag("attention_bias"))
        q, k = rotate(b, q, k, rope)
        x = b.add(x, b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, mixture(b, cfg, h, p / "mlp", biased_routing))
    return head(b, cfg, x, w)
