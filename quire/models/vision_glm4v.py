"""The vision towers of GLM-4.1V, 4.5V and 4.6V (arXiv:2507.01006), and of GLM-OCR: patches of two frames,
rotated by row and column, of which a convolution makes tokens. All but GLM-OCR's have learned positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError
from quire.images.learned import Learned
from quire.images.patches import MergedPatches
from quire.images.vision import Vision
from quire.models.config import Fields
from quire.models.pooling import attend_both
from quire.models.tower import (
    add_learned,
    clip_pixels,
    embed_patches,
    image_sizes,
    image_token,
    require_same,
    theta_of,
    tower_fields,
    unquantized,
)
from quire.program import Builder, Names, Value, WeightSpec, ops

_GLM4V = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}
_GLM_OCR = {
    **_GLM4V,
    "hidden_size": 1024,
    "attention_bias": True,
    "num_heads": 16,
    "out_hidden_size": 1536,
    "intermediate_size": 4096,
}
_TOKENS = {"glm4v": 151343, "glm4v_moe": 151363, "glm_ocr": 59280}  # that stand for an image
_SIZES = (112 * 112, 28 * 28 * 15000)  # the fewest and most pixels of all frames
_AXES, _THETA = 2, 10_000.0
_EPS = 1e-5  # of the norm of tokens


def glm4v_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of GLM-4.1V and GLM-4.6V-Flash."""
    return _learned_tower(raw, processor, _TOKENS["glm4v"])


def glm4v_moe_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of GLM-4.5V and GLM-4.6V, which is the same."""
    return _learned_tower(raw, processor, _TOKENS["glm4v_moe"])


def glm_ocr_tower(raw: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """Record the tower of GLM-OCR: biases, norms of query and key heads, no learned positions."""
    cfg = tower_fields(raw, _GLM_OCR)
    inner = cfg.size("intermediate_size"), cfg.size("out_hidden_size") * cfg.size("in_channels")
    return _tower(raw, processor, cfg, inner, None, _TOKENS["glm_ocr"])


def _learned_tower(raw: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Vision:
    """Record a tower whose layers are as wide as its tokens within, and these as intermediate_size says."""
    cfg = tower_fields(raw, _GLM4V)
    side = cfg.size("image_size") // cfg.size("patch_size")
    if not side:
        raise ConfigError("config.json: vision_config: an image smaller than a patch is not supported")
    inner = cfg.size("out_hidden_size"), cfg.size("intermediate_size")
    return _tower(raw, processor, cfg, inner, Learned(side, cubic=True), token)


def _tower(
    raw: Mapping[str, Any],
    processor: Mapping[str, Any],
    cfg: Fields,
    inner: tuple[int, int],
    learned: Learned | None,
    token: int,
) -> Vision:
    """Record a tower; `inner` are the widths within the MLPs of its layers, and of its tokens.

    Without `learned` positions, heads have norms and all matrices of layers may have biases.
    """
    width, heads, merge = cfg.size("hidden_size"), cfg.size("num_heads"), cfg.size("spatial_merge_size")
    patch, frames, channels = cfg.size("patch_size"), cfg.size("temporal_patch_size"), cfg.size("in_channels")
    if width % (2 * _AXES * heads) or channels != 3:
        raise ConfigError(f"config.json: vision_config: {width} numbers in {heads} heads are not supported")
    require_same(processor, {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames})
    w, b, pixels, eps = Names("model.visual"), Builder(), 3 * frames * patch**2, cfg.positive("rms_norm_eps")
    numbers, theta = 0 if learned is None else 2 * learned.number, theta_of(cfg, _THETA)
    given = b.record(ops.Patches(b.value((pixels + numbers + _AXES,)))).out
    x = embed_patches(b, given, w / "patch_embed.proj", (width, channels, frames, patch, patch))
    if learned is not None:
        x = b.rms_norm(x, w / "post_conv_layernorm", eps)
        name = w / "embeddings.position_embedding.weight"
        x = add_learned(b, x, b.slice(given, pixels, numbers), name, learned.side**2)
    places = b.slice(given, pixels + numbers, _AXES)
    for i in range(cfg.size("depth")):
        x = _layer(b, cfg, x, places, theta, w / f"blocks.{i}", inner[0], plain=learned is not None)
    out = _tokens(b, cfg, b.rms_norm(x, w / "post_layernorm", eps), w, inner[1])
    least, most = image_sizes(processor, _SIZES)
    sizes = -(-least // frames), max(1, most // frames)
    patching = MergedPatches(patch, merge, frames, learned, *sizes, *clip_pixels(processor), enlarged="once")
    return Vision(unquantized(b.program(out)), patching, image_token(raw, token))


def _layer(
    b: Builder, cfg: Fields, x: Value, places: Value, theta: float, p: Names, inner: int, *, plain: bool
) -> Value:
    """Record a layer; a `plain` one has no norms of heads, and biases of queries, keys and values at most."""
    width, heads, eps = x.width, cfg.size("num_heads"), cfg.positive("rms_norm_eps")
    bias = cfg.flag("attention_bias")
    rest = bias and not plain
    h = b.linear(b.rms_norm(x, p / "norm1", eps), p / "attn.qkv", 3 * width, bias=bias)
    q, k, v = (b.slice(h, n * width, (heads, width // heads)) for n in range(3))
    if not plain:
        q, k = (b.rms_norm(one, p / f"attn.{n}_norm", eps) for one, n in ((q, "q"), (k, "k")))
    q, k = (b.record(ops.RotaryAt(b.value(one.shape), one, places, theta)).out for one in (q, k))
    x = b.add(x, b.linear(attend_both(b, q, k, v), p / "attn.proj", width, bias=rest))
    return b.add(x, _gated(b, cfg, b.rms_norm(x, p / "norm2", eps), p / "mlp", inner, bias=rest))


def _tokens(b: Builder, cfg: Fields, x: Value, w: Names, inner: int) -> Value:
    """Return squares of patches as embeddings of the text model."""
    side, out = cfg.size("spatial_merge_size"), cfg.size("out_hidden_size")
    name, bias = w / "downsample.weight", w / "downsample.bias"
    weight = WeightSpec(
        name, (out, side**2 * x.width), (name,), stored=(out, x.width, side, side), turns=side**2
    )
    x = b.record(ops.JoinRows(b.value((side**2 * x.width,), "L"), x)).out
    x = b.record(ops.Linear(b.value((out,), "L"), x, weight, WeightSpec(bias, (out,), (bias,)))).out
    x = b.layer_norm(b.linear(x, w / "merger.proj", out), w / "merger.post_projection_norm", _EPS)
    return _gated(b, cfg, b.activation(x, "gelu"), w / "merger", inner, bias=False)


def _gated(b: Builder, cfg: Fields, x: Value, p: Names, inner: int, *, bias: bool) -> Value:
    gate, up = (b.linear(x, p / name, inner, bias=bias) for name in ("gate_proj", "up_proj"))
    h = b.gated_activation(gate, up, str(cfg.get("hidden_act")))
    return b.linear(h, p / "down_proj", x.width, bias=bias)
