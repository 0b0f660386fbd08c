"""StableLM 2 (arXiv:2402.17834): LayerNorm, a quarter of each head rotated; some attend beside the MLP and
normalize each head with numbers of its own.
"""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, project_qkv, rotate
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops import ScaleByWeight


def stablelm(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    beside = cfg.flag("use_parallel_residual")
    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.layer_norm(x, p / "input_layernorm", cfg.norm_eps)
        x = b.add(x, _attention(b, cfg, h, p / "self_attn"))
        if not beside:
            h = b.layer_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, gated_mlp(b, cfg, h, p / "mlp"))
    x = b.layer_norm(b.sampled_rows(x), w / "model.norm", cfg.norm_eps)
    return b.linear(x, w / cfg.lm_head, cfg.vocab_size)


def _attention(b: Builder, cfg: ModelConfig, h: Value, p: Names) -> Value:
    q, k, v = project_qkv(b, cfg, h, p, bias=cfg.flag("use_qkv_bias"))
    if cfg.flag("qk_layernorm"):
        q = _norm_by_head(b, q, p / "q_layernorm", cfg.norm_eps)
        k = _norm_by_head(b, k, p / "k_layernorm", cfg.norm_eps)
    q, k = rotate(b, q, k, cfg.rope())
    return b.linear(b.attention(q, k, v), p / "o_proj", cfg.hidden_size)


def _norm_by_head(b: Builder, x: Value, p: Names, eps: float) -> Value:
    """Return the LayerNorm of each head, times its own weight."""
    sources = tuple(p / f"norms.{i}.weight" for i in range(x.shape[0]))
    shape = x.shape if len(sources) > 1 else x.shape[1:]
    x = b.layer_norm(x, None, eps)
    return b.record(ScaleByWeight(b.value(x.shape), x, WeightSpec(p / "weight", shape, sources))).out
