"""GLM-4: half of each head rotated; later ones (0414, arXiv:2406.12793) have norms after each part, too, as
the text models of GLM-4.1V (2507.01006) and GLM-OCR.
"""

from __future__ import annotations

from quire.images.vision import Vision
from quire.models.config import ModelConfig
from quire.models.layers import embed_tokens, head, packed_gated_mlp, project_qkv, rotate
from quire.models.tower import place_images
from quire.models.vision import by_place
from quire.program import Builder, Names, Value

_SECTIONS = (8, 12, 12)  # of GLM-4.1V


def glm(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, cfg.flag("attention_bias"), norms_after=False)


def glm4(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, cfg.flag("attention_bias"))


def glm4v(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    return _decoder(b, cfg, w, True, vision)


def glm_ocr(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    return _decoder(b, cfg, w, False, vision)


def _decoder(
    b: Builder,
    cfg: ModelConfig,
    w: Names,
    bias: bool,
    vision: Vision | None = None,
    *,
    norms_after: bool = True,
) -> Value:
    def after(h: Value, name: Names) -> Value:
        return b.rms_norm(h, name, cfg.norm_eps) if norms_after else h

    x, rope = embed_tokens(b, cfg, w), cfg.rope(interleaved=True)
    if vision is not None:
        x, rope = place_images(b, x), by_place(rope, cfg, _SECTIONS, in_chunks=True)
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=bias)
        q, k = rotate(b, q, k, rope)
        h = b.linear(b.attention(q, k, v), p / "self_attn.o_proj", cfg.hidden_size)
        x = b.add(x, after(h, p / "post_self_attn_layernorm"))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        h = packed_gated_mlp(b, cfg, h, p / "mlp")
        x = b.add(x, after(h, p / "post_mlp_layernorm"))
    return head(b, cfg, x, w)
