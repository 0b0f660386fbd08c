"""GLM-4: half of each head rotated; later ones (0414, arXiv:2406.12793) have norms after each part, too."""

from __future__ import annotations

from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, head, packed_gated_mlp, project_qkv, rotate
from quire.program import Builder, Names, Value


def glm(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, norms_after=False)


def glm4(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, norms_after=True)


def _decoder(b: Builder, cfg: ModelConfig, w: Names, *, norms_after: bool) -> Value:
    def after(h: Value, name: Names) -> Value:
        return b.rms_norm(h, name, cfg.norm_eps) if norms_after else h

    x = embed_tokens(b, cfg, w)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=cfg.flag("attention_bias"))
        q, k = rotate(b, q, k, cfg.rope(interleaved=True))
        h = b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size)
        x = b.add(x, after(h, p / "post_self_attn_layernorm"))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        h = packed_gated_mlp(b, cfg, h, p / "mlp")
        x = b.add(x, after(h, p / "post_mlp_layernorm"))
    return head(b, cfg, x, w)
