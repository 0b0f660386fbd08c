"""BitNet b1.58 (arXiv:2504.12285): Llama's block with a squared ReLU and a norm before each output matrix."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, head, project_qkv, rotate
from quire.program import Builder, Names, Value


def bitnet(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias = cfg.flag("attention_bias")
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, cfg.rope())
        h = b.rms_norm(b.attention(q, k, v), p / "self_attn.attn_sub_norm", cfg.norm_eps)
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        gate, up = (b.linear(h, p / f"mlp.{name}_proj", cfg.intermediate_size) for name in ("gate", "up"))
        h = b.rms_norm(b.gated_activation(gate, up, cfg.hidden_act), p / "mlp.ffn_sub_norm", cfg.norm_eps)
        x = b.add(x, b.linear(h, p / "mlp.down_proj", cfg.hidden_size))
    return head(b, cfg, x, w)
