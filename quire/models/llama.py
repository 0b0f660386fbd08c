"""Llama 1, 2, 3 (arXiv:2302.13971, 2307.09288, 2407.21783), Mistral (2310.06825), Ministral 3, Qwen2
(2407.10671), the text models of Qwen2-VL (2409.12191) and PaddleOCR-VL (2510.14528), SmolLM3, Seed-OSS, CWM
(2510.02387), Helium and Arcee: pre-norm blocks of attention and a gated MLP, which differ in biases, windows
and rope; Arcee's has no gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import ConfigError
from quire.images.vision import Vision
from quire.models.config import Fields, ModelConfig
from quire.models.layers import embed_tokens, gated_mlp, head, plain_mlp, project_qkv, query_growth, rotate
from quire.models.tower import place_images
from quire.models.vision import by_place
from quire.program import Builder, Names, Value

Mlp = Callable[[Builder, ModelConfig, Value, Names, bool], Value]


def llama(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    bias = cfg.flag("attention_bias")
    return _decoder(b, cfg, w, qkv_bias=bias, out_bias=bias, vision=vision)


def seed_oss(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    qkv_bias, out_bias = cfg.flag("attention_bias"), cfg.flag("attention_out_bias")
    return _decoder(b, cfg, w, qkv_bias=qkv_bias, out_bias=out_bias)


def qwen2(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    return _decoder(b, cfg, w, qkv_bias=True, out_bias=False, vision=vision)


def arcee(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    bias = cfg.flag("attention_bias")
    return _decoder(b, cfg, w, qkv_bias=bias, out_bias=bias, mlp=plain_mlp)


def helium(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, qkv_bias=cfg.flag("attention_bias"), interleaved=True)


# Default rope parameters of CWM.
_CWM_LLAMA3 = {
    "rope_theta": 1_000_000.0,
    "rope_type": "llama3",
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def cwm(b: Builder, cfg: ModelConfig, w: Names) -> Value:
    return _decoder(b, cfg, w, given=cfg.rope_parameters() or _CWM_LLAMA3)


_SECTIONS = (16, 24, 24)  # of Qwen2-VL and PaddleOCR-VL


def qwen2_vl(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    given = dict(cfg.rope_parameters())
    if given.get("rope_type", given.get("type")) == "mrope":
        given["rope_type"] = "default"
    return _decoder(b, cfg, w, qkv_bias=True, given=given, vision=vision, sections=_SECTIONS)


def paddleocr_vl(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    return _decoder(b, cfg, w, vision=vision, sections=_SECTIONS)


# Default rope parameters of Ministral 3.
_MINISTRAL3_YARN = {
    "rope_theta": 1_000_000.0,
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral3(b: Builder, cfg: ModelConfig, w: Names, vision: Vision | None = None) -> Value:
    """Record Mistral's layers with queries that grow with the position."""
    return _decoder(b, cfg, w, given=cfg.rope_parameters() or _MINISTRAL3_YARN, grows=True, vision=vision)


def _decoder(
    b: Builder,
    cfg: ModelConfig,
    w: Names,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    given: Mapping[str, Any] | None = None,
    grows: bool = False,
    vision: Vision | None = None,
    sections: tuple[int, ...] = (),
    mlp: Mlp = gated_mlp,
    interleaved: bool = False,
) -> Value:
    """Record the layers, with the rope parameters `given` or those of config.json.

    With `vision`, embeddings of images are in the places of their tokens; these rotate by three positions if
    `sections` says for how many pairs each.
    """
    given = cfg.rope_parameters() if given is None else given
    rope, growth = cfg.rope(given, interleaved=interleaved), query_growth(cfg, given) if grows else None
    x = embed_tokens(b, cfg, w)
    if vision is not None:
        x = place_images(b, x)
        rope = by_place(rope, cfg, sections, in_chunks=True) if sections else rope
    for i in range(cfg.num_hidden_layers):
        p = w / f"model.layers.{i}"
        h = b.rms_norm(x, p / "input_layernorm", cfg.norm_eps)
        q, k, v = project_qkv(b, cfg, h, p / "self_attn", bias=qkv_bias)
        if rotates(cfg, i):
            q, k = rotate(b, q, k, rope)
        if growth is not None:
            q = b.scale_by_position(q, *growth)
        h = b.attention(q, k, v, window=cfg.window(i))
        x = b.add(x, b.linear(h, p / "self_attn.o_proj", cfg.hidden_size, bias=out_bias))
        h = b.rms_norm(x, p / "post_attention_layernorm", cfg.norm_eps)
        x = b.add(x, mlp(b, cfg, h, p / "mlp", cfg.flag("mlp_bias")))
    return head(b, cfg, x, w)


def rotates(fields: Fields, layer: int) -> bool:
    """Return False for layers without rope: in SmolLM3 every fourth, or those with a 0 in no_rope_layers."""
    if fields.get("no_rope_layers") is not None:
        stated = fields.integers("no_rope_layers")
        if layer >= len(stated):
            raise ConfigError(f"config.json: no_rope_layers has {len(stated)} entries, fewer than layers")
        return bool(stated[layer])
    if fields.get("no_rope_layer_interval") is None:
        return True
    return (layer + 1) % fields.size("no_rope_layer_interval") != 0
