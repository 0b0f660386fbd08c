"""Cohere 1 and 2 (Command R, R+ and R7B, Aya): attention and MLP in parallel on one LayerNorm, scaled logits.

Command R+ normalizes queries and keys by head. Cohere 2 has positions only in the window layers.
"""

from __future__ import annotations

from quire.images.vision import Vision
from quire.models.config import SLIDING, ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, project_qkv, rotate
from quire.models.tower import place_images
from quire.program import Builder, Names, Value, WeightSpec
from quire.program.ops import ScaleByWeight


def cohere(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    return _decoder(b, cfg, w, (True,) * cfg.num_hidden_layers, vision)


def cohere2(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    return _decoder(b, cfg, w, tuple(kind == SLIDING for kind in cfg.layer_types), vision)


def _decoder(
    b: Builder, cfg: ModelConfig, w: Names, rotates: tuple[bool, ...], vision: Vision | None
) -> Value:
    bias = cfg.flag("attention_bias")
    x = embed_tokens(b, cfg, w)
    if vision is not None:
        x = place_images(b, x)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.layer_norm(x, p / "input_layernorm", cfg.norm_eps, bias=False)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        if cfg.flag("use_qk_norm"):
            q = _norm_by_head(b, q, p / "self_attn.q_norm", cfg.norm_eps)
            k = _norm_by_head(b, k, p / "self_attn.k_norm", cfg.norm_eps)
        if rotates[i]:
            q, k = rotate(b, q, k, cfg.rope(interleaved=True))
        a = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(a, p / "self_attn.o_proj", cfg.hidden_size, bias=bias))
        x = b.add(x, gated_mlp(b, cfg, h, p / "mlp"))
    x = b.layer_norm(b.sampled_rows(x), w / "model.norm", cfg.norm_eps, bias=False)
    return b.scale(b.linear(x, w / cfg.lm_head, cfg.vocab_size), cfg.number("logit_scale"))


def _norm_by_head(b: Builder, x: Value, p: Names, eps: float) -> Value:
    """Return the LayerNorm of each head, times its own weight."""
    weight = WeightSpec(p / "weight", x.shape, (p / "weight",))
    return b.record(ScaleByWeight(b.value(x.shape), b.layer_norm(x, None, eps), weight)).out
